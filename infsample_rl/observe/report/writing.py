"""Run folders in, one HTML file out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infsample_rl.observe.files import write_atomically
from infsample_rl.observe.report.page import page_of, render
from infsample_rl.observe.report.run_folder import read_run


def write_report(run_dirs: Sequence[Path], out: Path) -> list[str]:
    """Write the page of one run, or of several compared, in one move; returns what was missing or damaged. ValueError
    for folders without a run."""
    runs = [read_run(path, label) for path, label in zip(run_dirs, labels(run_dirs), strict=True)]
    page = page_of(runs)
    write_atomically(out, render(page))
    return [note if len(runs) == 1 else f"{label}: {note}" for label, note in page["notes"]]


def labels(run_dirs: Sequence[Path]) -> list[str]:
    """Folder names, with as many of their parents as tell them apart: a/x, b/x -> "a/x", "b/x"; a/x, a/y -> "x",
    "y"."""
    parts = [path.resolve().parts for path in run_dirs]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-count:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    raise ValueError("the same RUN is given twice")

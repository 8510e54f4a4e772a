"""A run on one page, or several compared: python -m infsample_rl report RUN [RUN...] [out=FILE]

RUN   a run folder: finished, going on, resumed or dead; what is missing is said on the page
out   the page, one HTML file that needs no network; without it RUN/report.html, of several runs comparison.html here

Exit codes: 0 done; 1 it failed; 2 an input is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

from infsample_rl.config.command_line import run_command
from infsample_rl.observe.report.page import write_report


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command(_run, arguments, usage=__doc__)


def _run(arguments: list[str]) -> int:
    runs, out = parse(arguments)
    for note in write_report(runs, out):
        print(f"note: {note}", file=sys.stderr)
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0


def parse(arguments: list[str]) -> tuple[list[Path], Path]:
    """Run folders and the page's path. ValueError for what is neither."""
    runs = [Path(argument) for argument in arguments if not argument.startswith(("out=", "-"))]
    unknown = [argument for argument in arguments if argument.startswith("-")]
    if unknown or not runs:
        wrong = f"{unknown[0]} is unknown" if unknown else "no RUN is given"
        raise ValueError(f"{wrong}: python -m infsample_rl report RUN [RUN...] [out=FILE]")
    given = [argument.removeprefix("out=") for argument in arguments if argument.startswith("out=")]
    if len(given) > 1 or given == [""]:
        raise ValueError(f"out=FILE must be given once, got {' '.join(f'out={name}' for name in given)}")
    if not given:
        return runs, runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html")
    out = Path(given[0])
    if out.is_dir() or not out.resolve().parent.is_dir():
        raise ValueError(f"out={out} must be a file in a folder that is there")
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"out={out} must end in .html: it is a page")
    return runs, out

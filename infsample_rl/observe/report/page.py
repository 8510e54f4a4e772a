"""Run folders in, one HTML file out.

Everything a model wrote reaches the browser as JSON in a script element of type application/json, in which `<` is
written \\u003c, and is put on the page as text nodes by assets/*.js. The page's content security policy allows its own
script and style, by their hashes, and nothing else: no network, no inline handlers.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from infsample_rl.observe.files import write_atomically
from infsample_rl.observe.report import curves, facts
from infsample_rl.observe.report.run_folder import RunFolder, guarded, read_run
from infsample_rl.observe.report.samples import choose_completions, choose_timelines

SCRIPTS = ("dom.js", "chart.js", "timeline.js", "completions.js", "page.js")
Page = dict[str, Any]


def write_report(run_dirs: Sequence[Path], out: Path) -> list[str]:
    """Write the page of one run, or of several compared, in one move; returns what was missing or damaged. ValueError
    for folders without a run."""
    runs = [read_run(path, label) for path, label in zip(run_dirs, _labels(run_dirs), strict=True)]
    page = page_of(runs)
    write_atomically(out, render(page))
    return [note if len(runs) == 1 else f"{label}: {note}" for label, note in page["notes"]]


def _labels(run_dirs: Sequence[Path]) -> list[str]:
    """Folder names, with as many of their parents as tell them apart: a/x, b/x -> "a/x", "b/x"; a/x, a/y -> "x",
    "y"."""
    parts = [path.resolve().parts for path in run_dirs]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-count:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    raise ValueError("the same RUN is given twice")


def page_of(runs: Sequence[RunFolder]) -> Page:
    """What is on the page, as plain values: one run in detail, or several beside each other."""
    alone = len(runs) == 1
    page: Page = {
        "title": runs[0].name if alone else f"{len(runs)} runs compared",
        "description": guarded("config.yaml", runs[0].notes, lambda: facts.description(runs[0])) if alone else "",
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "runs": [{"label": run.label, "folder": str(run.path), "warnings": run.warnings} for run in runs],
        **curves.sections(runs),
        "metrics": curves.every_metric(runs),
        "figures": facts.beside([facts.figures_of(run) for run in runs]),
        "versions": facts.beside([run.versions for run in runs]),
    }
    page |= _detail(runs[0]) if alone else {"differences": facts.setting_differences(runs)}
    page["notes"] = [[run.label, note] for run in runs for note in run.notes]  # last: the parts above add to them
    return page


def _detail(run: RunFolder) -> Page:
    samples, completions, notes = run.path / "samples.jsonl", run.path / "completions.jsonl", run.notes
    return {
        "settings": facts.settings_rows(run),
        "plan": guarded("plan.json", notes, lambda: facts.plan_table(run)),
        "phases": curves.phase_chart(run),
        "timelines": guarded(samples.name, notes, lambda: choose_timelines(samples)),
        "completions": guarded(completions.name, notes, lambda: choose_completions(completions, notes)),
    }


def render(page: Page) -> str:
    """The whole HTML file."""
    assets = files("infsample_rl.observe.report") / "assets"
    style = (assets / "page.css").read_text(encoding="utf-8")
    script = "'use strict';\n" + "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(page['title'])}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        "<noscript>This page draws itself with the script it holds; allow scripts to see it.</noscript>\n"
        f'<script type="application/json" id="page">{embedded(page)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def embedded(value: Any) -> str:
    """JSON that is the same inside an HTML script element: nothing in it can end the element or begin another."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

"""What is on the page, as plain values, and the page as one HTML file.

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
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

from infsample_rl.observe.report.completions import choose_completions
from infsample_rl.observe.report.curves import (
    LEARNING,
    POLICY,
    PREDICTOR,
    SPEED,
    charts,
    component_curves,
    other_metrics,
)
from infsample_rl.observe.report.facts import (
    description,
    figure_rows,
    headline,
    setting_differences,
    settings_rows,
    state,
    version_rows,
)
from infsample_rl.observe.report.memory import memory_charts, plan_table
from infsample_rl.observe.report.run_folder import RunFolder
from infsample_rl.observe.report.step_phases import phase_chart, traced_steps
from infsample_rl.observe.report.timelines import choose_timelines

SCRIPTS = ("dom.js", "chart.js", "timeline.js", "phases.js", "completions.js", "page.js")
Page = dict[str, Any]


def page_of(runs: Sequence[RunFolder]) -> Page:
    """One run in detail, or several beside each other."""
    alone = len(runs) == 1
    page: Page = {
        "title": runs[0].name if alone else f"{len(runs)} runs compared",
        "description": description(runs[0]) if alone else "",
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "runs": [
            {
                "label": run.label,
                "name": run.name,
                "folder": str(run.path),
                "state": state(run),
                "warnings": run.warnings,
            }
            for run in runs
        ],
        "learning": charts(runs, [*LEARNING, *component_curves(runs)]),
        "policy": charts(runs, POLICY),
        "speed": charts(runs, SPEED),
        "predictor": charts(runs, PREDICTOR),
        "memory": memory_charts(runs),
        "metrics": other_metrics(runs),
        "figures": figure_rows(runs),
        "versions": version_rows(runs),
    }
    page |= _detail(runs[0]) if alone else {"differences": setting_differences(runs)}
    page["notes"] = [[run.label, note] for run in runs for note in run.notes]  # last: the parts above add to them
    return page


def _detail(run: RunFolder) -> Page:
    notes = run.notes
    return {
        "headline": headline(run),
        "settings": settings_rows(run),
        "plan": plan_table(run),
        "phases": phase_chart(run),
        "trace": _guarded("trace.json", notes, lambda: traced_steps(run.path, notes)),
        "timelines": _guarded("samples.jsonl", notes, lambda: choose_timelines(run.path, notes)),
        "completions": _guarded("completions.jsonl", notes, lambda: choose_completions(run.path, notes)),
    }


def _guarded(name: str, notes: list[str], read: Callable[[], Any]) -> Any:
    """What `read` returns; None, said in a note, when the file holds what nobody has thought of: the rest of the page
    is of use without it."""
    try:
        return read()
    except Exception as error:
        notes.append(f"{name} could not be read ({type(error).__name__}: {error})")
        return None


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

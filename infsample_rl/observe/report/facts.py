"""Tables of the page: settings and how they differ, versions, the plan, figures of every run."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from infsample_rl.config.fields import default_of
from infsample_rl.config.loading import SECTIONS
from infsample_rl.observe.metric_names import METRICS
from infsample_rl.observe.report.run_folder import Record, RunFolder
from infsample_rl.observe.screen import duration
from infsample_rl.observe.summary import accuracy_text, before_after, sampled_text, series

ABSENT = "–"
AT_THE_END = {  # what a metric's last value is called, and its unit
    "entropy": ("learner/entropy", "nats per token"),
    "KL": ("learner/kl", "nats per token"),
    "mismatch": ("learner/logprob_diff_mean", "nats"),
    "restarts": ("cluster/restarts", "workers"),
}


def settings_rows(run: RunFolder) -> list[list[Any]]:
    """[name, value, default where it differs, else None] of every setting in config.yaml."""
    specs = {f"{name}.{spec.name}": spec for name, section in SECTIONS.items() for spec in dataclasses.fields(section)}
    rows: list[list[Any]] = []
    for name, value in run.settings.items():
        spec = specs.get(name)
        default = text_of(value if spec is None else default_of(spec))
        rows.append([name, text_of(value), None if default == text_of(value) else default])
    return rows


def setting_differences(runs: Sequence[RunFolder]) -> list[list[str]]:
    """Of the settings that are not equal in all, where the run wrote itself apart."""
    rows = beside([{name: value for name, value in run.settings.items() if name != "run.dir"} for run in runs])
    return [row for row in rows if len(set(row[1:])) > 1]


def beside(columns: Sequence[dict[str, Any]]) -> list[list[str]]:
    """[name, text of the value in each column] of all names that some column has."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(text_of(column[name]) if name in column else ABSENT for column in columns)] for name in names]


def figures_of(run: RunFolder) -> dict[str, str]:
    """What came out."""
    steps = run.metrics_of_steps
    figures = {"steps": f"{run.last_step:,} of {run.total_steps or '?'} ({state(run)})"}
    if steps:
        seconds = series(steps, "timing/step")[1] or [0.0]
        figures |= {
            "held-out accuracy": accuracy_text(run.metrics),
            "reward": before_after(steps, "reward/mean", "{:.3f}"),
            "response length": before_after(steps, "response/length_mean", "{:.1f}", " tokens"),
            "sampled": sampled_text(steps),
            "a step": f"{sum(seconds) / len(seconds):,.2f} s (mean; {duration(sum(seconds))} of steps in all)",
            "failed rewards": f"{sum(series(steps, 'reward/failed')[1]):,.0f} (in all steps)",
        }
    for title, (name, unit) in AT_THE_END.items():
        values = series(steps, name)[1]
        figures |= {title: f"{values[-1]:.4g} {unit} (at the end)"} if values else {}
    return figures


def state(run: RunFolder) -> str:
    """How far a run is: finished, or when it last wrote a step."""
    if not run.metrics:
        return "no step yet"
    if run.total_steps is not None and run.last_step >= run.total_steps:
        return "finished"
    since = time.time() - (run.path / "metrics.jsonl").stat().st_mtime
    return f"last step written {duration(max(0.0, since))} ago"


def description(run: RunFolder) -> str:
    """Model, data, prompts, G and schedule in a line."""
    get = run.settings.get
    paths = [get("model.path"), get("data.source"), *(entry["source"] for entry in get("data.sources") or [])]
    model, *sources = (str(path or "").rstrip("/").split("/")[-1] for path in paths)
    source = " + ".join(filter(None, sources))
    prompts = f"{get('data.prompts_per_step')} prompts x G = {get('rollout.group_size')}"
    return " · ".join(filter(None, [model, source, prompts if source else "", str(get("rollout.schedule") or "")]))


def text_of(value: Any) -> str:
    """A setting as one would write it on the command line: null, true, 0.5, [a, b]."""
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value, ensure_ascii=False, default=dataclasses.asdict)


def plan_table(run: RunFolder) -> list[Record]:
    """plan.json: [{"role", "lines": [[name, bytes]], "sum", "measured": [[metric, highest value]]}] of every
    process."""
    return [
        {
            "role": process["role"],
            "lines": [[line["name"], line["bytes"]] for line in process["lines"]],
            "sum": process["sum_bytes"],
            "measured": _peaks(process["role"], run),
        }
        for process in run.plan.get("processes", [])
    ]


def _peaks(role: str, run: RunFolder) -> list[list[Any]]:
    """The highest value over the run of the metric memory/... that names the role, or both that share a process."""
    roles = ("learner", "rollout") if role == "colocated" else (role,)
    names = [name for name in METRICS if name.startswith("memory/") and any(each in name for each in roles)]
    found = [(name, series(run.metrics, name)[1]) for name in names]
    return [[name, max(values)] for name, values in found if values]

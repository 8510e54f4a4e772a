"""Memory: what the plan said of every process, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infsample_rl.observe.report.curves import Chart, Curve, charts, metric_names
from infsample_rl.observe.report.run_folder import Record, RunFolder, number

KV = Curve(
    "KV cache of a rollout worker",
    "bytes",
    {"rollout/peak_kv_bytes": "most held at a time", "rollout/kv_pool_bytes": "the pool"},
)
TRAFFIC = Curve("Weights to the engines", "bytes", {"weight_sync/bytes": "a version"})


def memory_charts(runs: Sequence[RunFolder]) -> list[Chart]:
    """The KV pool, every metric named memory/..., and what a version of the weights weighs."""
    names = [name for name in metric_names(runs) if name.startswith("memory/")]
    measured = [
        Curve(_words(name), "bytes" if name.endswith("bytes") else name.rsplit("_", 1)[-1], {name: "measured"})
        for name in names
    ]
    return charts(runs, [KV, *measured, TRAFFIC])


def plan_table(run: RunFolder) -> list[Record]:
    """plan.json, checked: [{"role", "lines": [[name, bytes]], "sum", "measured": [[metric, highest value]]}]. A role's
    metrics name it."""
    processes = run.plan.get("processes")
    processes = processes if isinstance(processes, list) else []
    return [_process(process, run) for process in processes if isinstance(process, dict)]


def _process(process: Record, run: RunFolder) -> Record:
    role, lines = str(process.get("role", "process")), process.get("lines")
    lines = [line for line in lines if isinstance(line, dict)] if isinstance(lines, list) else []
    found = [[str(line.get("name", "")), number(line.get("bytes"))] for line in lines]
    return {"role": role, "lines": found, "sum": number(process.get("sum_bytes")), "measured": _measured(role, run)}


def _measured(role: str, run: RunFolder) -> list[list[Any]]:
    """The highest value over the run of every metric memory/... in bytes that names the role, or both that share a
    process."""
    # "rollout worker 0" is measured by memory/rollout_peak_bytes
    roles = ("learner", "rollout") if role == "colocated" else role.split()[:1]
    measured = [name for name in metric_names([run]) if name.startswith("memory/") and name.endswith("bytes")]
    names = [name for name in measured if any(each in name for each in roles)]
    return [
        [_words(name), max(record[name] for record in run.metrics if record.get(name) is not None)] for name in names
    ]


def _words(name: str) -> str:
    """ "memory/rollout_peak_bytes" -> "Rollout peak"."""
    text = name.partition("/")[2].removesuffix("_bytes").replace("_", " ")
    return text[:1].upper() + text[1:]

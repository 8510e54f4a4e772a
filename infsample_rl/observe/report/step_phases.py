"""Where a step's time goes: its phases over the run from metrics, and for the steps in trace.json every worker's phases
and the critical path."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infsample_rl.observe.critical_path import critical_path, intervals_of, path_line
from infsample_rl.observe.phases import IDLE
from infsample_rl.observe.report.curves import Chart, Curve, charts
from infsample_rl.observe.report.run_folder import TRACE, RunFolder, number
from infsample_rl.observe.timeline import MOST_WORKERS as MOST_OF_A_ROLE
from infsample_rl.types import Phase, WorkerPhases

PARTS = {
    "timing/rollout": "sampling",
    "timing/backward_after_rollout": "backward after the last sample",
    "timing/update": "optimizer",
    "timing/weight_sync": "weights to the engines",
}
MOST_BARS = 12_000  # of all steps on the page together
MOST_WORKERS = 48


def phase_chart(run: RunFolder) -> Chart | None:
    """Seconds of a step, stacked; None where no step has them. With run.max_staleness=1 sampling is beside the update:
    lines, not a stack."""
    overlaps = bool(run.setting("run.max_staleness"))
    whole, rest = "timing/step", "rest"
    labels = PARTS | ({whole: "the step"} if overlaps else {rest: "the rest: driver, records"})
    seconds = []
    for record in run.metrics:
        if record.get(whole) is not None:
            parts = {name: record.get(name) or 0.0 for name in PARTS}
            parts |= {"step": record["step"], whole: record[whole], rest: max(0.0, record[whole] - sum(parts.values()))}
            seconds.append(parts)
    curve = Curve("Phases of a step", "s", labels, only_if_not_zero=True)
    found = charts([dataclasses.replace(run, metrics=seconds)], [curve])
    if not found:
        return None
    lines = [{name: line[name] for name in ("label", "colour", "x", "y")} for line in found[0]["lines"]]
    return found[0] | {"stack": not overlaps, "lines": lines}


def traced_steps(run_dir: Path, notes: list[str]) -> dict[str, Any] | None:
    """The newest steps of trace.json: {"names": phase names, "steps": [{"step", "seconds", "workers", "bars", "path",
    "line"}]}; None: none there.

    A bar is [worker, name, start, seconds, depth], of the path [worker or -1, name, start, seconds]; times in seconds
    of the step.
    """
    try:
        events = json.loads((run_dir / TRACE).read_text(encoding="utf-8"))
        steps = _by_step(events)
    except FileNotFoundError:
        notes.append(f"{TRACE} is missing: no phases of single steps")
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        notes.append(f"{TRACE} cannot be read ({type(error).__name__})")
        return None
    names: dict[str, int] = {}
    drawn: list[dict[str, Any]] = []
    for step in sorted(steps, reverse=True):
        found = _draw(step, steps[step], names, MOST_BARS - sum(len(other["bars"]) for other in drawn))
        if found is not None:
            drawn.append(found)
        if sum(len(other["bars"]) for other in drawn) >= MOST_BARS:
            break
    if not drawn and events:
        notes.append(f"{TRACE} holds no whole step")
    return {"names": list(names), "steps": drawn[::-1]} if drawn else None


def _by_step(events: list[dict[str, Any]]) -> dict[int, list[tuple[str, int, Phase]]]:
    """(role, process, phase) of every step; the step itself is the driver's phase "step N"."""
    steps: dict[int, list[tuple[str, int, Phase]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and number(event["ts"]) is not None and number(event["dur"]) is not None:
            phase = Phase(str(event["name"]), event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, int(event["tid"]))
            steps[int(event["args"]["step"])].append((str(event["cat"]), int(event["pid"]), phase))
    return steps


def _draw(
    step: int, events: Sequence[tuple[str, int, Phase]], names: dict[str, int], most: int
) -> dict[str, Any] | None:
    whole = next((phase for role, _, phase in events if role == "driver" and phase.name == f"step {step}"), None)
    if whole is None:
        return None
    by_worker: dict[tuple[str, int], list[Phase]] = defaultdict(list)
    for role, process, phase in events:
        if phase.name not in (IDLE, whole.name) and phase.start < whole.end and phase.end > whole.start:
            by_worker[role, process].append(phase)
    path = critical_path(
        intervals_of(
            WorkerPhases(role, process, "", phases, whole.end) for (role, process), phases in by_worker.items()
        ),
        whole.start,
        whole.end,
    )
    on_path = {interval.worker for interval in path}
    order = sorted(by_worker, key=lambda key: key[1])  # process numbers go by role
    kept = sorted(order, key=lambda key: f"{key[0]} {key[1]}" not in on_path)[:MOST_WORKERS]
    order = [key for key in order if key in kept]
    place = {f"{role} {process}": index for index, (role, process) in enumerate(order)}

    def span(name: str, start: float, end: float) -> list[Any]:
        number_of_name = names.setdefault(name, len(names))
        return [number_of_name, round(start - whole.start, 4), round(end - start, 4)]

    bars = [
        [index, *span(phase.name, phase.start, phase.end), depth]
        for index, key in enumerate(order)
        for phase, depth in _with_depth(by_worker[key])
    ]
    if len(bars) > most:
        bars = sorted(sorted(bars, key=lambda bar: -bar[3])[: max(most, 0)], key=lambda bar: (bar[0], bar[4], bar[2]))
    return {
        "step": step,
        "seconds": round(whole.end - whole.start, 4),
        "workers": [_worker_name(f"{role} {process}") for role, process in order],
        "left_out": len(by_worker) - len(order),
        "bars": bars,
        "path": [[place.get(part.worker, -1), *span(part.name, part.start, part.end)] for part in path],
        "line": path_line([interval._replace(worker=_worker_name(interval.worker)) for interval in path]),
    }


def _with_depth(phases: list[Phase]) -> list[tuple[Phase, int]]:
    """Phases with the number of phases around them, in their thread."""
    found, around = [], defaultdict[int, list[Phase]](list)
    for phase in sorted(phases, key=lambda phase: (phase.start, -phase.end)):
        outer = [other for other in around[phase.thread] if other.end > phase.start]
        around[phase.thread] = [*outer, phase]
        found.append((phase, len(outer)))
    return found


def _worker_name(worker: str) -> str:
    """ "rollout 100002" -> "rollout 1": a process number of the trace is (place of the role) x MOST_OF_A_ROLE + index +
    1."""
    role, _, process = worker.rpartition(" ")
    return worker if not role else role if role == "driver" else f"{role} {(int(process) - 1) % MOST_OF_A_ROLE}"

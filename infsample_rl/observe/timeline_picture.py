"""What every process did in the newest step of trace.json, as a picture for trackers and the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from infsample_rl.observe.trace import read_trace

MOST_ROWS = 32  # processes shown; of more, every n-th
IDLE = "idle"
COLOURS = {
    "decode": "#1f5fa8", "prefill": "#7fb0e0", "reward": "#d1620a", "reference": "#8a63b5", "forward": "#7cc08a",
    "backward": "#2a7f4f",
    "optimizer": "#b02a4c", "sync": "#e0b000", "learn": "#5c7080", "evaluate": "#9aa5ad", "save": "#3d3d3d",
    "setup": "#c9c9c9",
    "sample": "#dfe6ec", "update": "#c3cdd6", "publish": "#efe3b0",  # of the driver: others' work seen from outside
}  # fmt: skip
OTHER = "#bdbdbd"


def newest_step(path: Path) -> tuple[int, dict[str, list[dict[str, Any]]]] | None:
    """The number of the newest drawn step of a trace and its events by process, in the trace's order; None: there is
    none (yet)."""
    events = read_trace(path)
    complete = [event for event in events if event.get("ph") == "X"]
    if not complete:
        return None
    step = max(event["args"]["step"] for event in complete)
    titles = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    found: dict[str, list[dict[str, Any]]] = {
        titles.get(pid, str(pid)): [] for pid in sorted({event["pid"] for event in complete})
    }
    for event in complete:
        if event["args"]["step"] == step and event["name"] != IDLE:
            found[titles.get(event["pid"], str(event["pid"]))].append(event)
    return step, found


def draw_timeline(step: int, processes: dict[str, list[dict[str, Any]]]) -> np.ndarray:
    """A picture, uint8 [height, width, 3]: a row for each process, time from left to right, a colour for each phase."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display and no pyplot state
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    every = -(-len(processes) // MOST_ROWS)
    shown = dict(list(processes.items())[::every])
    start = min((event["ts"] for events in processes.values() for event in events), default=0)
    figure = Figure(figsize=(10, 1.4 + 0.32 * len(shown)), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    seen: dict[str, str] = {}
    for row, events in enumerate(shown.values()):
        for event in sorted(events, key=lambda event: -event["dur"]):  # inner phases over outer ones
            phase = event["name"]
            if phase.startswith("step "):
                continue
            seen[phase] = COLOURS.get(phase, OTHER)
            axes.broken_barh(
                [((event["ts"] - start) / 1e6, event["dur"] / 1e6)], (row - 0.4, 0.8), facecolors=seen[phase]
            )
    axes.set_yticks(range(len(shown)), shown, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(
        f"seconds of step {step}" + (f"; every {every}th of {len(processes)} processes" if every > 1 else "")
    )
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour, label=phase) for phase, colour in seen.items()]
    if handles:
        figure.legend(handles=handles, loc="outside upper center", ncols=8, fontsize=8, frameon=False)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()

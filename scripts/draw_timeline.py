"""What every process did in the newest step of a trace: python scripts/draw_timeline.py RUN_FOLDER OUT.png"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

COLOURS = {
    "decode": "#1f5fa8", "prefill": "#7fb0e0", "reward": "#d1620a", "reference": "#8a63b5", "forward": "#7cc08a",
    "backward": "#2a7f4f", "optimizer": "#b02a4c", "sync": "#e0b000", "learn": "#5c7080",
    "wait": "#f3f1ec",
    "sample": "#dfe6ec", "update": "#c3cdd6", "publish": "#efe3b0",  # of the driver: others' work seen from outside
}  # fmt: skip
OTHER = "#bdbdbd"


def main() -> int:
    """Draw it; 2 where there is no trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    path = arguments.run / "trace.json"
    events = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    phases = [event for event in events if event["ph"] == "X" and not event["name"].startswith("step ")]
    if not phases:
        print(f"draw_timeline: {path} holds no step", file=sys.stderr)
        return 2
    step = max(event["args"]["step"] for event in phases if event["cat"] != "driver")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    rows = {pid: row for row, pid in enumerate(sorted(names))}
    shown = [event for event in phases if event["args"]["step"] == step]
    start = min(event["ts"] for event in shown)
    figure = Figure(figsize=(10, 1.4 + 0.32 * len(rows)), dpi=110, layout="constrained")
    axes = figure.subplots()
    for event in sorted(shown, key=lambda event: -event["dur"]):  # inner phases over outer ones
        bar = (event["ts"] - start) / 1e6, event["dur"] / 1e6
        axes.broken_barh([bar], (rows[event["pid"]] - 0.4, 0.8), facecolors=COLOURS.get(event["name"], OTHER))
    axes.set_yticks(list(rows.values()), [names[pid] for pid in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds of step {step}")
    axes.spines[["top", "right"]].set_visible(False)
    seen = dict.fromkeys(event["name"] for event in shown)
    handles = [Patch(color=COLOURS.get(phase, OTHER), label=phase) for phase in seen]
    figure.legend(handles=handles, loc="outside upper center", ncols=8, fontsize=8, frameon=False)
    figure.savefig(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

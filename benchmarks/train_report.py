"""Training steps beside a rival's: what each side did, a table, and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figures import new_figure, save
from infsample_rl.commands.measurements import print_table

COLUMNS = {
    "name": "name",
    "group_size": "G",
    "seconds_per_step": "s a step",
    "generate": "generate s",
    "learn": "learn s",
    "optimizer": "optimizer s",
    "tokens_per_s": "tokens/s",
    "peak_memory_bytes": "peak MB",
    "peak_process_bytes": "process MB",
    "learner_share_of_peak": "of peak FLOP/s",
}
COLORS = {"ours": "#1f77b4", "ours/lean": "#8fbbdc", "trl": "#777777", "trl/lean": "#bbbbbb"}
# with their hatches; reward and the rest are too short to be seen
PHASES = {"generate": "", "learn": "///", "optimizer": "xxx"}


def print_training(records: list[dict[str, Any]]) -> None:
    """The table, and what every measurement was run with."""
    print_table([record | record["phases"] for record in records], COLUMNS)
    for record in records:
        settings = ", ".join(f"{name}={value}" for name, value in record["settings"].items() if value is not None)
        print(f"{record['name']}, G = {record['group_size']}: {settings}")
    for record in records[:1]:
        on_cpu = record["device"] == "cpu"
        counted = "highest resident set less what the imports take" if on_cpu else "torch's max_memory_allocated"
        print(
            f"{record['device']}, {record['threads']} threads, {record['workload']['dtype']}; peak: {counted}; MB of "
            "1e6 bytes"
        )
    for name, versions in {record["name"].split("/")[0]: record["versions"] for record in records}.items():
        print(f"{name}: " + ", ".join(f"{package} {version}" for package, version in versions.items()))


def draw_training(records: list[dict[str, Any]], folder: Path) -> Path:
    """Write train.png: seconds of a step by phase, and peak memory, of every side at every G."""
    figure, ((left, right),) = new_figure(9, 3.6, columns=2)
    groups = sorted({record["group_size"] for record in records})
    names = [name for name in COLORS if any(record["name"] == name for record in records)]
    width = 0.8 / max(1, len(names))
    for record in records:
        place = groups.index(record["group_size"]) + (names.index(record["name"]) - (len(names) - 1) / 2) * width
        bottom, style = 0.0, {"width": 0.92 * width, "color": COLORS[record["name"]], "edgecolor": "white"}
        for phase, hatch in PHASES.items():
            left.bar(place, record["phases"][phase], bottom=bottom, hatch=hatch, **style)
            bottom += record["phases"][phase]
        peak = record["peak_memory_bytes"] / 1e9
        right.bar(place, peak, **style)
        for axes, height, value in ((left, bottom, record["seconds_per_step"]), (right, peak, peak)):
            axes.text(place, height, f"{value:.1f}", ha="center", va="bottom", fontsize=6)
    for axes, label in ((left, "seconds of a step"), (right, "peak memory (GB)")):
        axes.set_xticks(range(len(groups)), [f"G = {group}" for group in groups])
        axes.set_ylabel(label)
        axes.margins(y=0.3)  # room for the legend
    from matplotlib.patches import Patch

    hatches = [
        Patch(facecolor="#dddddd", edgecolor="white", hatch=hatch, label=phase) for phase, hatch in PHASES.items()
    ]
    left.legend(handles=hatches, ncols=3, fontsize=7)
    right.legend(handles=[Patch(facecolor=COLORS[name], label=name) for name in names], ncols=2, fontsize=7)
    return save(figure, folder / "train.png")

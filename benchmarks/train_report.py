"""Training steps beside a rival's: what each side did, a table, and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    figure, (left, right) = _new_figure()
    groups = sorted({record["group_size"] for record in records})
    names = [name for name in COLORS if any(record["name"] == name for record in records)]
    width = 0.8 / max(1, len(names))
    for record in records:
        place = groups.index(record["group_size"]) + (names.index(record["name"]) - (len(names) - 1) / 2) * width
        bottom, style = 0.0, {"width": 0.92 * width, "color": COLORS[record["name"]], "edgecolor": "white"}
        for phase, hatch in PHASES.items():
            left.bar(place, record["phases"][phase], bottom=bottom, hatch=hatch, **style)
            bottom += record["phases"][phase]
        left.text(place, bottom, f"{record['seconds_per_step']:.1f}", ha="center", va="bottom", fontsize=6)
        right.bar(place, record["peak_memory_bytes"] / 1e9, **style)
        right.text(
            place,
            record["peak_memory_bytes"] / 1e9,
            f"{record['peak_memory_bytes'] / 1e9:.1f}",
            ha="center",
            va="bottom",
            fontsize=6,
        )
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
    return _save(figure, folder / "train.png")


def draw_learning(records: list[dict[str, Any]], folder: Path) -> Path:
    """Write train_learning.png: mean reward of every step over steps and over wall-clock time, and means of three
    steps."""
    figure, panels = _new_figure()
    for record in records:
        steps, rewards = list(range(1, len(record["reward"]) + 1)), record["reward"]
        smooth = [sum(rewards[max(0, end - 3) : end]) / len(rewards[max(0, end - 3) : end]) for end in steps]
        for axes, places in zip(panels, (steps, [seconds / 60 for seconds in record["wall_clock_s"]]), strict=True):
            axes.plot(places, rewards, "o", color=COLORS[record["name"]], alpha=0.4, markersize=4)
            axes.plot(places, smooth, "-", color=COLORS[record["name"]], label=f"{record['name']}, mean of 3 steps")
    for axes, label in zip(panels, ("step", "minutes"), strict=True):
        axes.set_xlabel(label)
        axes.set_ylabel("mean reward")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7)
    return _save(figure, folder / "train_learning.png")


def _new_figure() -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display and no pyplot state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path

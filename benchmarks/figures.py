"""The columns of the benchmarks' tables and their figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.workload import ModelOptions
from infsample_rl.config.command_line import print_table

ENGINE_COLUMNS = {
    "name": "name",
    "seconds": "s",
    "ratio_said": "first / this",
    "tokens": "tokens",
    "tokens_per_s": "tokens/s",
    "running_steps": "steps",
    "tokens_per_row_step": "tokens/row-step",
    "second_seconds": "second epoch s",
    "second_steps": "steps",
    "peak_kv_bytes": "peak KV MB",
    "kv_pool_bytes": "KV pool MB",
    "peak_memory_bytes": "peak MB",
    "roofline_fraction": "of roofline",
    "c0": "c0 ms",
    "c1": "c1 ms/row",
    "c2": "c2 us/parked",
}
TURNS_COLUMNS = {
    "name": "name",
    "seconds": "s",
    "ratio_said": "first / this",
    "tokens_per_s": "sampled tokens/s",
    "trajectories": "trajectories",
    "turns": "turns each",
    "tokens": "sampled tokens",
    "running_steps": "steps",
    "recomputed_tokens": "computed again",
    "parked_tokens": "parked",
    "kv_pool_bytes": "KV pool MB",
    "peak_memory_bytes": "peak MB",
}
MEMORY_COLUMNS = {
    "name": "name",
    "group_size": "G",
    "slots": "slots",
    "peak_memory_bytes": "peak MB",
    "weight_bytes": "weights MB",
    "kv_pool_bytes": "KV pool MB",
    "rest_bytes": "rest MB",
    "saved_share": "saved",
    "seconds": "s",
}
OURS, RIVAL = "#1f77b4", "#999999"


def print_records(records: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """A plain table on stdout; bytes in MB of 1e6, c0 and c1 in ms, c2 in microseconds, shares in %."""
    print_table([{name: cell(name, record[name]) for name in columns} for record in records], columns)


def cell(name: str, value: Any) -> str | None:
    """A value of a record as the table shows it."""
    if value is None:
        return None
    if name.endswith("_bytes"):
        return f"{value / 1e6:.1f}"
    if name in ("c0", "c1"):
        return f"{value * 1e3:.2f}"
    if name == "c2":
        return f"{value * 1e6:.1f}"
    if name in ("roofline_fraction", "saved_share"):
        return f"{value:.1%}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def memory_facts(options: ModelOptions, device: str) -> str:
    """What a table of peaks is of, in a line."""
    counted = (
        "VmHWM of the process less its imports" if device == "cpu" else "what the device lent at most, context included"
    )
    return f"{options.shape or options.model}, {options.dtype}; peak: {counted}; MB of 1e6 bytes"


def draw_memory(records: list[dict[str, Any]], folder: Path) -> Path:
    """Write memory.png: peak memory over the group size, one line for every way to sample."""
    figure, ((axes,),) = new_figure(8, 4.5)
    lines: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        label = record["name"]
        if label.startswith("ours/"):
            label = "ours, full group" if label == "ours/full_group" else f"ours, slots = {record['slots']}"
        lines.setdefault(label, []).append((record["group_size"], record["peak_memory_bytes"] / 1e9))
    for label, points in lines.items():
        style = "-" if label.startswith("ours") else "--"
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label, linestyle=style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("group size G")
    axes.set_ylabel("peak memory (GB)")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    return save(figure, folder / "memory.png")


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """A figure of so many inches, and its panels [rows, columns]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display and no pyplot state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def save(figure: Any, path: Path) -> Path:
    """Write the figure; its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path

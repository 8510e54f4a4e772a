"""Records of measurements as JSON lines, as a table, and as a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ENGINE_COLUMNS = {
    "name": "name",
    "seconds": "s",
    "tokens": "tokens",
    "tokens_per_s": "tokens/s",
    "running_steps": "steps",
    "peak_kv_bytes": "peak KV MB",
    "kv_pool_bytes": "KV pool MB",
    "peak_memory_bytes": "peak MB",
    "roofline_fraction": "of roofline",
    "c0": "c0 ms",
    "c1": "c1 ms/row",
    "c2": "c2 us/parked",
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
    "paper_peak_memory_bytes": "paper MB",
    "seconds": "s",
}
OURS, RIVAL = "#1f77b4", "#999999"


def print_json(record: dict[str, Any]) -> None:
    """One line on stdout, at once."""
    print(json.dumps(record), flush=True)


def print_table(records: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """A plain table on stdout; bytes in MB of 1e6, c0 and c1 in ms, c2 in microseconds, shares in %."""
    rows = [list(columns.values()), *([cell(name, record[name]) for name in columns] for record in records)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(columns))]
    for row in rows:
        cells = [
            text.ljust(width) if index == 0 else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def cell(name: str, value: Any) -> str:
    """A value of a record as the table shows it; '-' for one that was not measured."""
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return f"{value / 1e6:.1f}"
    if name in ("c0", "c1"):
        return f"{value * 1e3:.2f}"
    if name == "c2":
        return f"{value * 1e6:.1f}"
    if name in ("roofline_fraction", "saved_share", "driver_share", "stolen_share"):
        return f"{value:.1%}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def draw_engine(records: list[dict[str, Any]], folder: Path) -> Path:
    """Write engine.png: tokens per second of every measurement, with the KV it held."""
    figure, axes = _new_figure(height=1 + 0.34 * max(1, len(records)))
    names = [record["name"] for record in records][::-1]
    speeds = [record["tokens_per_s"] for record in records][::-1]
    bars = axes.barh(names, speeds, color=[OURS if name.startswith("ours/") else RIVAL for name in names])
    labels = [
        f"{record['tokens_per_s']:.0f} tokens/s, KV {record['peak_kv_bytes'] / 1e6:.1f} MB" for record in records
    ][::-1]
    axes.bar_label(bars, labels, padding=3, fontsize=7)
    axes.set_xlim(0, 1.5 * max(speeds, default=1))
    axes.set_xlabel("tokens/s")
    if records:
        workload = records[0]["workload"]
        axes.set_title(
            f"G = {workload['group_size']}, slots = {workload['slots']}, {workload['max_new_tokens']} new tokens",
            fontsize=9,
        )
    return _save(figure, folder / "engine.png")


def draw_memory(records: list[dict[str, Any]], folder: Path) -> Path:
    """Write memory.png: peak memory over the group size, one line for every way to sample."""
    figure, axes = _new_figure(height=4.5)
    lines: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        label = record["name"]
        if label.startswith("ours/"):
            label = "ours, full group" if label == "ours/full_group" else f"ours, slots = {record['slots']}"
        lines.setdefault(label, []).append((record["group_size"], record["peak_memory_bytes"] / 1e9))
    for label, points in lines.items():
        axes.plot(
            *zip(*sorted(points), strict=True),
            marker="o",
            label=label,
            linestyle="-" if label.startswith("ours") else "--",
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("group size G")
    axes.set_ylabel("peak memory (GB)")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    return _save(figure, folder / "memory.png")


def _new_figure(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display and no pyplot state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path

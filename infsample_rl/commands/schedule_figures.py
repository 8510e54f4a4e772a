"""Two pictures of schedules: their steps as bars, and who decoded when in which row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infsample_rl.commands.schedule_workload import MEMORY_BOUND, SimulateOptions, Workload, simulate_call
from infsample_rl.config.rollout import PREDICTED_SCHEDULES, SCHEDULES
from infsample_rl.rollout.optimum import token_bound
from infsample_rl.rollout.simulator import Simulation

SHOWN = ("naive", "fixed_slot", "infinite", "lpt", "token_budget")  # in slots.png
SLOT_SCHEDULES = ("full_group", "naive", "fixed_slot", "dynamic_slot", "arrival", "fptas", "sjf", "infinite", "lpt")
ORDER = (*SLOT_SCHEDULES, "optimum, slots", "token_budget", "optimum, memory")  # from top to bottom
IDLE, SLOTS, TOKENS, OPTIMUM = "#eeeeee", "#8c8c8c", "#1f77b4", "#2ca02c"


def draw(records: list[dict[str, Any]], workload: Workload, options: SimulateOptions, folder: Path) -> list[Path]:
    """Write schedule.png (bars of all `records`) and slots.png (a prompt of `workload`); their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    return [draw_steps(records, folder / "schedule.png"), draw_rows(workload, options, folder / "slots.png")]


def draw_steps(records: list[dict[str, Any]], path: Path) -> Path:
    """Steps per prompt of every schedule, a panel per file: fewest prompts at a time, most, and what noisy predictions
    do."""
    files = list(dict.fromkeys(record["file"] for record in records))
    names = sorted(
        {_row_name(record) for record in records}, key=lambda name: (ORDER.index(name.split(", true")[0]), name)
    )
    columns = min(2, len(files))
    figure, panels = _figure(len(files), width=5.2 * columns + 1.2, height=0.9 + 0.24 * len(names), columns=columns)
    for panel, file in zip(panels, files, strict=False):
        _bars(panel, [record for record in records if record["file"] == file], names)
    for panel in panels[len(files) :]:
        panel.set_visible(False)
    figure.suptitle(_legend(records), fontsize=8)
    figure.savefig(path)
    return path


def _row_name(record: dict[str, Any]) -> str:
    """Noisy predictions share the row of the true lengths."""
    return f"{record['schedule']}, true lengths" if record["sigma"] else record["name"]


def _bars(panel: Any, records: list[dict[str, Any]], names: list[str]) -> None:
    """One file: a bar for every schedule, a thin one for more prompts at a time, a circle for noisy predictions."""
    fewest = min(record["prompts_at_once"] for record in records)
    first = next(record for record in records if record["prompts_at_once"] == fewest)
    longest, labels = max(record["steps_per_prompt"] for record in records), dict[int, tuple[float, str]]()
    for record in records:
        row, steps, thin = (
            names.index(_row_name(record)),
            record["steps_per_prompt"],
            record["prompts_at_once"] > fewest,
        )
        if record["sigma"] and not thin:
            panel.scatter(
                steps,
                row,
                s=9 + 18 * min(2.0, record["sigma"]),
                facecolors="none",
                edgecolors="black",
                linewidths=0.7,
                zorder=3,
            )
        elif not record["sigma"]:
            colour = (
                OPTIMUM
                if record["schedule"] not in SCHEDULES
                else TOKENS
                if record["schedule"] == "token_budget"
                else SLOTS
            )
            panel.barh(row, steps, height=0.2 if thin else 0.75, color="black" if thin else colour, alpha=0.75)
        if not thin:
            right, text = labels.get(row, (0.0, ""))
            labels[row] = (max(right, steps), text if record["sigma"] else f"{steps:,.0f}")
    for row, (right, text) in labels.items():
        panel.text(right + 0.02 * longest, row, text, fontsize=6.5, va="center")
    panel.axvline(first["slot_bound"], color="black", linewidth=0.9, linestyle="--")
    panel.axvline(first["token_bound"], color=TOKENS, linewidth=0.9, linestyle="--")
    panel.set_yticks(range(len(names)), names, fontsize=7)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_xlim(0, 1.14 * longest)
    panel.set_xlabel("running steps per prompt", fontsize=8)
    panel.tick_params(axis="x", labelsize=7)
    panel.set_title(
        f"{first['file']}: {first['prompts']} prompts, G = {first['group_size']}, g = {first['slots']}", fontsize=8
    )


def _legend(records: list[dict[str, Any]]) -> str:
    fewest, most = (of(record["prompts_at_once"] for record in records) for of in (min, max))
    sigmas = ", ".join(f"{sigma:g}" for sigma in sorted({record["sigma"] for record in records if record["sigma"]}))
    lines = [f"bars: {_at_a_time(fewest)}" + (f"; thin dark bars: {_at_a_time(most)}" if most > fewest else "")]
    lines += [f"circles: noisy predictions, sigma {sigmas}, the larger the noisier"] if sigmas else []
    lines += [f"dashed lines, {_at_a_time(fewest)}: black the lower bound of the slots, blue the"]
    return "\n".join([*lines, MEMORY_BOUND])


def _at_a_time(prompts: int) -> str:
    return "one prompt at a time" if prompts == 1 else f"{prompts} prompts at a time"


def draw_rows(workload: Workload, options: SimulateOptions, path: Path) -> Path:
    """Rows over steps, a colour per sample, for the prompt whose longest sample is nearest the file's median of
    such."""
    by_longest = sorted(range(len(workload.groups)), key=lambda place: max(workload.groups[place]))
    place = by_longest[len(by_longest) // 2]
    found = {name: _simulate(workload, options, place, name) for name in SHOWN}
    heights = [4 + min(12, result.most_rows) // 2 for result in found.values()]
    figure, panels = _figure(len(SHOWN), width=10, height=0.21 * sum(heights) / len(SHOWN), columns=1, ratios=heights)
    last = max(result.running_steps for result in found.values())
    for panel, (name, result) in zip(panels, found.items(), strict=True):
        _rows(panel, name, result, workload.groups[place], last)
    for panel in panels[:-1]:
        panel.set_xticklabels([])
    panels[-1].set_xlabel("running step", fontsize=9)
    lengths = workload.groups[place]
    memory = options.kv_budget_tokens or options.slots * workload.cap
    bound = token_bound(lengths, memory)
    figure.suptitle(
        f"{workload.name}, prompt {place}: {len(lengths)} samples of {min(lengths)} to {max(lengths)} tokens in the KV "
        f"memory of {memory:,} tokens\n"
        "one bar per sample, the darker the longer; one that stops short goes on in another row; grey: a row without "
        "work; dotted: barriers\n"
        f"infinite and lpt know the true lengths; {bound:,.0f} steps: the {MEMORY_BOUND}",
        fontsize=9,
    )
    figure.savefig(path)
    return path


def _simulate(workload: Workload, options: SimulateOptions, place: int, schedule: str) -> Simulation:
    known = 0.0 if schedule in PREDICTED_SCHEDULES else None
    return simulate_call(
        workload,
        options,
        range(place, place + 1),
        1,
        schedule,
        known,
        parks="park" in options.preemptions,
        record_rows=True,
    )


def _rows(panel: Any, name: str, result: Simulation, lengths: list[int], last: int) -> None:
    rows = result.most_rows
    panel.broken_barh([(0, result.running_steps)], (-0.45, rows - 0.1), facecolors=IDLE)
    rank = {index: place for place, index in enumerate(sorted(range(len(lengths)), key=lambda index: lengths[index]))}
    for stay in result.stays:
        colour = _colour(rank[stay.sample] / max(1, len(lengths) - 1))
        panel.broken_barh(
            [(stay.start, stay.end - stay.start)],
            (stay.row - 0.42, 0.84),
            facecolors=colour,
            edgecolor="white",
            linewidth=0.4,
        )
    if name == "naive":
        for barrier in {
            max(stay.end for stay in result.stays if stay.sample // rows == turn)
            for turn in range(-(-len(lengths) // rows))
        }:
            panel.axvline(barrier, color="black", linewidth=0.9, linestyle=":")
    panel.axvline(result.running_steps, color="black", linewidth=1)
    panel.text(result.running_steps, rows / 2 - 0.5, f" {result.running_steps:,} steps", fontsize=8, va="center")
    panel.set_xlim(0, last * 1.12)
    panel.set_ylim(rows - 0.4, -0.6)
    panel.set_ylabel(name, fontsize=9)
    panel.set_yticks([])
    panel.tick_params(labelsize=8)


def _colour(share: float) -> Any:
    """From light (the shortest sample) to dark (the longest)."""
    from matplotlib import colormaps

    return colormaps["viridis_r"](0.05 + 0.9 * share)


def _figure(
    panels: int, width: float, height: float, columns: int, ratios: list[int] | None = None
) -> tuple[Any, list[Any]]:
    """A figure and its panels, row by row; `height` inches of one panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display and no pyplot state
    from matplotlib.figure import Figure

    rows = -(-panels // columns)
    figure = Figure(figsize=(width, height * rows + 0.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"height_ratios": ratios} if ratios else None)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)

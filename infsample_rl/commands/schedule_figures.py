"""The picture of schedules: who decoded when in which row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infsample_rl.commands.schedule_workload import MEMORY_BOUND, SimulateOptions, Workload, simulate_call
from infsample_rl.config.rollout import PREDICTED_SCHEDULES
from infsample_rl.rollout.simulator import Simulation, token_bound

WHITE = "white: steps that gave drafted tokens too, the whiter the more\n"
SHOWN = ("naive", "fixed_slot", "infinite", "lpt", "token_budget")  # in slots.png
IDLE = "#eeeeee"


def draw_rows(workload: Workload, options: SimulateOptions, path: Path) -> None:
    """Rows over steps, a colour per sample, for the prompt whose longest sample is nearest the file's median of
    such."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display and no pyplot state
    from matplotlib.figure import Figure

    by_longest = sorted(range(len(workload.groups)), key=lambda place: max(workload.groups[place]))
    place = by_longest[len(by_longest) // 2]
    lengths = workload.groups[place]
    most = max(options.speculate)
    asked = [(name, drafts) for name in SHOWN for drafts in sorted({0, most})]
    found = {
        f"{name}, {drafts} drafted" if drafts else name: _simulate(workload, options, place, name, drafts)
        for name, drafts in asked
    }
    heights = [4 + min(12, result.most_rows) // 2 for result in found.values()]
    figure = Figure(figsize=(10, 0.21 * sum(heights) + 0.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(found), 1, sharex=True, gridspec_kw={"height_ratios": heights})
    last = max(result.running_steps for result in found.values())
    for panel, (name, result) in zip(panels, found.items(), strict=True):
        panel.spines[["top", "right"]].set_visible(False)
        _rows(panel, name, result, lengths, last)
    panels[-1].set_xlabel("running step", fontsize=9)
    memory = found["infinite"].kv_pool_tokens - workload.prompt_tokens[place]
    figure.suptitle(
        f"{workload.name}, prompt {place}: {len(lengths)} samples of {min(lengths)} to {max(lengths)} tokens in the KV "
        f"memory of {memory:,} tokens\n"
        "one bar per sample, the darker the longer; one that stops short goes on in another row; grey: a row without "
        f"work; dotted: barriers\n{WHITE if most else ''}"
        f"infinite and lpt know the true lengths; {token_bound(lengths, memory):,.0f} steps: the {MEMORY_BOUND}",
        fontsize=9,
    )
    figure.savefig(path)


def _simulate(workload: Workload, options: SimulateOptions, place: int, schedule: str, drafts: int = 0) -> Simulation:
    known, parks = 0.0 if schedule in PREDICTED_SCHEDULES else None, "park" in options.preemptions
    call = range(place, place + 1)
    return simulate_call(workload, options, call, schedule, known, parks=parks, record_rows=True, drafts=drafts)


def _rows(panel: Any, name: str, result: Simulation, lengths: list[int], last: int) -> None:
    from matplotlib import colormaps

    rows = result.most_rows
    panel.broken_barh([(0, result.running_steps)], (-0.45, rows - 0.1), facecolors=IDLE)
    rank = {index: place for place, index in enumerate(sorted(range(len(lengths)), key=lambda index: lengths[index]))}
    for stay in result.stays:
        colour = colormaps["viridis_r"](0.05 + 0.9 * rank[stay.sample] / max(1, len(lengths) - 1))
        panel.broken_barh(
            [(stay.start, stay.end - stay.start)],
            (stay.row - 0.42, 0.84),
            facecolors=colour,
            edgecolor="white",
            linewidth=0.4,
        )
    for row, tokens in {(each.row, each.tokens) for each in result.accepted}:
        steps = [(each.step, 1) for each in result.accepted if (each.row, each.tokens) == (row, tokens)]
        panel.broken_barh(steps, (row - 0.12, 0.24), facecolors="white", alpha=min(1.0, 0.3 + 0.1 * tokens))
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
    panel.set_ylabel(name.replace(", ", ",\n"), fontsize=9)
    panel.set_yticks([])
    panel.tick_params(labelsize=8)

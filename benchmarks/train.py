"""One GRPO step of ours, engine and learner in one process, beside TRL's GRPOTrainer: same model, prompts, G, lengths
and objective.

python -m benchmarks.train model=PATH [group_size=32 | group_size=[8,32,128]] [max_new_tokens=96] [rivals=[trl]]
    [rivals.trl_python=PYTHON] [json=true] ...

Every measurement has a process of its own in each of `repeats` rounds: a step that warms up, then one that is timed, on
prompts of that round; the median counts, and a ratio is of two steps of one round. TRL's settings are tried on further
prompts, and the fastest of them is measured. With lengths=fixed prompts are random and every response takes exactly
max_new_tokens: on both sides the end token ends nothing. With lengths=natural they are one-digit products of
configs/data/arithmetic.yaml, and responses end where they end; each side draws its own. On a CPU `products alone` is
what the matrix products of our learner take by themselves, as many as the step that warms up has for every token; on
a GPU `matrix_share` is of what a bf16 product of 8192 does there: 6 FLOP a parameter and token of the learner.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.figures import new_figure, print_records, save
from benchmarks.process import end_with_terminate
from benchmarks.rounds import beside, measure_rounds
from benchmarks.train_trl_settings import TUNE_SAMPLES, Tried, fastest_settings, try_settings, tune_prompts
from benchmarks.train_workload import (
    ARITHMETIC,
    Run,
    Spec,
    TrainOptions,
    find_facts,
    measure_run,
    our_settings,
    run_spec,
)
from infsample_rl.config.command_line import run_with_options

COLUMNS = {
    "name": "name",
    "group_size": "G",
    "seconds_per_step": "s a step",
    "ratio_said": "ours / this",
    "generate": "generate s",
    "learn": "learn s",
    "products_seconds": "products alone s",
    "optimizer": "optimizer s",
    "tokens_per_s": "tokens/s",
    "peak_memory_bytes": "peak MB",
}
COLORS = {"ours": "#1f77b4", "trl": "#777777"}
# with their hatches; reward and the rest are too short to be seen
PHASES = {"generate": "", "learn": "///", "optimizer": "xxx"}


def main() -> int:
    """Measure both sides at every G; 1 when a measurement failed or responses are not of the lengths asked for."""
    end_with_terminate()
    return run_with_options(run, TrainOptions, usage=__doc__)


def run(options: TrainOptions) -> int:
    """As main(). RuntimeError when the model cannot be had."""
    count = options.prompts * (1 + options.repeats) + 2 * TUNE_SAMPLES
    data = None if options.lengths == "fixed" else ARITHMETIC
    facts = find_facts(options, data=data, count=count)
    found, failed = list[dict[str, Any]](), False
    tried: dict[int, list[Tried]] = {}  # TRL's settings, by samples of the step on which they were tried
    for group_size in options.group_size:
        failed = measure_group(options, facts, group_size, tried, found) or failed
    if not options.json:
        print_training(found)
        print(f"figure: {draw_training(found, Path(options.out))}")
    unequal = [f"{record['name']} at G = {record['group_size']}" for record in found if not record["lengths_as_asked"]]
    if unequal:
        print(f"benchmarks.train: responses are not of the lengths asked for: {', '.join(unequal)}", file=sys.stderr)
    return 1 if failed or unequal else 0


def measure_group(
    options: TrainOptions,
    facts: dict[str, Any],
    group_size: int,
    tried: dict[int, list[Tried]],
    found: list[dict[str, Any]],
) -> bool:
    """Add to `found`, and print with json=true, the records of every side at one G; whether one failed. TRL's settings
    are tried once ours is measured."""
    spec = sweep_spec(options, facts, group_size)
    sides = {"ours": lambda: Run("ours", our_settings(options), spec, [])}
    if "trl" in options.rivals:
        sides["trl"] = lambda: trl_run(options, facts, spec, tried)
    points = [
        (
            f"benchmarks.train: {name} at G = {group_size}",
            lambda number, run=run: measure_run(options, in_round(run(), options.prompts, number)),
        )
        for name, run in sides.items()
    ]
    rounds: list[list[dict[str, Any]]] = []
    try:
        return measure_rounds(points, options.repeats, rounds)
    finally:  # what was measured is said by a command that is ended too
        measured = [(run(), raws) for run, raws in zip(sides.values(), rounds, strict=True) if raws]
        seconds = [[raw["steps"][-1]["seconds"] for raw in raws] for _, raws in measured]
        records = [
            record_of(options, facts, run, together(raws)) | beside(seconds[0], own)
            for (run, raws), own in zip(measured, seconds, strict=True)
        ]
        found += records
        for record in records if options.json else ():
            print(json.dumps(record), flush=True)


def in_round(run: Run, prompts: int, number: int) -> Run:
    """The run's first step, which warms up, and that of one round."""
    given = run.spec["prompts"]
    own = given[:prompts] + given[(1 + number) * prompts : (2 + number) * prompts]
    return replace(run, spec=run.spec | {"prompts": own, "steps": 2})


def together(raws: list[dict[str, Any]]) -> dict[str, Any]:
    """One run's figures from those of its rounds: a step that warms up, then all that were timed."""
    steps = [*raws[0]["steps"][:1], *(raw["steps"][-1] for raw in raws)]
    return raws[0] | {"steps": steps, "peak_memory_bytes": max(raw["peak_memory_bytes"] for raw in raws)}


def trl_run(options: TrainOptions, facts: dict[str, Any], spec: Spec, tried: dict[int, list[Tried]]) -> Run:
    """TRL at the fastest settings of those tried. RuntimeError when none runs."""
    group_size = spec["group_size"]
    prompts = tune_prompts(group_size, options.prompts)
    samples = prompts * min(group_size, TUNE_SAMPLES)
    if samples not in tried:
        tried[samples] = try_settings(
            options, facts, group_size, facts["prompts"][-2 * prompts :], ignore_eos=options.lengths == "fixed"
        )
    return Run("trl", fastest_settings(tried[samples], spec), spec, tried[samples])


def sweep_spec(options: TrainOptions, facts: dict[str, Any], group_size: int) -> Spec:
    """A step that warms up and one for every round, all on different prompts."""
    prompts = facts["prompts"][: options.prompts * (1 + options.repeats)]
    return run_spec(
        options,
        group_size=group_size,
        prompts_per_step=options.prompts,
        prompts=prompts,
        ignore_eos=options.lengths == "fixed",
    )


def record_of(options: TrainOptions, facts: dict[str, Any], run: Run, raw: dict[str, Any]) -> dict[str, Any]:
    """The object of one measurement: the keys that all benchmarks share first. Bytes, seconds; figures of a step are
    medians."""
    steps = raw["steps"][1:]
    seconds = statistics.median(step["seconds"] for step in steps)
    phases = {name: statistics.median(step["phases"][name] for step in steps) for name in steps[0]["phases"]}
    products = [step["products_seconds"] for step in steps if "products_seconds" in step]
    rates = [sum(step["lengths"]) / step["seconds"] for step in steps]  # natural lengths differ from round to round
    tokens = sum(steps[-1]["lengths"])
    # TRL computes every sample with a prompt of its own; padding does not count.
    last_prompts = run.spec["prompts"][-options.prompts :]
    computed = steps[-1].get("learner_tokens", tokens + sum(map(len, last_prompts)) * run.spec["group_size"])
    peak_flops = facts["matrix_flops"] and facts["matrix_flops"] * steps[-1]["phases"]["learn"]
    shortest = options.max_new_tokens if options.lengths == "fixed" else 1
    lengths = [length for step in raw["steps"] for length in step["lengths"]]
    return {
        "name": run.name,
        "seconds_per_step": seconds,
        "peak_memory_bytes": raw["peak_memory_bytes"],
        "phases": phases,
        "tokens_per_s": statistics.median(rates),
        "group_size": run.spec["group_size"],
        "prompts": options.prompts,
        "tokens": tokens,
        "lengths_as_asked": all(shortest <= length <= options.max_new_tokens for length in lengths),
        "learner_tokens": computed,
        "step_seconds": [step["seconds"] for step in raw["steps"]],
        "settings": run.settings,
        "variants": run.variants,
        "mismatch": max((step["mismatch"] for step in steps if step.get("mismatch") is not None), default=None),
        "products_seconds": statistics.median(products) if products else None,
        "matrix_share": 6 * facts["parameters"] * computed / peak_flops if peak_flops else None,
        "parameters": facts["parameters"],
        "device": facts["device"],
        "threads": options.threads,
        "versions": raw["versions"],
        "workload": {name: value for name, value in run.spec.items() if name != "prompts"},
    }


def print_training(records: list[dict[str, Any]]) -> None:
    """The table, and what every measurement was run with."""
    print_records([record | record["phases"] for record in records], COLUMNS)
    for record in records:
        settings = ", ".join(f"{name}={value}" for name, value in record["settings"].items() if value is not None)
        print(f"{record['name']}, G = {record['group_size']}: {settings}")
    for record in records[:1]:
        on_cpu = record["device"] == "cpu"
        counted = "highest resident set less what the imports take" if on_cpu else "what the device lent at most"
        print(
            f"{record['device']}, {record['threads']} threads, {record['workload']['dtype']}; peak: {counted}; MB of "
            "1e6 bytes"
        )
    for name, versions in {record["name"]: record["versions"] for record in records}.items():
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


if __name__ == "__main__":
    sys.exit(main())

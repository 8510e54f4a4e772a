"""The paper's tables on recorded lengths: its rows, ours below them, and its printed numbers beside the same data sets.

python -m benchmarks.tables [recordings=[FILE,...]] [group_size=32] [slots=4] [out=FILE.md]

Running steps are means over prompts, one prompt at a time unless a row says otherwise, at the KV memory of `slots` full
responses, prompts and pages left out; the bound of the memory is sum l(l+1)/2 / budget, which counts the newest token
as held, while our pool takes it a step later. Rows with * know the true lengths. fptas, sjf, infinite and lpt predict:
from FILE's `predictions` (benchmarks.predictor writes them for held-out prompts, then only these prompts count), else
with a lognormal error of `sigma` around the truth, as the line above a table says. dynamic_slot draws from the group's
lengths again when it has started them all.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.paper_figures import ABLATION, MODELS, PAPER_NAMES, SCHEDULER_CHOICE, least_kept_mean
from infsample_rl.commands.schedule_workload import MOST_SIGMA, names_of, noisy
from infsample_rl.config.command_line import check_writable, option, run_with_options
from infsample_rl.rollout.length_prediction.recordings import Recording, read_recordings
from infsample_rl.rollout.simulator import Simulation, simulate, simulate_prompts, slot_bound, token_bound

LENGTHS = Path("tests") / "data" / "lengths"  # recordings of the checkout
TOGETHER = 8  # prompts that share the memory in a row of their own
PREDICTOR = "probe"  # whose predictions are read


@dataclass(kw_only=True)
class TableOptions:
    """Arguments of this command."""

    recordings: list[str] = option([], "files of recorded lengths; none: all of tests/data/lengths")
    group_size: int = option(32, "G; a prompt with fewer samples is taken whole", low=1)
    slots: int = option(4, "g: the KV memory is slots x the cap", low=1)
    sigma: float = option(0.5, "lognormal error of the predictions where there are none", low=0, high=MOST_SIGMA)
    seed: int = option(0, "seed of that error", low=0)
    out: str | None = option(None, "Markdown file to write; none: stdout")


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt of a table."""

    lengths: list[int]
    predicted: list[float]


def main() -> int:
    """Write all tables."""
    return run_with_options(write_tables, TableOptions, usage=__doc__)


def write_tables(options: TableOptions) -> int:
    """As main()."""
    files = list(dict.fromkeys(Path(name) for name in options.recordings)) or sorted(LENGTHS.glob("*.jsonl*"))
    if options.out is not None:
        check_writable(Path(options.out).parent, f"out={options.out}")
    rows = [row for file, name in zip(files, names_of(files), strict=True) for row in rows_of(file, options, name)]
    if not rows:
        raise ValueError(f"there are no recorded lengths in {LENGTHS}: give recordings=[FILE,...]")
    text = markdown(rows) + "\n" + _dynamic_slot(files, options)
    if options.out is None:
        print(text)
    else:
        Path(options.out).write_text(text)
        print(f"tables: {options.out}")
    return 0


def rows_of(file: Path, options: TableOptions, name: str) -> list[dict[str, Any]]:
    """Every method on the groups of one file, which is called `name`."""
    recordings = read_recordings(file)
    cap = max(max(recording.max_new_tokens or 0, *recording.lengths) for recording in recordings)
    groups, source = groups_of(recordings, options, cap)
    settings = {"slots": options.slots, "max_new_tokens": cap}
    mean_true = fmean(length for group in groups for length in group.lengths)
    common = {
        "file": name,
        "dataset": recordings[0].dataset,
        "model": recordings[0].model,
        "prompts": len(groups),
        "group_size": max(len(group.lengths) for group in groups),
        "slots": options.slots,
        "cap": cap,
        "predictions": source,
        "true_mean": mean_true,
    }
    rows = []
    for method, (schedule, knows) in METHODS.items():
        found = [run(group, schedule, knows, settings) for group in groups]
        kept = fmean(
            fmean(group.lengths[index % len(group.lengths)] for index in each.completed)
            for group, each in zip(groups, found, strict=True)
        )
        steps = fmean(each.running_steps for each in found)
        rows.append(common | {"method": method, "steps": steps, "mean_length": kept})
    together = simulate_prompts(
        [group.lengths for group in groups], "token_budget", prompts_at_once=TOGETHER, parks=True, **settings
    )
    bounds = [slot_bound(group.lengths, options.slots) for group in groups]
    tokens = [token_bound(group.lengths, options.slots * cap) for group in groups]
    extra = {
        f"token_budget, {TOGETHER} prompts together": together.running_steps / len(groups),
        "bound of the slots": fmean(bounds),
        "bound of the memory": fmean(tokens),
    }
    rows += [common | {"method": name, "steps": steps, "mean_length": mean_true} for name, steps in extra.items()]
    return rows


# method: schedule, whether it knows the true lengths (None: it reads none)
METHODS = {
    "naive": ("naive", None),
    "fixed_slot": ("fixed_slot", None),
    "dynamic_slot": ("dynamic_slot", None),
    "infinite *": ("infinite", True),
    "fptas": ("fptas", False),
    "sjf": ("sjf", False),
    "infinite": ("infinite", False),
    "arrival": ("arrival", None),
    "lpt": ("lpt", False),
    "lpt *": ("lpt", True),
    "token_budget": ("token_budget", None),
}
TABLE_1 = ("naive", "fixed_slot", "dynamic_slot", "infinite *", "infinite")  # the paper's ablation
TABLE_2 = ("fixed_slot", "infinite *", "fptas", "sjf", "infinite")  # and its scheduler choice


def run(group: Group, schedule: str, knows: bool | None, settings: dict[str, int]) -> Simulation:
    """One group under one schedule; the group size is that of the lengths, from which dynamic_slot draws without
    end."""
    predicted = None if knows is None else [float(length) for length in group.lengths] if knows else group.predicted
    return simulate(group.lengths, schedule, predicted=predicted, parks=schedule == "token_budget", **settings)


def groups_of(recordings: Sequence[Recording], options: TableOptions, cap: int) -> tuple[list[Group], str]:
    """The groups that count, and where their predictions come from; an error keeps them within 1 and `cap` tokens."""
    predicted = [recording for recording in recordings if recording.predictions and PREDICTOR in recording.predictions]
    if predicted:
        groups = [
            Group(each.lengths[: options.group_size], each.predictions[PREDICTOR][: options.group_size])
            for each in predicted
        ]
        return groups, f"{PREDICTOR}, held-out prompts"
    noise = random.Random(options.seed)
    groups = []
    for recording in recordings:
        lengths = recording.lengths[: options.group_size]
        groups.append(Group(lengths, noisy(lengths, [noise.gauss(0, 1) for _ in lengths], options.sigma, cap)))
    return groups, f"true lengths with a lognormal error, sigma {options.sigma}"


def markdown(rows: list[dict[str, Any]]) -> str:
    """The paper's two tables for every file."""
    parts = [
        "# The paper's tables on recorded lengths\n",
        f"Written by `make tables`. {__doc__.split('[out=FILE.md]')[-1].strip()}\n",
    ]
    for file in dict.fromkeys(row["file"] for row in rows):
        here = {row["method"]: row for row in rows if row["file"] == file}
        first = here["naive"]
        paper = PAPER_NAMES.get(first["dataset"])
        parts += [
            f"## {file}",
            f"{first['model']} on {first['dataset']}: {first['prompts']} prompts, G = {first['group_size']}, g = "
            f"{first['slots']}, at most {first['cap']} tokens, mean length {first['true_mean']:.0f}. Predictions: "
            f"{first['predictions']}.\n",
            "Table 1, ablation: running steps (x naive), mean length of the samples kept (x true).\n",
            _ablation(here, paper),
            "Table 2, scheduler choice: running steps (x fixed_slot); ours below the paper's rows.\n",
            _scheduler_choice(here, paper),
        ]
    return "\n".join(parts)


def _dynamic_slot(files: Sequence[Path], options: TableOptions) -> str:
    """What dynamic_slot's kept samples can be: the bound for the paper's figures, and what more slots do to recorded
    lengths."""
    lines = []
    for name, methods in ABLATION.items():
        for (_, printed), (_, true), model in zip(methods["dynamic_slot"], methods["naive"], MODELS, strict=True):
            shares = [f"{mean:.0f} (x{mean / true:.2f})" for mean in (printed, least_kept_mean(true))]
            lines.append([f"{name}, {model}", str(true), *shares])
    bound = _table(["the paper", "mean length", "dynamic_slot, printed", "least that 4 slots allow"], lines, None)
    counts = (4, 8, 16, 32, 64, 128, 256)
    lines = []
    for file, name in zip(files, names_of(files), strict=True):
        groups = [recording.lengths[: options.group_size] for recording in read_recordings(file)]
        kept = [fmean(_kept_share(lengths, slots) for lengths in groups) for slots in counts]
        lines.append([name, *(f"x{share:.2f}" for share in kept)])
    more = _table(["mean length kept / true, by slots", *map(str, counts)], lines, None)
    return f"## What dynamic_slot can keep\n\n{bound}\n{more}"


def _kept_share(lengths: list[int], slots: int) -> float:
    found = simulate(lengths, "dynamic_slot", slots=slots)
    return fmean(lengths[index % len(lengths)] for index in found.completed) / fmean(lengths)


def _ablation(rows: dict[str, dict[str, Any]], paper: str | None) -> str:
    lines = []
    for method in TABLE_1:
        row = rows[method]
        cells = [method, f"{row['steps']:,.0f} (x{row['steps'] / rows['naive']['steps']:.2f})"]
        cells.append(f"{row['mean_length']:.0f} (x{row['mean_length'] / row['true_mean']:.2f})")
        if paper is not None:
            pairs = zip(ABLATION[paper][method], ABLATION[paper]["naive"], strict=True)
            cells += [
                f"{steps:,} (x{steps / base:.2f}), {length} (x{length / true:.2f})"
                for (steps, length), (base, true) in pairs
            ]
        lines.append(cells)
    return _table(["method", "running steps", "mean length"], lines, paper)


def _scheduler_choice(rows: dict[str, dict[str, Any]], paper: str | None) -> str:
    lines = []
    for method in [*TABLE_2, *(method for method in rows if method not in (*TABLE_1, *TABLE_2))]:
        steps = rows[method]["steps"]
        cells = [method, f"{steps:,.0f} (x{steps / rows['fixed_slot']['steps']:.2f})"]
        if paper is not None:
            pairs = zip(SCHEDULER_CHOICE[paper].get(method, ()), SCHEDULER_CHOICE[paper]["fixed_slot"], strict=False)
            cells += [f"{theirs:,} (x{theirs / base:.2f})" for theirs, base in pairs] or ["", ""]
        lines.append(cells)
    return _table(["method", "running steps"], lines, paper)


def _table(head: list[str], lines: list[list[str]], paper: str | None) -> str:
    if paper is not None:
        head = head + [f"the paper, {paper}, {model}" for model in MODELS]
    body = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body]) + "\n"


if __name__ == "__main__":
    sys.exit(main())

"""Schedules over recorded response lengths, without a model: running steps, time, KV memory and bounds, at equal KV
memory.

python -m infsample_rl.simulate lengths=FILE[,FILE] [slots=4 | kv_budget_tokens=8192] [schedules=[lpt,token_budget]]
[group_size=32] [noise=[0,0.5]] [out=FOLDER] [json=true] ...

FILE is a run folder, or a file with a line for every prompt: {"dataset", "model", "prompt_id", "lengths": [int, ...]}.
The engine's own planner is run on the lengths. Predictions are the true lengths x exp(sigma x normal noise) for every
sigma of `noise` (0: the true lengths), at most the cap. Time is c0 per step + c1 per row and per recomputed token + c2
per parked token; they default to what docs/engine.md gives for SmolLM2-135M-Instruct in float32 on 2 CPU cores (python
-m benchmarks.engine measures them on any model and machine). `of_bound` is beside the least steps there can be: with
slots max(longest, sum l / slots), with memory max(longest, sum l(l+1)/2 / budget). With `out` a picture is drawn of who
decodes when. With turns=FILE or turns=generated trajectories of several turns are simulated: `turns=generated -h`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from infsample_rl.commands.schedule_workload import (
    MEMORY_BOUND,
    PROMPTS_PER_CALL,
    SimulateOptions,
    Workload,
    calls_of,
    load,
    names_of,
    simulate_call,
)
from infsample_rl.config.command_line import check_writable, print_table, run_with_options
from infsample_rl.config.rollout import PREDICTED_SCHEDULES
from infsample_rl.rollout.schedule.first_come import FIRST_COME
from infsample_rl.rollout.simulator import Simulation, slot_bound, token_bound
from infsample_rl.rollout.simulator_drafts import new_drafter

COLUMNS = {  # of the table: what a record calls it, its heading, its format
    "name": ("schedule", ""),
    "steps_per_prompt": ("steps", ",.0f"),
    "of_bound": ("/ bound", ".2f"),
    "of_infinite": ("/ infinite", ".3f"),
    "seconds_per_prompt": ("s", ".1f"),
    "peak_kv_tokens": ("peak KV", ",.0f"),
    "row_utilisation": ("rows used", ".0%"),
    "tokens_per_row_step": ("tokens/row-step", ".2f"),
    "preemptions_per_prompt": ("preempted", ",.0f"),
    "recomputed_share": ("recomputed", ".3f"),
    "parked_share": ("parked", ".3f"),
    "completion_steps": ("mean end", ",.0f"),
    "mean_length": ("length", ",.0f"),
}
BOUNDS = {
    "token_budget": "token_bound",
    FIRST_COME: "token_bound",
    "full_group": "",
    "dynamic_slot": "",
}  # others: that of the slots


def main(arguments: list[str] | None = None) -> int:
    """Simulate and report; 2 for files or settings that cannot be used."""
    given = sys.argv[1:] if arguments is None else arguments
    if any(argument.startswith("turns=") for argument in given):
        from infsample_rl.commands import simulate_turns

        return simulate_turns.main(given)
    return run_with_options(run, SimulateOptions, arguments, usage=__doc__)


def run(options: SimulateOptions) -> int:
    """Every measurement for every file, printed, and a picture of the first where a folder is given."""
    paths = list(dict.fromkeys(Path(name) for name in options.lengths))
    workloads = [load(path, options, name) for path, name in zip(paths, names_of(paths), strict=True)]
    if options.out is not None:
        check_writable(Path(options.out), f"out={options.out}")
    for workload in workloads:
        records = []
        for record in measure(workload, options):
            records.append(record)
            if options.json:
                print(json.dumps(record), flush=True)
        if not options.json:
            _print_table(workload, options, records)
    if options.out is not None:
        from infsample_rl.commands.schedule_figures import draw_rows

        path = Path(options.out) / "slots.png"
        draw_rows(workloads[0], options, path)
        print(f"figure: {path}", file=sys.stderr if options.json else sys.stdout)
    return 0


def measure(workload: Workload, options: SimulateOptions) -> Iterator[dict[str, Any]]:
    """A record per schedule, sigma and, of token_budget, kind of preemption."""
    calls = calls_of(workload, options)
    # what the others are compared with; true lengths always fit
    infinite = [simulate_call(workload, options, call, "infinite", 0.0) for call in calls]
    bounds = _bounds(workload, calls, infinite)
    steps = sum(each.running_steps for each in infinite)
    for schedule in options.schedules:
        reads, preempts = schedule in PREDICTED_SCHEDULES, schedule == "token_budget"
        drafting = options.speculate if schedule != "dynamic_slot" else [0]  # whose samples are others with drafts
        for sigma in [*([] if reads else [None]), *(options.noise if reads or preempts else [])]:
            for preemption, drafts in product(options.preemptions if preempts else [None], drafting):
                run = partial(simulate_call, workload, options, schedule=schedule, sigma=sigma, drafts=drafts)
                run = partial(run, parks=preemption == "park", drafter=new_drafter(drafts) if drafts else None)
                found = [run(call) for call in calls]
                known = "" if sigma is None else ", true lengths" if sigma == 0 else f", sigma {sigma:g}"
                again = ", computed again" if preemption == "recompute" else ""
                again += f", {drafts} drafted" if drafts else ""
                record = _record(workload, options, calls, schedule, found) | bounds
                bound = record.get(BOUNDS.get(schedule, "slot_bound"))
                yield (
                    {"name": f"{schedule}{again}{known}", "schedule": schedule, "sigma": sigma}
                    | record
                    | {
                        "preemption": preemption,
                        "speculate": drafts,
                        "of_infinite": record["running_steps"] / steps,
                        "of_bound": record["steps_per_prompt"] / bound if bound else None,
                    }
                )


def _record(
    workload: Workload, options: SimulateOptions, calls: list[range], schedule: str, found: list[Simulation]
) -> dict[str, Any]:
    """What the calls took together."""
    by_budget = BOUNDS.get(schedule) == "token_bound"
    count = len(workload.groups)
    steps, rows = sum(each.running_steps for each in found), sum(each.busy_row_steps for each in found)
    queries, tokens = rows + sum(each.drafted_tokens for each in found), sum(each.tokens for each in found)
    lost, parked = sum(each.recomputed_tokens for each in found), sum(each.parked_tokens for each in found)
    ends = [end for each in found for end in each.finish_steps]
    lengths = [
        workload.recorded[call[place]][index % len(workload.recorded[call[place]])]
        for call, each in zip(calls, found, strict=True)
        for place, index in zip(each.completed_prompts, each.completed, strict=True)
    ]
    return {
        "file": workload.name,
        "dataset": workload.dataset,
        "model": workload.model,
        "prompts": count,
        "group_size": workload.group_size,
        "cap": workload.cap,
        "page_size": options.page_size,
        "prompts_at_once": options.prompts_at_once,
        "running_steps": steps,
        "steps_per_prompt": steps / count,
        "seconds_per_prompt": (options.c0 * steps + options.c1 * (queries + lost) + options.c2 * parked) / count,
        "kv_budget_tokens": max(each.kv_pool_tokens for each in found),
        "peak_kv_tokens": max(each.peak_kv_tokens for each in found),
        "row_utilisation": rows
        / sum(each.running_steps * (each.most_rows if by_budget else each.slots) for each in found),
        "preemptions_per_prompt": sum(each.preemptions for each in found) / count,
        "tokens_per_row_step": tokens / rows,
        "recomputed_share": lost / tokens,
        "parked_share": parked / tokens,
        "completion_steps": sum(ends) / len(ends),
        "mean_length": sum(lengths) / len(lengths),
    }


def _bounds(workload: Workload, calls: list[range], infinite: Sequence[Simulation]) -> dict[str, float]:
    """The slots, and mean bounds of a prompt's share of its call (see token_bound). At least the call's shortest prompt
    is resident while it decodes."""
    slots = tokens = 0.0
    for call, pool in zip(calls, infinite, strict=True):
        lengths = [length for place in call for length in workload.groups[place]]
        slots += slot_bound(lengths, pool.slots)
        tokens += token_bound(lengths, pool.kv_pool_tokens - min(workload.prompt_tokens[place] for place in call))
    means = {"slot_bound": slots / len(workload.groups), "token_bound": tokens / len(workload.groups)}
    return {"slots": max(pool.slots for pool in infinite)} | means


def _print_table(workload: Workload, options: SimulateOptions, records: list[dict[str, Any]]) -> None:
    """A heading with the bounds, then a row per measurement; means per prompt."""
    prompts, first = options.prompts_at_once, records[0]
    together = "one prompt" if prompts == 1 else f"{prompts} of {PROMPTS_PER_CALL} prompts"
    print(
        f"\n{workload.name}: {first['prompts']} prompts, G = {first['group_size']}, g = {first['slots']}, cap "
        f"{first['cap']}, {together} at a time"
    )
    print(
        f"{first['slot_bound']:,.0f} steps: lower bound of the slots; {first['token_bound']:,.0f} steps: {MEMORY_BOUND}"
    )
    rows = [
        {name: "-" if record[name] is None else format(record[name], form) for name, (_, form) in COLUMNS.items()}
        for record in records
    ]
    print_table(rows, {name: heading for name, (heading, _) in COLUMNS.items()})

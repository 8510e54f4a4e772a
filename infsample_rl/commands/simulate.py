"""Schedules over recorded response lengths, without a model: running steps, time, KV memory and bounds, at equal KV
memory.

python -m infsample_rl.simulate lengths=FILE[,FILE] [slots=4] [schedules=[lpt,token_budget]] [group_size=32]
[noise=[0,0.5]] [json=true] ...

FILE is a run folder, or a file with a line for every prompt: {"dataset", "model", "prompt_id", "lengths": [int, ...]}.
The engine's own planner is run on the lengths. Predictions are the true lengths x exp(sigma x normal noise) for every
sigma of `noise` (0: the true lengths), at most the cap. Time is c0 per step + c1 per row and per recomputed token + c2
per parked token; they default to what docs/engine.md gives for SmolLM2-135M-Instruct in float32 on 2 CPU cores (python
-m benchmarks.engine measures them on any model and machine).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from infsample_rl.commands import measurements
from infsample_rl.commands.schedule_workload import (
    MEMORY_BOUND,
    SimulateOptions,
    Workload,
    budget_of,
    calls_of,
    load,
    names_of,
    simulate_call,
)
from infsample_rl.config.command_line import check_writable, run_with_options
from infsample_rl.config.rollout import PREDICTED_SCHEDULES
from infsample_rl.rollout.optimum import TokenOptimum, slot_bound, slot_optimum, token_bound, token_optimum

COLUMNS = {
    "name": "schedule",
    "steps_per_prompt": "steps",
    "of_bound": "/ bound",
    "of_infinite": "/ infinite",
    "seconds_per_prompt": "s",
    "peak_kv_tokens": "peak KV",
    "row_utilisation": "rows used",
    "preemptions_per_prompt": "preempted",
    "recomputed_share": "recomputed",
    "parked_share": "parked",
    "completion_steps": "mean end",
    "mean_length": "length",
}
# what an optimum has not
MEASURED = (
    "preemption",
    "kv_budget_tokens",
    "peak_kv_tokens",
    "row_utilisation",
    "preemptions_per_prompt",
    "completion_steps",
    "mean_length",
)
SHARES = dict.fromkeys(("recomputed_share", "parked_share"), ".3f")
FORMATS = {"seconds_per_prompt": ".1f", "of_bound": ".2f", "of_infinite": ".3f", "row_utilisation": ".0%"} | SHARES


def main(arguments: list[str] | None = None) -> int:
    """Simulate and report; 2 for files or settings that cannot be used."""
    return run_with_options(
        lambda options: run(options, [options.prompts_at_once]), SimulateOptions, arguments, usage=__doc__
    )


def run(options: SimulateOptions, at_once: Sequence[int]) -> int:
    """Every measurement for every file and number of resident prompts, printed, and drawn where a folder is given."""
    found: list[dict[str, Any]] = []
    paths = list(dict.fromkeys(Path(name) for name in options.lengths))
    workloads = [load(path, options, name) for path, name in zip(paths, names_of(paths), strict=True)]
    if options.out is not None:
        check_writable(Path(options.out), f"out={options.out}")
    for workload in workloads:
        for prompts in at_once:
            here = []
            for record in measure(workload, options, prompts):
                here.append(record)
                if options.json:
                    measurements.print_json(record)
            found += here
            if not options.json:
                _print_table(workload, options, here, prompts)
    if options.out is not None:
        from infsample_rl.commands.schedule_figures import draw

        for path in draw(found, workloads[0], options, Path(options.out)):
            print(f"figure: {path}", file=sys.stderr if options.json else sys.stdout)
    return 0


def measure(workload: Workload, options: SimulateOptions, prompts_at_once: int) -> Iterator[dict[str, Any]]:
    """A record per schedule, sigma and, of token_budget, kind of preemption, and per optimum."""
    # what the others are compared with; true lengths always fit
    infinite = _record(workload, options, prompts_at_once, "infinite", 0.0)
    for schedule in options.schedules:
        reads, preempts = schedule in PREDICTED_SCHEDULES, schedule == "token_budget"
        for sigma in [*([] if reads else [None]), *(options.noise if reads or preempts else [])]:
            same = schedule == "infinite" and sigma == 0
            for preemption in options.preemptions if preempts else [None]:
                yield _compared(
                    infinite if same else _record(workload, options, prompts_at_once, schedule, sigma, preemption),
                    infinite,
                )
    if options.optimum:
        for record in _optima(workload, options, prompts_at_once):
            yield _compared(record, infinite)


def _compared(record: dict[str, Any], infinite: dict[str, Any]) -> dict[str, Any]:
    return record | {"of_infinite": record["steps_per_prompt"] / infinite["steps_per_prompt"]}


def _record(
    workload: Workload,
    options: SimulateOptions,
    prompts_at_once: int,
    schedule: str,
    sigma: float | None,
    preemption: str | None = None,
) -> dict[str, Any]:
    calls = calls_of(workload, options, prompts_at_once)
    found = [
        simulate_call(workload, options, call, prompts_at_once, schedule, sigma, parks=preemption == "park")
        for call in calls
    ]
    count = len(workload.groups)
    steps, tokens = sum(each.running_steps for each in found), sum(each.busy_row_steps for each in found)
    lost, parked = sum(each.recomputed_tokens for each in found), sum(each.parked_tokens for each in found)
    rows = {"token_budget": None, "full_group": workload.group_size}.get(schedule, options.slots)
    room = sum(each.running_steps * (rows or each.most_rows) for each in found)
    ends = [end for each in found for end in each.finish_steps]
    lengths = [
        workload.recorded[call[place]][index % len(workload.recorded[call[place]])]
        for call, each in zip(calls, found, strict=True)
        for place, index in zip(each.completed_prompts, each.completed, strict=True)
    ]
    bounds = _bounds(workload, options, calls, prompts_at_once)
    bound = {"token_budget": bounds["token_bound"], "full_group": None, "dynamic_slot": None}.get(
        schedule, bounds["slot_bound"]
    )
    name = schedule + (", computed again" if preemption == "recompute" else "")
    return _common(workload, options, prompts_at_once, name, sigma) | {
        "schedule": schedule,
        "preemption": preemption,
        "running_steps": steps,
        "steps_per_prompt": steps / count,
        "seconds_per_prompt": (options.c0 * steps + options.c1 * (tokens + lost) + options.c2 * parked) / count,
        **bounds,
        "of_bound": None if bound is None else steps / count / bound,
        "kv_budget_tokens": max(each.kv_pool_tokens for each in found),
        "peak_kv_tokens": max(each.peak_kv_tokens for each in found),
        "row_utilisation": tokens / room,
        "preemptions_per_prompt": sum(each.preemptions for each in found) / count,
        "recomputed_share": lost / tokens,
        "parked_share": parked / tokens,
        "completion_steps": sum(ends) / len(ends),
        "mean_length": sum(lengths) / len(lengths),
        "proven_share": None,
    }


def _optima(workload: Workload, options: SimulateOptions, prompts_at_once: int) -> Iterator[dict[str, Any]]:
    """The best schedules found that know all lengths: of the slots, and of the memory."""
    calls = calls_of(workload, options, prompts_at_once)
    lengths = [[length for place in call for length in workload.groups[place]] for call in calls]
    bounds, tokens = _bounds(workload, options, calls, prompts_at_once), sum(map(sum, workload.groups))
    slots = [slot_optimum(each, options.slots) for each in lengths]
    memory = []
    for call, each in zip(calls, lengths, strict=True):
        resident = sorted((-(-workload.prompt_tokens[place] // options.page_size) for place in call), reverse=True)[
            :prompts_at_once
        ]
        whole = budget_of(workload, options, call, prompts_at_once)
        budget = max(
            whole - sum(resident) * options.page_size, min(whole - resident[0] * options.page_size, workload.cap)
        )
        best = token_optimum(each, budget, page_size=options.page_size, max_new_tokens=workload.cap)
        # a prompt that has ended gives its room to responses, which the budget above leaves out
        if prompts_at_once > 1:
            planned = simulate_call(workload, options, call, prompts_at_once, "token_budget", 0.0)
            best = min(best, TokenOptimum(planned.running_steps, planned.recomputed_tokens, planned.parked_tokens))
        memory.append(best)
    recomputed, copied = (
        sum(getattr(each, kind) for each in memory) for kind in ("recomputed_tokens", "parked_tokens")
    )
    kinds: tuple[tuple[str, Sequence[Any], int, int, str], ...] = (
        ("optimum, slots", slots, 0, 0, "slot_bound"),
        ("optimum, memory", memory, recomputed, copied, "token_bound"),
    )
    for name, optima, lost, parked, bound in kinds:
        steps = sum(each.steps for each in optima)
        per_prompt = steps / len(workload.groups)
        proven = sum(each.proven for each in slots) / len(slots) if bound == "slot_bound" else None
        found = {
            "name": name,
            "running_steps": steps,
            "steps_per_prompt": per_prompt,
            "seconds_per_prompt": (options.c0 * steps + options.c1 * (tokens + lost) + options.c2 * parked)
            / len(workload.groups),
            "recomputed_share": lost / tokens,
            "parked_share": parked / tokens,
            **bounds,
            "of_bound": per_prompt / bounds[bound],
            "proven_share": proven,
        }
        yield _common(workload, options, prompts_at_once, name, 0.0) | dict.fromkeys(MEASURED) | found


def _common(
    workload: Workload, options: SimulateOptions, prompts_at_once: int, schedule: str, sigma: float | None
) -> dict[str, Any]:
    known = "" if sigma is None else ", true lengths" if sigma == 0 else f", sigma {sigma:g}"
    return {
        "name": schedule + known,
        "file": workload.name,
        "dataset": workload.dataset,
        "model": workload.model,
        "schedule": schedule,
        "sigma": sigma,
        "prompts": len(workload.groups),
        "group_size": workload.group_size,
        "slots": options.slots,
        "cap": workload.cap,
        "page_size": options.page_size,
        "prompts_at_once": prompts_at_once,
    }


def _bounds(workload: Workload, options: SimulateOptions, calls: list[range], prompts_at_once: int) -> dict[str, float]:
    """Mean bounds of a prompt's share of its call (see token_bound). At least the call's shortest prompt is resident
    while it decodes."""
    slots = tokens = 0.0
    for call in calls:
        lengths = [length for place in call for length in workload.groups[place]]
        budget = budget_of(workload, options, call, prompts_at_once) - min(
            workload.prompt_tokens[place] for place in call
        )
        slots += slot_bound(lengths, options.slots)
        tokens += token_bound(lengths, budget)
    return {"slot_bound": slots / len(workload.groups), "token_bound": tokens / len(workload.groups)}


def _print_table(
    workload: Workload, options: SimulateOptions, records: list[dict[str, Any]], prompts_at_once: int
) -> None:
    """A heading with the bounds, then a row per measurement; means per prompt."""
    together = (
        "one prompt at a time"
        if prompts_at_once == 1
        else f"{prompts_at_once} of {options.prompts_per_call} prompts at a time"
    )
    first = records[0]
    print(
        f"\n{workload.name}: {first['prompts']} prompts, G = {first['group_size']}, g = {first['slots']}, cap "
        f"{first['cap']}, {together}"
    )
    print(
        f"{first['slot_bound']:,.0f} steps: lower bound of the slots; {first['token_bound']:,.0f} steps: {MEMORY_BOUND}"
    )
    measurements.print_table([{name: _cell(name, record[name]) for name in COLUMNS} for record in records], COLUMNS)


def _cell(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    return format(value, FORMATS.get(name, ",.0f"))


if __name__ == "__main__":
    sys.exit(main())

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infsample_rl.commands import measurements
from infsample_rl.commands.schedule_records import measure
from infsample_rl.commands.schedule_workload import MEMORY_BOUND, SimulateOptions, Workload, load, names_of
from infsample_rl.config.command_line import check_writable, run_with_options

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

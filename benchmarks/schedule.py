"""All schedules on recorded response lengths, one prompt at a time and several together, at equal KV memory, beside
bounds and optimum.

python -m benchmarks.schedule [lengths=FILE[,FILE]] [slots=4] [group_size=32] [noise=[0,0.25,0.5,1]] [prompts_at_once=4]
[json=true] ...

The measurements are those of `python -m infsample_rl.simulate`, which says what they mean; here every file is simulated
twice, and two figures are drawn: schedule.png, the steps of every schedule, and slots.png, who decoded when, for one
prompt of the first file.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from infsample_rl.commands.schedule_workload import LENGTHS, SimulateOptions
from infsample_rl.commands.simulate import run
from infsample_rl.config.command_line import option, run_with_options


@dataclass(kw_only=True)
class ScheduleOptions(SimulateOptions):
    """Arguments of this command: those of `simulate`, other defaults."""

    lengths: list[str] = option(
        sorted(str(path) for path in LENGTHS.glob("*.jsonl*")), f"files of recorded lengths; default: all of {LENGTHS}"
    )
    group_size: int | None = option(
        32, "G, samples taken of every prompt; one with fewer is taken whole; none: all recorded", low=1
    )
    prompts_at_once: int = option(4, "prompts resident together in the second part; 1: no second part", low=1)
    noise: list[float] = option(
        [0.0, 0.25, 0.5, 1.0], "sigma of the predictions' lognormal error; 0: true lengths", low=0
    )
    optimum: bool = option(True, "also the best schedules found with all lengths known beforehand")
    out: str | None = option("bench_out", "folder of the figures; none: no figures")


def main() -> int:
    """Run both parts; 2 for files or settings that cannot be used."""
    return run_with_options(
        lambda options: run(options, sorted({1, options.prompts_at_once})), ScheduleOptions, usage=__doc__
    )


if __name__ == "__main__":
    sys.exit(main())

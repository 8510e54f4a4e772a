"""How many workers one driver can lead: the real driver and Cluster with fake workers that send records of true size.

python -m benchmarks.scale [workers=[8,64,512]] [step_seconds=10] [steps=3] [processes=64] [json=true]

Every rollout worker gets a prompt with G = 32 samples of 1,024 tokens a step and sends them over `step_seconds`; a
learner rank for every eight of them reads the rows, a reward worker for every 32 scores. Each point has a process and a
Ray of its own. Up to `processes` rollout workers have a process each; more share them, and run in threads. What the
driver does per worker and micro-group is the same.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.process import end_with_terminate, measure
from infsample_rl.commands import measurements
from infsample_rl.config.command_line import option, run_with_options

COLUMNS = {
    "workers": "workers",
    "worker_processes": "processes",
    "step_s": "step s",
    "driver_thread_cpu_s": "driver CPU s",
    "driver_share": "of the step",
    "stolen_share": "stolen from the cores",
    "micro_groups": "micro-groups",
    "micro_groups_per_driver_s": "micro-groups / driver CPU s",
    "object_store_bytes": "object store MB",
    "driver_bytes": "driver MB",
    "worker_bytes": "workers MB",
}


@dataclass(kw_only=True)
class ScaleOptions:
    """Arguments of this command."""

    workers: list[int] = option([8, 64, 512], "rollout workers", low=1)
    step_seconds: float = option(10.0, "seconds over which a worker sends its samples", low=0)
    steps: int = option(3, "steps measured, after one that is not", low=1)
    micro_group_size: int = option(4, "samples of a micro-group", low=1)
    processes: int = option(64, "processes of rollout workers, and of learner ranks; more workers share them", low=1)
    timeout_s: float = option(1800.0, "seconds one point may take", low=1)
    json: bool = option(False, "one JSON object per point on stdout, and nothing else there")


def main() -> int:
    """Measure all points; 1 when one failed."""
    end_with_terminate()
    return run_with_options(run, ScaleOptions, usage=__doc__)


def run(options: ScaleOptions) -> int:
    """As main()."""
    found: list[dict[str, Any]] = []
    for workers in options.workers:
        print(f"bench.scale: {workers} workers ...", file=sys.stderr, flush=True)
        try:
            found.append(measure_point(options, workers))
        except RuntimeError as error:  # e.g. out of memory: the other points still stand
            print(f"bench.scale: {workers} workers failed: {error}", file=sys.stderr, flush=True)
            continue
        if options.json:
            measurements.print_json(found[-1])
    if not options.json and found:
        measurements.print_table(found, COLUMNS)
    return 0 if len(found) == len(options.workers) else 1


def measure_point(options: ScaleOptions, workers: int) -> dict[str, Any]:
    """One point, in a process of its own."""
    names = ("step_seconds", "steps", "micro_group_size", "processes")
    spec = {"workers": workers} | {name: getattr(options, name) for name in names}
    command = [sys.executable, "-m", "benchmarks.scale_point"]
    return measure(command, spec, threads=1, timeout_s=options.timeout_s)


if __name__ == "__main__":
    sys.exit(main())

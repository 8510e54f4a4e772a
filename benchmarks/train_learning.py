"""A training run of ours beside one of TRL's from the same start: reward over steps and over wall-clock time.

python -m benchmarks.train_learning model=PATH [steps=12] [prompts=8] [group_size=8] [rivals=[trl]]
[rivals.trl_python=PYTHON] ...

Both get the same problems in the same order (one-digit products by reasoning_gym, as configs/data/arithmetic.yaml has
them), the same reward function, G, learning rate, temperature and longest response; responses end where they end. Each
side runs with the settings bench.train takes: TRL with the fastest of those it tries here first, on other problems.
Time counts from the first step's start, without loading.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import train_report
from benchmarks.process import end_with_terminate
from benchmarks.train_trl_settings import best_settings, try_settings, tune_prompts
from benchmarks.train_workload import (
    ARITHMETIC,
    Run,
    TrainingOptions,
    find_facts,
    measure_run,
    our_settings,
    run_spec,
    shown,
)
from infsample_rl.commands import measurements
from infsample_rl.config.command_line import option, run_with_options

COLUMNS = {
    "name": "name",
    "steps": "steps",
    "seconds_per_step": "s a step",
    "first_reward": "first 3",
    "last_reward": "last 4",
}


@dataclass(kw_only=True)
class LearningOptions(TrainingOptions):
    """Arguments of this command."""

    group_size: int = option(8, "G, completions of every prompt", low=2)
    prompts: int = option(8, "prompts of a step", low=1)
    steps: int = option(12, "training steps", low=1)


def main() -> int:
    """Run both sides; 1 when one failed."""
    end_with_terminate()
    return run_with_options(run, LearningOptions, usage=__doc__)


def run(options: LearningOptions) -> int:
    """As main(). RuntimeError when the model cannot be had."""
    found: list[dict[str, Any]] = []
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        runs = learning_runs(options, str(Path(scratch) / "columns.json"))
        for run in runs:
            print(
                f"bench.train_learning: {run.name}, {options.steps} steps, {shown(run.settings)} ...",
                file=sys.stderr,
                flush=True,
            )
            try:
                found.append(record_of(options, run, measure_run(options, run)))
            except RuntimeError as error:
                print(f"bench.train_learning: {run.name} failed: {error}", file=sys.stderr, flush=True)
                failed = True
                continue
            if options.json:
                measurements.print_json(found[-1])
    if not options.json:
        measurements.print_table(found, COLUMNS)
        print(f"figure: {train_report.draw_learning(found, Path(options.out))}")
    return 1 if failed else 0


def learning_runs(options: LearningOptions, file: str) -> list[Run]:
    """Ours, and TRL at the fastest of its settings; the problems' columns go to `file`."""
    count, tuning = options.prompts * options.steps, tune_prompts(options.group_size, options.prompts)
    facts = find_facts(
        options, {"what": "problems", "data": ARITHMETIC, "reward_file": file, "count": count + 2 * tuning}
    )
    spec = run_spec(
        options,
        group_size=options.group_size,
        prompts_per_step=options.prompts,
        prompts=facts["prompts"][:count],
        ignore_eos=False,
    )
    command = [sys.executable, "-m", "benchmarks.train_reward", file]
    spec |= {"reward_file": file, "reward_command": command}
    runs = [Run("ours", our_settings(options), spec, [])]
    if "trl" in options.rivals:
        tried = try_settings(options, facts, options.group_size, facts["prompts"][count:], ignore_eos=False)
        runs.append(Run("trl", best_settings(tried, "seconds", spec), spec, tried))
    return runs


def record_of(options: LearningOptions, run: Run, raw: dict[str, Any]) -> dict[str, Any]:
    """The object of one run: mean reward and seconds since the first step's start, of every step."""
    steps = raw["steps"]
    rewards = [statistics.fmean(step["rewards"]) for step in steps]
    return {
        "name": run.name,
        "seconds_per_step": statistics.fmean(step["seconds"] for step in steps),
        "peak_memory_bytes": raw["peak_memory_bytes"],
        "phases": {name: statistics.fmean(step["phases"][name] for step in steps) for name in steps[0]["phases"]},
        "steps": len(steps),
        "first_reward": statistics.fmean(rewards[:3]),
        "last_reward": statistics.fmean(rewards[-4:]),
        "reward": rewards,
        "wall_clock_s": [step["at"] for step in steps],
        "tokens": [sum(step["lengths"]) for step in steps],
        "settings": run.settings,
        "variants": run.variants,
        "device": raw["device"],
        "threads": options.threads,
        "versions": raw["versions"],
        "workload": {
            name: value for name, value in run.spec.items() if name not in ("prompts", "reward_file", "reward_command")
        },
    }


if __name__ == "__main__":
    sys.exit(main())

"""One GRPO step of ours, engine and learner in one process, beside TRL's GRPOTrainer: same model, prompts, G, lengths
and objective.

python -m benchmarks.train model=PATH [group_size=32 | group_size=[8,32,128]] [max_new_tokens=96] [rivals=[trl]]
    [rivals.trl_python=PYTHON] [json=true] ...

Every measurement has a process of its own: a step that warms up, then `repeats` steps on other prompts, of which the
median counts. TRL's settings are tried on further prompts. `trl` has the fastest of them and `trl/lean` those of least
memory; `ours/lean` recomputes all activations. With lengths=fixed prompts are random and every response takes exactly
max_new_tokens: on both sides the end token ends nothing. With lengths=natural they are one-digit products of
configs/data/arithmetic.yaml, and responses end where they end; each side draws its own.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import train_report
from benchmarks.process import Point, end_with_terminate, measure_points
from benchmarks.train_trl_settings import TUNE_SAMPLES, Tried, best_settings, try_settings, tune_prompts
from benchmarks.train_workload import (
    ARITHMETIC,
    Run,
    Spec,
    TrainingOptions,
    find_facts,
    measure_run,
    our_settings,
    preload,
    run_spec,
    shown,
)
from infsample_rl.config.command_line import option, run_with_options

# Dense peak of the matrix units, FLOP/s, by part of the device's name: NVIDIA's data sheets. float32 without TF32,
# torch's default.
PEAK_FLOPS = {
    device: {"bfloat16": half, "float16": half, "float32": single}
    for device, half, single in (
        ("H200", 989e12, 67e12),
        ("H100", 989e12, 67e12),
        ("A100", 312e12, 19.5e12),
        ("L40S", 362e12, 91.6e12),
        ("L4", 121e12, 30.3e12),
    )
}


@dataclass(kw_only=True)
class TrainOptions(TrainingOptions):
    """Arguments of this command."""

    group_size: list[int] = option(
        [32], "G, completions of every prompt; a list: all of them, one after another", low=2
    )
    prompts: int = option(1, "prompts of a step", low=1)
    lengths: str = option(
        "fixed",
        "fixed: every response has max_new_tokens; natural: they end where they end",
        choices=("fixed", "natural"),
    )
    repeats: int = option(3, "timed steps after the one that warms up; the median counts", low=1)
    lean: bool = option(True, "also measure each side at its settings of least memory (one timed step)")

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = self.prompt_tokens + self.max_new_tokens
        if self.max_tokens_per_micro_batch < longest:
            raise ValueError(
                f"max_tokens_per_micro_batch={self.max_tokens_per_micro_batch} must hold a prompt and a response: the "
                f"nearest that works is {longest}"
            )


def main() -> int:
    """Measure both sides at every G; 1 when a measurement failed or responses are not of the lengths asked for."""
    end_with_terminate()
    return run_with_options(run, TrainOptions, usage=__doc__)


def run(options: TrainOptions) -> int:
    """As main(). RuntimeError when the model cannot be had, or TRL runs with no settings."""
    count = options.prompts * (1 + options.repeats) + 2 * TUNE_SAMPLES
    data = None if options.lengths == "fixed" else ARITHMETIC
    facts = find_facts(options, data=data, count=count)
    found, failed = measure_points(points(options, facts), as_json=options.json)
    if not options.json:
        train_report.print_training(found)
        print(f"figure: {train_report.draw_training(found, Path(options.out))}")
    unequal = [f"{record['name']} at G = {record['group_size']}" for record in found if not record["lengths_as_asked"]]
    if unequal:
        print(f"bench.train: responses are not of the lengths asked for: {', '.join(unequal)}", file=sys.stderr)
    return 1 if failed or unequal else 0


def points(options: TrainOptions, facts: dict[str, Any]) -> Iterator[Point]:
    """Every measurement of both sides, at one G after another."""
    tried: dict[int, list[Tried]] = {}  # TRL's settings, by samples of the step on which they were tried
    for group_size in options.group_size:
        runs = our_runs(options, facts, group_size)
        if "trl" in options.rivals:
            runs += trl_runs(options, facts, group_size, tried)
        for run in runs:
            said = f"bench.train: {run.name} at G = {group_size}, {shown(run.settings)}"
            yield said, lambda earlier, run=run: record_of(options, facts, run, measure_run(options, run))


def our_runs(options: TrainOptions, facts: dict[str, Any], group_size: int) -> list[Run]:
    """Ours as set, and with all activations recomputed."""
    plain = our_settings(options)
    runs = [Run("ours", plain, sweep_spec(options, facts, group_size, options.repeats), [])]
    if options.lean and (options.activation_checkpointing != 1 or options.recompute_granularity != "full"):
        leanest = plain | {"activation_checkpointing": 1, "recompute_granularity": "full"}
        runs.append(Run("ours/lean", leanest, sweep_spec(options, facts, group_size, 1), []))
    return runs


def trl_runs(options: TrainOptions, facts: dict[str, Any], group_size: int, tried: dict[int, list[Tried]]) -> list[Run]:
    """TRL at the fastest settings of those tried, and at those of least memory. RuntimeError when none runs."""
    prompts = tune_prompts(group_size, options.prompts)
    samples = prompts * min(group_size, TUNE_SAMPLES)
    if samples not in tried:
        tried[samples] = try_settings(
            options, facts, group_size, facts["prompts"][-2 * prompts :], ignore_eos=options.lengths == "fixed"
        )
    spec = sweep_spec(options, facts, group_size, options.repeats)
    fastest, leanest = (best_settings(tried[samples], figure, spec) for figure in ("seconds", "peak_memory_bytes"))
    runs = [Run("trl", fastest, spec, tried[samples])]
    if options.lean and leanest != fastest:
        runs.append(Run("trl/lean", leanest, sweep_spec(options, facts, group_size, 1), tried[samples]))
    return runs


def sweep_spec(options: TrainOptions, facts: dict[str, Any], group_size: int, repeats: int) -> Spec:
    """A step that warms up and `repeats` that are timed, all on different prompts."""
    prompts = facts["prompts"][: options.prompts * (1 + repeats)]
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
    tokens = sum(steps[-1]["lengths"])
    # TRL computes every sample with a prompt of its own; padding does not count.
    last_prompts = run.spec["prompts"][-options.prompts :]
    computed = steps[-1].get("learner_tokens", tokens + sum(map(len, last_prompts)) * run.spec["group_size"])
    flops = 6 * facts["parameters"] * computed / phases["learn"]
    peak = next((peaks[options.dtype] for name, peaks in PEAK_FLOPS.items() if name in facts["device"]), None)
    shortest = options.max_new_tokens if options.lengths == "fixed" else 1
    lengths = [length for step in raw["steps"] for length in step["lengths"]]
    return {
        "name": run.name,
        "seconds_per_step": seconds,
        "peak_memory_bytes": raw["peak_memory_bytes"],
        "phases": phases,
        "tokens_per_s": tokens / seconds,
        "group_size": run.spec["group_size"],
        "prompts": options.prompts,
        "tokens": tokens,
        "lengths_as_asked": all(shortest <= length <= options.max_new_tokens for length in lengths),
        "learner_tokens": computed,
        "learner_flops_per_s": flops,
        "learner_share_of_peak": None if peak is None else flops / peak,
        "peak_process_bytes": raw["peak_process_bytes"],
        # over all threads: holds on a busy machine too
        "cpu_seconds_per_step": statistics.median(step["cpu_seconds"] for step in steps),
        "step_seconds": [step["seconds"] for step in raw["steps"]],
        "warm_up_steps": 1,
        "settings": run.settings,
        "variants": run.variants,
        "mismatch": max((step["mismatch"] for step in steps if step.get("mismatch") is not None), default=None),
        "parameters": facts["parameters"],
        "device": facts["device"],
        "allocator": Path(preload().get("LD_PRELOAD", os.environ.get("LD_PRELOAD", "libc"))).name,
        "threads": options.threads,
        "versions": raw["versions"],
        "workload": {name: value for name, value in run.spec.items() if name != "prompts"},
    }


if __name__ == "__main__":
    sys.exit(main())

"""Where a decode step of our engine spends its time: `python -m benchmarks.profile model=PATH rows=8 steps=50
json=true`.

Counted over `steps` running steps of `rows` rows, after others that warm up: operators, kernels, waits of the host for
the device, allocations. Kernels of our own on the CPU are called past torch, which does not count them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.models import load, make_prompts
from benchmarks.workload import ModelOptions
from infsample_rl.config import RolloutConfig
from infsample_rl.config.command_line import option, run_with_options
from infsample_rl.rollout.engine.decode_loop import DecodeLoop
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine

WARM_UP_STEPS = 5
MEMORY_EVENT = "[memory]"
# By name, of the CUDA runtime or of operators that read a tensor's value on the host. cudaDeviceSynchronize is this
# command's and the profiler's.
SYNCS = ("cudaStreamSynchronize", "aten::_local_scalar_dense", "Memcpy DtoH (Device -> Pageable)")
READY_WAIT = "cudaEventSynchronize"  # for what the step before drew, while this one runs
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


@dataclass(kw_only=True)
class ProfileOptions(ModelOptions):
    """The command's options."""

    rows: int = option(8, "rows of a step", low=1)
    steps: int = option(50, "steps that are profiled", low=1)
    top: int = option(15, "operators or kernels listed", low=0)
    json: bool = option(False, "one JSON object on stdout instead of tables")


def main() -> int:
    """Profile, and print what was found."""
    return run_with_options(run, ProfileOptions, usage=__doc__)


def run(options: ProfileOptions) -> int:
    """As main()."""
    torch.set_num_threads(options.threads)
    found = profile_steps(options)
    if options.json:
        print(json.dumps(found))
    else:
        _print_tables(found)
    return 0


def profile_steps(options: ProfileOptions) -> dict[str, Any]:
    """Figures of one step, means over `steps`; seconds measured without the profiler, over as many steps before."""
    loop = _running_loop(options)
    is_cuda = loop.runner.device.type == "cuda"
    seconds = _timed(loop, options.steps)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] if is_cuda else 0
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if is_cuda else [])
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        _timed(loop, options.steps)
    on_device = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated if is_cuda else None
    events = profile.profiler.kineto_results.events()
    counts = Counter(event.name() for event in events)
    kernels = [
        event
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.name().startswith("Mem")
    ]
    given = [event.nbytes() for event in events if event.name() == MEMORY_EVENT and event.nbytes() > 0]

    def per_step(total: float) -> float:
        return round(total / options.steps, 2)

    return {
        **asdict(options),
        "device": loop.runner.device.type,
        "milliseconds": round(1000 * seconds / options.steps, 3),
        "operators": per_step(
            sum(event.cpu_parent is None for event in profile.events() if event.name.startswith("aten::"))
        ),
        "operators_nested": per_step(sum(count for name, count in counts.items() if name.startswith("aten::"))),
        "kernels": per_step(len(kernels)),
        "kernel_milliseconds": round(sum(event.duration_ns() for event in kernels) / options.steps / 1e6, 3),
        "launches": per_step(sum(counts[name] for name in LAUNCHES)),
        "host_syncs": per_step(sum(counts[name] for name in SYNCS)),
        "waits_for_the_step_before": per_step(counts[READY_WAIT]),
        "allocations": per_step(len(given)),
        "allocated_bytes": per_step(sum(given)),
        "device_allocations": None if on_device is None else per_step(on_device),
        "top": _top(profile, options.steps, options.top, is_cuda),
    }


def _running_loop(options: ProfileOptions) -> DecodeLoop:
    """The loop of a call whose rows do not end within the steps, warmed up."""
    model, tokenizer = load(options)
    tokens = 2 * options.steps + WARM_UP_STEPS + 2
    config = RolloutConfig(group_size=options.rows, slots=options.rows, schedule="full_group", max_new_tokens=tokens)
    engine = SamplingEngine(model, tokenizer, config, stop_token_ids=set())
    engine.stream(make_prompts(options, tokenizer, 1), options.seed)
    _timed(engine._loop, WARM_UP_STEPS)
    return engine._loop


def _timed(loop: DecodeLoop, steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        loop.step()
    if loop.runner.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _top(profile: torch.profiler.profile, steps: int, count: int, is_cuda: bool) -> list[dict[str, Any]]:
    """The operators (CUDA: kernels too) that take most time of their own."""
    rows = []
    for event in profile.key_averages():
        microseconds = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        rows.append(
            {"name": event.key, "calls": round(event.count / steps, 2), "microseconds": round(microseconds / steps, 1)}
        )
    return sorted((row for row in rows if row["name"] != MEMORY_EVENT), key=lambda row: -row["microseconds"])[:count]


def _print_tables(found: dict[str, Any]) -> None:
    model = found["shape"] or found["model"]
    print(
        f"{model}, {found['dtype']}, {found['device']}, {found['rows']} rows, {found['steps']} steps, "
        f"{found['threads']} threads; per step:"
    )
    of_host = ("host_syncs", "waits_for_the_step_before", "allocations", "allocated_bytes", "device_allocations")
    for name in (
        "milliseconds",
        "operators",
        "operators_nested",
        "kernels",
        "kernel_milliseconds",
        "launches",
        *of_host,
    ):
        if found[name] is not None:
            print(f"  {name.replace('_', ' '):28}{found[name]:>14}")
    print(f"  {'':28}{'calls':>14}{'microseconds':>14}")
    for row in found["top"]:
        print(f"  {row['name'][:70]:28}{row['calls']:>14}{row['microseconds']:>14}")


if __name__ == "__main__":
    raise SystemExit(main())

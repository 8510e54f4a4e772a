"""Where a decode step of our engine spends its time: operators, kernels, waits of the host for the device, allocations.

Kernels of our own on the CPU are called past torch, which does not count them.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch

from benchmarks.models import Loaded
from benchmarks.ours import rollout_config
from infsample_rl.rollout.engine.decode_loop import DecodeLoop
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine

WARM_UP_STEPS, SHOWN = 5, 15
MEMORY_EVENT = "[memory]"
# By name, of the CUDA runtime or of operators that read a tensor's value on the host. cudaDeviceSynchronize is this
# module's and the profiler's, cudaEventSynchronize waits for what the step before drew, while this one runs.
SYNCS = ("cudaStreamSynchronize", "aten::_local_scalar_dense", "Memcpy DtoH (Device -> Pageable)")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


def profile_steps(given: Loaded, steps: int) -> dict[str, Any]:
    """Figures of one step of G rows, means over `steps`; milliseconds are measured without the profiler, over as many
    steps before."""
    rows = given.workload["group_size"]
    tokens = 2 * steps + WARM_UP_STEPS + 2  # no row ends within the steps
    config = rollout_config({}, group_size=rows, slots=rows, schedule="full_group", max_new_tokens=tokens)
    engine = SamplingEngine(given.model, given.tokenizer, config, stop_token_ids=set())
    engine.stream(given.prompts[:1], 0)
    loop = engine._loop
    _timed(loop, WARM_UP_STEPS)
    seconds = _timed(loop, steps)
    is_cuda = loop.runner.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if is_cuda else [])
    allocated = _device_allocations(is_cuda)
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        _timed(loop, steps)
    on_device = _device_allocations(is_cuda) - allocated
    events = profile.profiler.kineto_results.events()
    counts = Counter(event.name() for event in events)
    cuda = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
    kernels = [event for event in cuda if not event.name().startswith("Mem")]
    outermost = [event for event in profile.events() if event.cpu_parent is None and event.name.startswith("aten::")]
    totals = {
        "operators": len(outermost),
        "operators_nested": sum(count for name, count in counts.items() if name.startswith("aten::")),
        "kernels": len(kernels),
        "kernel_milliseconds": sum(event.duration_ns() for event in kernels) / 1e6,
        "launches": sum(counts[name] for name in LAUNCHES),
        "host_syncs": sum(counts[name] for name in SYNCS),
        "allocations": sum(event.name() == MEMORY_EVENT and event.nbytes() > 0 for event in events),
        "device_allocations": on_device,
    }
    found = {"rows": rows, "steps": steps, "milliseconds": round(1000 * seconds / steps, 3)}
    return (
        found
        | {name: round(total / steps, 3) for name, total in totals.items()}
        | {"top": _top(profile, steps, is_cuda)}
    )


def _timed(loop: DecodeLoop, steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        loop.step()
    if loop.runner.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _device_allocations(is_cuda: bool) -> int:
    return torch.cuda.memory_stats()["allocation.all.allocated"] if is_cuda else 0


def _top(profile: torch.profiler.profile, steps: int, is_cuda: bool) -> list[dict[str, Any]]:
    """The operators (CUDA: kernels too) that take most time of their own."""
    rows = []
    for event in profile.key_averages():
        spent = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        rows.append({"name": event.key, "calls": event.count / steps, "microseconds": round(spent / steps, 1)})
    return sorted((row for row in rows if row["name"] != MEMORY_EVENT), key=lambda row: -row["microseconds"])[:SHOWN]


def print_profile(found: dict[str, Any]) -> None:
    """The figures of a step, and what takes most of it."""
    print(f"a step of {found['rows']} rows, mean of {found['steps']}:")
    for name, value in found.items():
        if name not in ("rows", "steps", "top"):
            print(f"  {name.replace('_', ' '):28}{value:>14}")
    print(f"  {'':28}{'calls':>14}{'microseconds':>14}")
    for row in found["top"]:
        print(f"  {row['name'][:70]:28}{row['calls']:>14}{row['microseconds']:>14}")

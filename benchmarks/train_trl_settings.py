"""How TRL runs at its best: the settings that are tried, on a workload of their own, and which of them a measurement
takes."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.train_workload import Run, Spec, TrainOptions, measure_run, run_spec, shown

TUNE_SAMPLES = 32  # most of a step on which settings are tried
CPU_ROWS, CUDA_ROWS = (2, 8, 32), (8, 32, 128)  # sequences of a micro-batch
PAGE = 16  # tokens of a block of continuous batching

Tried = dict[str, Any]  # settings, seconds and peak_memory_bytes, None for one that does not run here


def tune_prompts(group_size: int, prompts: int) -> int:
    """Prompts of a step on which settings are tried for steps of `prompts`."""
    return max(1, min(prompts, TUNE_SAMPLES // group_size))


def try_settings(
    options: TrainOptions, facts: dict[str, Any], group_size: int, prompts: list[list[int]], *, ignore_eos: bool
) -> list[Tried]:
    """Seconds of the second of two steps over `prompts`, and peak memory, of every variant."""
    group_size = min(group_size, TUNE_SAMPLES)
    spec = run_spec(
        options, group_size=group_size, prompts_per_step=len(prompts) // 2, prompts=prompts, ignore_eos=ignore_eos
    )
    tried = [_try(options, spec, settings) for settings in micro_batches(spec, on_cuda=facts["on_cuda"])]
    working = [variant for variant in tried if variant["seconds"] is not None]
    base = min(working, key=lambda variant: variant["seconds"])["settings"] if working else tried[0]["settings"]
    tried += [_try(options, spec, settings) for settings in further(base, spec)]
    if all(variant["seconds"] is None for variant in tried):
        raise RuntimeError("trl: no variant runs here; what each said stands above")
    return tried


def _try(options: TrainOptions, spec: Spec, settings: dict[str, Any]) -> Tried:
    try:
        raw = measure_run(options, Run("trl", settings, spec, []))
        seconds, peak = raw["steps"][-1]["seconds"], raw["peak_memory_bytes"]
        said = f"{seconds:.2f} s, {peak / 1e6:.0f} MB"
    except RuntimeError as error:  # e.g. out of memory: the others may run
        seconds, peak, said = None, None, str(error)
    print(f"tried trl with {shown(settings)}: {said}", file=sys.stderr, flush=True)
    return {"settings": settings, "seconds": seconds, "peak_memory_bytes": peak}


def micro_batches(spec: Spec, *, on_cuda: bool) -> list[dict[str, Any]]:
    """Settings to try first for the step of `spec`: micro-batches, the smallest first, and weights.

    Left out: Liger and other hub kernels, which need a network (TRL's own head is chunked already), and vLLM.
    """
    samples = spec["group_size"] * spec["prompts_per_step"]
    rows = [rows for rows in (CUDA_ROWS if on_cuda else CPU_ROWS) if samples % rows == 0] or [samples]
    plain = {"gradient_checkpointing": False, "generation": "generate", "batching": None}
    # in 16 bits without float32 masters, which ours has; else it samples in float32 and trains by autocast
    weights = dict.fromkeys(["float32", spec["dtype"]])
    return [plain | {"rows": count, "weights": each} for each in weights for count in rows]


def further(base: dict[str, Any], spec: Spec) -> list[dict[str, Any]]:
    """What is tried with the fastest of these: continuous batching, and recomputed activations."""
    return [
        base | {"generation": "generate_batch", "batching": batching(spec)},
        base | {"gradient_checkpointing": True},
    ]


def batching(spec: Spec) -> dict[str, int]:
    """Continuous batching in a pool that holds every sample of the step; by itself it would take half of the free
    memory."""
    samples = spec["group_size"] * spec["prompts_per_step"]
    blocks = -(-(max(map(len, spec["prompts"])) + spec["max_new_tokens"]) // PAGE)
    return {"num_blocks": samples * blocks + 8, "page_size": PAGE, "max_batch_tokens": 512}


def fastest_settings(tried: list[Tried], spec: Spec) -> dict[str, Any]:
    """The fastest of the settings tried, for the step of `spec`."""
    samples = spec["group_size"] * spec["prompts_per_step"]
    working = [
        variant for variant in tried if variant["seconds"] is not None and samples % variant["settings"]["rows"] == 0
    ]
    if not working:
        raise RuntimeError(f"trl: none of the micro-batches tried divides a step of {samples} samples")
    settings = min(working, key=lambda variant: variant["seconds"])["settings"]
    return settings | ({"batching": batching(spec)} if settings["generation"] == "generate_batch" else {})

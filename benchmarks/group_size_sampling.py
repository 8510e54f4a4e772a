"""What sampling groups of G takes within one KV memory, by the simulator, beside an engine that decodes a whole group
at once. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from infsample_rl.commands.step_time import PARK_SECONDS, ROW_SECONDS, STEP_SECONDS
from infsample_rl.rollout.length_prediction.recordings import Recording
from infsample_rl.rollout.simulator import Simulation, simulate_prompts

PAGE_SIZE = 16


def sampling_records(recordings: Sequence[Recording], group_sizes: Sequence[int], slots: int) -> list[dict[str, Any]]:
    """One record for every G: seconds per 256 samples (docs/engine.md's times of a step) and KV tokens of both.

    Every prompt gets as many samples, the largest G, with its recorded lengths where they are enough and else with
    lengths drawn from them with replacement; groups are cut from those, so that all G decode the same samples.
    ValueError without recordings.
    """
    if not recordings:
        raise ValueError("there is no recording whose lengths could be simulated")
    most = max(group_sizes)
    cap = max(recording.max_new_tokens or max(recording.lengths) for recording in recordings)
    lengths = [_lengths(recording, most) for recording in recordings]
    return [
        _record(lengths, [recording.prompt_tokens or 0 for recording in recordings], cap, size, slots)
        for size in group_sizes
    ]


def _lengths(recording: Recording, count: int) -> list[int]:
    if len(recording.lengths) >= count:
        return recording.lengths[:count]
    return np.random.default_rng(0).choice(recording.lengths, size=count).tolist()


def _record(lengths: list[list[int]], prompt_tokens: list[int], cap: int, size: int, slots: int) -> dict[str, Any]:
    groups, prompts = [], []
    for samples, tokens in zip(lengths, prompt_tokens, strict=True):
        starts = range(0, len(samples) - size + 1, size)
        groups += [samples[start : start + size] for start in starts]
        prompts += [tokens] * len(starts)
    budget = (slots * -(-cap // PAGE_SIZE) + -(-max(prompts) // PAGE_SIZE)) * PAGE_SIZE
    shared = {"page_size": PAGE_SIZE, "prompt_tokens": prompts, "max_new_tokens": cap}
    ours = simulate_prompts(
        groups, "token_budget", slots=slots, kv_budget_tokens=budget, prompts_at_once=2, parks=True, **shared
    )
    full = simulate_prompts(groups, "full_group", slots=size, prompts_at_once=1, **shared)
    record: dict[str, Any] = {
        "what": "sampling",
        "group_size": size,
        "prompts": len(lengths),
        "slots": slots,
        "cap": cap,
    }
    for name, run in (("", ours), ("full_group_", full)):
        record[f"{name}kv_tokens"] = run.kv_pool_tokens
        record[f"{name}seconds"] = _seconds(run) * 256 / sum(map(len, groups))
    return record


def _seconds(run: Simulation) -> float:
    rows = run.busy_row_steps + run.recomputed_tokens
    return STEP_SECONDS * run.running_steps + ROW_SECONDS * rows + PARK_SECONDS * run.parked_tokens

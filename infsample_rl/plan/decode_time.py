"""How long sampling a step takes at least: running steps by the engine's own planner, each by what it must read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from infsample_rl.config import Config
from infsample_rl.plan.devices import Device
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.rollout_memory import pool_page_bytes, pool_pages
from infsample_rl.rollout.length_prediction.recordings import read_recordings
from infsample_rl.rollout.simulator import simulate_prompts

# samples of one worker: seconds; the time of all, in whose middle as many decode at once, grows with their square
MOST_SIMULATED = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTime:
    """Of one rollout worker's part of a step. `step_seconds`: roofline, weights and KV read once, or the arithmetic
    where that is slower."""

    lengths: str  # where they are from
    samples: int
    simulated_samples: int  # the steps are theirs, multiplied where they are fewer
    running_steps: int
    mean_rows: float
    step_seconds: float

    @property
    def seconds(self) -> float:
        """Of all running steps."""
        return self.running_steps * self.step_seconds


def decode_time(config: Config, model: ModelOutline, device: Device, lengths: Path | None) -> DecodeTime:
    """Running steps from recorded `lengths`, cut at rollout.max_new_tokens; without any every response has that many
    tokens."""
    rollout, size = config.rollout, getattr(torch, config.model.dtype).itemsize
    prompts = -(-config.data.prompts_per_step // config.cluster.rollout_workers)
    size_simulated = min(rollout.group_size, MOST_SIMULATED)
    groups = _groups(config, min(prompts, MOST_SIMULATED // size_simulated), size_simulated, lengths)
    simulated = size_simulated * len(groups)
    pages = pool_pages(config, model, device.usable_bytes - size * model.num_parameters)
    found = simulate_prompts(
        groups,
        rollout.schedule,
        slots=rollout.num_slots,
        prompts_at_once=rollout.most_prompts,
        kv_budget_tokens=None if rollout.schedule == "full_group" else pages * rollout.page_size,
        page_size=rollout.page_size,
        prompt_tokens=config.data.max_prompt_tokens,
        max_rows=rollout.most_rows if rollout.schedule == "token_budget" else None,
        max_new_tokens=rollout.max_new_tokens,
        parks=rollout.schedule == "token_budget" and rollout.preemption != "recompute",
    )
    token_bytes = pool_page_bytes(config, model) / rollout.page_size
    own = sum(length * (length - 1) // 2 for group in groups for length in group) / found.running_steps
    rows = found.busy_row_steps / found.running_steps
    # of the fewest prompts that so many rows are of
    resident = min(rollout.most_prompts, prompts, rows / rollout.group_size) * config.data.max_prompt_tokens
    read = size * model.parameters_read + token_bytes * (own + resident)
    seconds = max(read / device.bandwidth, 2 * model.parameters_read * rows / device.flops)
    return DecodeTime(
        lengths="every response as long as it may be" if lengths is None else lengths.name,
        samples=prompts * rollout.group_size,
        simulated_samples=simulated,
        running_steps=round(found.running_steps * prompts * rollout.group_size / simulated),
        mean_rows=rows,
        step_seconds=seconds,
    )


def _groups(config: Config, prompts: int, size: int, lengths: Path | None) -> list[list[int]]:
    """Lengths of `prompts` groups of `size`; recorded ones are taken in turn, also the samples of a prompt that has
    fewer."""
    cap = config.rollout.max_new_tokens
    if lengths is None:
        return [[cap] * size] * prompts
    recorded = [recording.lengths for recording in read_recordings(lengths)]
    chosen = [recorded[index % len(recorded)] for index in range(prompts)]
    return [[min(cap, group[index % len(group)]) for index in range(size)] for group in chosen]

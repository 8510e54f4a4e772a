"""How long sampling a step takes at least: running steps by the engine's own planner, each by what it must read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from infsample_rl.config import Config
from infsample_rl.config.rollout import MOST_DRAFTS
from infsample_rl.plan.devices import Device
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.rollout_memory import pool_page_bytes, pool_pages, weights_share
from infsample_rl.rollout.engine.decoder import drafts_tokens
from infsample_rl.rollout.kernels import cpu_kernels
from infsample_rl.rollout.length_prediction.recordings import Recording, read_recordings
from infsample_rl.rollout.schedule.drafter import needs_compiler
from infsample_rl.rollout.simulator import simulate_prompts
from infsample_rl.rollout.simulator_drafts import Text

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
    drafts: int | None  # tokens drafted for a row, up to; None: tokens are drafted, but no texts say how many are right
    tokens_per_row_step: float
    step_seconds: float

    @property
    def seconds(self) -> float:
        """Of all running steps."""
        return self.running_steps * self.step_seconds


def decode_time(config: Config, model: ModelOutline, device: Device, lengths: Path | None) -> DecodeTime:
    """Running steps on `device`, what there is for weights and pool, from recorded `lengths`, cut at
    rollout.max_new_tokens; without any every response has that many tokens. Where the file has the tokens too, of
    enough prompts and samples, drafted ones are counted: with rollout.speculate=auto as many as take least time.

    ValueError where a number of drafts is asked for that needs a C++ compiler and none works here.
    """
    rollout, samples = config.rollout, _samples(config)
    size, simulated = min(rollout.group_size, MOST_SIMULATED), min(samples, MOST_SIMULATED)
    sizes = [min(size, simulated - first) for first in range(0, simulated, size)]
    recorded = [] if lengths is None else read_recordings(lengths)
    texts = _texts(recorded, sizes, rollout.max_new_tokens)
    groups = _groups(config, sizes, recorded)
    tried = [0] if texts is None else _tried(config, model)
    best = min((_time(config, model, device, groups, texts, drafts) for drafts in tried), key=lambda each: each.seconds)
    return replace(
        best,
        lengths="every response as long as it may be" if lengths is None else lengths.name,
        samples=samples,
        running_steps=round(best.running_steps * samples / simulated),
        drafts=None if texts is None and drafts_tokens(config, model.architecture) else best.drafts,
    )


def _tried(config: Config, model: ModelOutline) -> list[int]:
    """Numbers of drafted tokens, the best of which is what the run takes."""
    speculate = config.rollout.speculate
    if not config.rollout.speculates:
        return [0]
    works = cpu_kernels.has_compiler() and cpu_kernels.load("no tokens are drafted") is not None
    if not works and speculate != "auto":
        raise ValueError(needs_compiler("rollout.speculate", speculate))
    if not works or not drafts_tokens(config, model.architecture):
        return [0]
    return [0, 1, 3, MOST_DRAFTS] if speculate == "auto" else [int(speculate)]


def _samples(config: Config) -> int:
    """Of a step those of the worker that has most: they are dealt one by one, but whole groups where the first to
    finish are kept."""
    dealt = config.rollout.group_size if config.rollout.schedule == "dynamic_slot" else 1
    return dealt * -(-config.samples_per_step // (dealt * config.cluster.rollout_workers))


def _time(
    config: Config,
    model: ModelOutline,
    device: Device,
    groups: list[list[int]],
    texts: list[Text] | None,
    drafts: int,
) -> DecodeTime:
    """Of these samples, with up to so many drafted tokens a row."""
    rollout, size = config.rollout, getattr(torch, config.model.dtype).itemsize
    pages = pool_pages(config, model, device.usable_bytes - weights_share(config, model))
    found = simulate_prompts(
        groups,
        rollout.schedule,
        slots=rollout.num_slots,
        prompts_at_once=rollout.most_prompts,
        epsilon=rollout.epsilon,
        kv_budget_tokens=None if rollout.schedule == "full_group" else pages * rollout.page_size,
        page_size=rollout.page_size,
        prompt_tokens=config.data.max_prompt_tokens,
        max_rows=rollout.most_rows if rollout.schedule == "token_budget" else None,
        max_new_tokens=rollout.max_new_tokens,
        parks=rollout.parks,
        texts=texts if drafts else None,
        drafts=drafts,
    )
    token_bytes = pool_page_bytes(config, model) / rollout.page_size
    rows = found.busy_row_steps / found.running_steps
    queries = (found.busy_row_steps + found.drafted_tokens) / found.running_steps
    own = sum(length * (length - 1) // 2 for group in groups for length in group) / found.tokens * queries
    # of the fewest prompts that so many rows are of
    resident = min(rollout.most_prompts, len(groups), rows / len(groups[0])) * config.data.max_prompt_tokens
    read = size * model.parameters_read + token_bytes * (own + resident)
    return DecodeTime(
        lengths="",
        samples=sum(map(len, groups)),
        simulated_samples=sum(map(len, groups)),
        running_steps=found.running_steps,
        mean_rows=rows,
        drafts=drafts,
        tokens_per_row_step=found.tokens / found.busy_row_steps,
        step_seconds=max(read / device.bandwidth, 2 * model.parameters_read * queries / device.flops)
        / rollout.tensor_parallel,
    )


def _groups(config: Config, sizes: list[int], recorded: list[Recording]) -> list[list[int]]:
    """Lengths of groups of these sizes; recorded ones are taken in turn, also the samples of a prompt that has
    fewer."""
    cap = config.rollout.max_new_tokens
    if not recorded:
        return [[cap] * size for size in sizes]
    chosen = [recorded[index % len(recorded)].lengths for index in range(len(sizes))]
    return [
        [min(cap, group[index % len(group)]) for index in range(size)]
        for size, group in zip(sizes, chosen, strict=True)
    ]


def _texts(recorded: list[Recording], sizes: list[int], cap: int) -> list[Text] | None:
    """The tokens of as many groups; None where some would have to be taken twice: drafts for them would all be
    right."""
    if len(recorded) < len(sizes):
        return None
    found = []
    for recording, size in zip(recorded, sizes, strict=False):
        if recording.token_ids is None or len(recording.token_ids) < size:
            return None
        samples = [tokens[:cap] for tokens in recording.token_ids[:size]]
        found.append(Text(recording.prompt_token_ids or [], samples))
    return found

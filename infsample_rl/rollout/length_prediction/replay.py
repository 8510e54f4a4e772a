"""Whether predictions pay: groups that have ended are run again, without the model, with and without what was predicted
for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from infsample_rl.config import RolloutConfig
from infsample_rl.rollout.schedule.prompt_group import with_means
from infsample_rl.rollout.simulator import simulate_prompts


class ReplayedSample(NamedTuple):
    """A sample that has ended."""

    sample_index: int
    length: int  # tokens
    predicted: dict[int, float]  # total length, by the tokens it had when that was known


@dataclass(slots=True)
class ReplayedGroup:
    """The samples of one prompt that have ended, in any order."""

    prompt_tokens: int
    samples: list[ReplayedSample] = field(default_factory=list)


class ReplaySettings(NamedTuple):
    """The stream that is replayed: its settings, its pool, and whether preempted KV is parked beside it."""

    config: RolloutConfig
    num_pages: int
    parks: bool


def replay(groups: Sequence[ReplayedGroup], settings: ReplaySettings) -> tuple[int, int]:
    """Running steps of all groups together through one pool, with their predictions and without.

    `token_budget` takes every prediction when it came. Schedules that wait for them decode the prefixes first; without
    predictions they do not wait.
    """
    groups = [group for group in groups if group.samples]
    prompts, ordered = [group.prompt_tokens for group in groups], [sorted(group.samples) for group in groups]
    lengths = [[sample.length for sample in samples] for samples in ordered]
    config, k = settings.config, settings.config.num_prefix_tokens
    by_budget = config.schedule == "token_budget"

    def steps(**predictions: Any) -> int:
        return simulate_prompts(
            lengths,
            config.schedule,
            slots=config.num_slots,
            prompts_at_once=config.most_prompts,
            epsilon=config.epsilon,
            kv_budget_tokens=settings.num_pages * config.page_size,
            page_size=config.page_size,
            prompt_tokens=prompts,
            max_rows=config.most_rows if by_budget else None,
            max_new_tokens=config.max_new_tokens,
            parks=settings.parks,
            **predictions,
        ).running_steps

    if by_budget:
        return steps(repredicted=[[sample.predicted for sample in samples] for samples in ordered]), steps()
    totals = [with_means([sample.predicted.get(k) for sample in samples]) for samples in ordered]
    return steps(predicted=totals, prefix_tokens=k), steps(predicted=[[1.0] * len(each) for each in lengths])

"""Whether predictions pay: groups that have ended are run again, without the model, with and without what was predicted
for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from infsample_rl.config import RolloutConfig
from infsample_rl.rollout.schedule.kv_pool import KVPool
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from infsample_rl.rollout.simulator import simulate_prompts

RECENT = 8  # replays that count


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """The schedule and the pool of the stream that is replayed."""

    schedule: str
    slots: int
    prompts_at_once: int
    max_rows: int | None
    max_new_tokens: int
    page_size: int
    kv_budget_tokens: int
    parks: bool = False  # KV of preempted samples
    prefix_tokens: int = 0  # after which a schedule that waits for predictions gets them

    @classmethod
    def of(cls, config: RolloutConfig, num_pages: int, *, parks: bool) -> ReplaySettings:
        """Those of an engine with these settings and a pool of so many pages, beside which preempted KV is parked or
        not."""
        return cls(
            schedule=config.schedule,
            slots=config.num_slots,
            prompts_at_once=config.prompts_at_once,
            max_rows=config.most_rows if config.schedule == "token_budget" else None,
            max_new_tokens=config.max_new_tokens,
            page_size=config.page_size,
            kv_budget_tokens=num_pages * config.page_size,
            parks=parks,
            prefix_tokens=config.num_prefix_tokens,
        )


def replay(groups: Sequence[ReplayedGroup], settings: ReplaySettings) -> tuple[int, int]:
    """Running steps of all groups together through one pool, with their predictions and without.

    `token_budget` takes every prediction when it came. Schedules that wait for them decode the prefixes first, and what
    that costs in prefixes computed again counts; without predictions they do not wait.
    """
    groups = [group for group in groups if group.samples]
    ordered = [sorted(group.samples) for group in groups]
    lengths = [[sample.length for sample in samples] for samples in ordered]
    options: dict[str, Any] = {
        "slots": settings.slots,
        "prompts_at_once": settings.prompts_at_once,
        "kv_budget_tokens": settings.kv_budget_tokens,
        "page_size": settings.page_size,
        "prompt_tokens": [group.prompt_tokens for group in groups],
        "max_rows": settings.max_rows,
        "max_new_tokens": settings.max_new_tokens,
        "parks": settings.parks,
    }
    if settings.schedule == "token_budget":
        predicted = [[sample.predicted for sample in samples] for samples in ordered]
        with_them = simulate_prompts(lengths, "token_budget", repredicted=predicted, **options).running_steps
        return with_them, simulate_prompts(lengths, "token_budget", **options).running_steps
    equal = [[1.0] * len(each) for each in lengths]
    without = simulate_prompts(lengths, settings.schedule, predicted=equal, **options).running_steps
    return _steps_with_prefixes(groups, ordered, settings), without


def _steps_with_prefixes(
    groups: Sequence[ReplayedGroup], ordered: Sequence[Sequence[ReplayedSample]], settings: ReplaySettings
) -> int:
    """Running steps of a schedule that starts when every sample of a prompt has its prefix and, if it lives on, a
    prediction."""
    rules = GroupSettings(
        settings.schedule, settings.slots, max(map(len, ordered)), prefix_tokens=settings.prefix_tokens
    )
    planned = [
        PromptGroup(
            place, [0] * group.prompt_tokens, list(range(len(samples))), rules, lambda _: 0, predicted_in_rows=True
        )
        for place, (group, samples) in enumerate(zip(groups, ordered, strict=True))
    ]
    pool = KVPool(settings.kv_budget_tokens // settings.page_size, settings.page_size)
    planner = StepPlanner(
        planned,
        pool,
        num_slots=settings.slots,
        prompts_at_once=settings.prompts_at_once,
        max_new_tokens=settings.max_new_tokens,
    )
    while not planner.is_done:
        ended = []
        for sample in planner.next_step().rows:
            known = ordered[sample.group_id][sample.sample_index]
            sample.predicted = known.predicted.get(sample.num_tokens, sample.predicted)
            if sample.num_tokens == known.length:
                ended.append(sample)
        planner.end_step(ended)
    return planner.running_steps


class ReplayGate:
    """Decides whether predictions are used: where recent replays took no more steps with them than without. Not before
    the first replay."""

    def __init__(self) -> None:
        self.recent: deque[tuple[int, int]] = deque(maxlen=RECENT)  # steps with and without
        self._decided: bool | None = None  # before the first replay

    def enter(self, steps_with: int, steps_without: int) -> str | None:
        """Count a replay (0 steps: there was none); a sentence at the first one, and when one opens or shuts the gate,
        with both counts."""
        if steps_without == 0:
            return None
        self.recent.append((steps_with, steps_without))
        with_them, without = self.steps
        before, self._decided = self._decided, with_them <= without
        if self._decided == before:
            return None
        verb = (
            "are used from the next step on" if self.is_open else "are not used in the next step, it goes on learning"
        )
        return (
            f"length probe: its predictions {verb}: recent groups, replayed, take {with_them:,} steps with them "
            "and "
            f"{without:,} without"
        )

    @property
    def is_open(self) -> bool:
        """Whether predictions are used."""
        return bool(self._decided)

    @property
    def steps(self) -> tuple[int, int]:
        """Steps of the recent replays together, with and without predictions."""
        return sum(pair[0] for pair in self.recent), sum(pair[1] for pair in self.recent)

"""Rows that decode with drafts on a clock of their own, for the tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

from infsample_rl.rollout.schedule.drafter import Drafter
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup, Sample

if TYPE_CHECKING:
    from infsample_rl.rollout.engine.speculation import Speculation


class Lender:
    """A planner with pages for all."""

    def lend_pages(self, sample: Sample, drafts: int) -> int:
        return drafts


def decode_on(
    clock: SimpleNamespace,
    speculation: Speculation,
    seconds: Callable[[int], float],
    *,
    right: float,
    looking: float = 0.0,
    steps: int = 400,
) -> tuple[list[int], list[float]]:
    """Four rows, of which a share repeats itself; queries and seconds of every step. `seconds` of so many
    queries; `looking` for drafts takes more."""
    group = PromptGroup(0, [1, 2, 3], [0, 1, 2, 3], GroupSettings("arrival", 4, 4), lambda index: index)
    rows = [Sample(group, index, index, 0) for index in range(4)]
    chance, queries, took = random.Random(0), [], []

    def draft(*given):
        clock.now += looking / len(rows)
        return Drafter.draft(speculation.drafter, *given)

    speculation.drafter.draft = draft
    for _ in range(steps):
        began, rests = clock.now, speculation.rest()
        drafts = (not rests and speculation.drafts_of(rows, Lender())) or [[] for _ in rows]
        tokens = 0
        for sample, drafted in zip(rows, drafts, strict=True):
            for token in [*drafted, None]:
                usual = 10 + len(sample.tokens) % 5
                sample.tokens.append(usual if chance.random() < right else chance.randrange(20, 10**6))
                tokens += 1
                if token != sample.tokens[-1]:
                    break
        queries.append(sum(map(len, drafts)) + len(rows))
        clock.now += seconds(queries[-1])
        if not rests:
            speculation.end_step(len(rows), queries[-1], tokens)
        took.append(clock.now - began)
    return queries, took

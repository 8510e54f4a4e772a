"""What a rollout worker owes: every sample it was dealt, until it has arrived."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infsample_rl.cluster.in_flight import by_prompt, settle
from infsample_rl.types import MicroGroupHeader, RolloutWork


def work(prompt: int, samples: list[int]) -> RolloutWork:
    return RolloutWork(prompt_index=prompt, prompt_ids=np.zeros(1, np.int32), sample_indices=samples)


def header(prompt: int, samples: list[int]) -> MicroGroupHeader:
    ends = ["stop"] * len(samples)
    return MicroGroupHeader(
        prompt_index=prompt,
        sample_indices=samples,
        lengths=[1] * len(samples),
        finish_reasons=ends,
        policy_version=0,
        finished_at=0.0,
    )


def pairs(owed) -> set[tuple[int, int]]:
    return {(item.prompt_index, index) for item in owed for index in item.sample_indices}


def test_pieces_of_a_prompt_become_one():
    merged = by_prompt([work(1, [3]), work(0, [5, 4]), work(1, [0, 2])])
    assert [(index, item.sample_indices) for index, item in merged.items()] == [(0, [4, 5]), (1, [0, 2, 3])]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=30, unique=True), st.randoms())
def test_what_is_owed_and_what_has_arrived_are_always_all_that_was_dealt(dealt, dice):
    owed = by_prompt([work(prompt, [index]) for prompt, index in dealt])
    order, arrived = list(dealt), set()
    dice.shuffle(order)
    for prompt, index in order:
        arrived |= pairs([settle(owed, header(prompt, [index]))])
        assert not arrived & pairs(owed.values()) and arrived | pairs(owed.values()) == set(dealt)
    assert owed == {}

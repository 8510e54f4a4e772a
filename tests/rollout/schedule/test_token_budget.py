"""The token_budget policy on hand-made rows."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy


@dataclass
class Row:
    num_tokens: int = 0
    group_id: int = 0
    admitted_order: int = -1
    predicted: float | None = None
    pages: list[int] = field(default_factory=list)
    group: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(pages=[0]))
    num_observed: int = 0


def test_expected_peak_is_that_of_exponential_lengths():
    policy = TokenBudgetPolicy(1, 900)
    rows = [Row(100), Row(50)]
    # S = 3 x 300, T = 150: 900 x exp(150 / 900 - 1) = 391.1
    assert policy.may_admit(rows, Row(), 0, 242, 392)
    assert not policy.may_admit(rows, Row(), 0, 241, 391)
    assert not policy.may_admit(rows, Row(), 0, 242, 392, others_wait=True)  # a tenth of the pages is kept back
    assert policy.may_admit(rows, Row(), 0, 242, math.ceil(392 / 0.9), others_wait=True)


def test_ended_samples_change_what_their_group_may_start():
    def started(length):
        policy, rows = TokenBudgetPolicy(1, 300), [Row(1)]
        for _ in range(9):
            policy.observe_finished(0, length)
        while policy.may_admit(rows, Row(), 0, 1200, 1200):
            rows.append(Row())
        return len(rows)

    assert started(10) > 100 > 32 > started(250) > 8


def test_pages_must_be_free_and_a_preempted_sample_leaves_room():
    policy = TokenBudgetPolicy(1, 120)
    rows = [Row(5)]
    assert policy.may_admit(rows, Row(), 0, 0, 400)
    assert not policy.may_admit(rows, Row(20), 6, 5, 400)
    assert policy.may_admit(rows, Row(20), 6, 16, 400)  # 16 - 6 = 0.25 x 40
    assert not policy.may_admit(rows, Row(20), 6, 15, 400)


def test_an_empty_engine_admits_whatever_comes():
    assert TokenBudgetPolicy(16, 4096).may_admit([], Row(4000), 250, 0, 256)


def test_in_line_are_earlier_groups_then_fresh_samples_then_those_that_lack_fewest_pages():
    policy = TokenBudgetPolicy(8, 100)
    lacking = [Row(30, pages=[1]), Row(10), Row(50, pages=[2, 3, 4, 5, 6, 7])]  # 3, 2 and 1 pages
    assert policy.next_waiting(lacking) == 2
    assert policy.next_waiting([*lacking, Row(0)]) == 3
    assert policy.next_waiting([*lacking, Row(0, group_id=1)]) == 2
    assert policy.next_waiting([Row(16), Row(9)]) == 1  # two pages each: then most work left


def test_samples_with_turns_get_on_evenly_whatever_their_group_while_there_is_room_outside_the_pool():
    policy = TokenBudgetPolicy(8, 100)
    waiting = [Row(30), Row(10, group_id=1), Row(50, predicted=60)]
    assert policy.next_waiting(waiting, turns=True, parked=0.5) == 1
    assert policy.next_waiting([*waiting, Row(0, group_id=2)], turns=True, parked=0.5) == 3
    assert policy.next_waiting(waiting, turns=True, parked=0.51) == 0
    assert policy.next_waiting(waiting[:2], parked=0.5) == 0


def test_pages_are_taken_from_the_latest_group_then_least_work_left():
    policy = TokenBudgetPolicy(1, 100)
    rows = [Row(30, 0, 0), Row(10, 0, 1), Row(20, 0, 2)]
    assert policy.donor(rows) == 0
    assert policy.victim(rows) == 2  # row 0 has run longest
    others = [Row(5, 1, 0), Row(30, 0, 1), Row(1, 1, 2)]
    assert policy.victim(others) == 2
    assert policy.donor(others) == 0


def test_some_predictions_order_all_that_wait():
    # a sample without a prediction counts with its group's mean, here the prior of 33
    policy = TokenBudgetPolicy(1, 100)
    waiting = [Row(10, predicted=40), Row(20, predicted=70), Row(5)]  # 30, 50 and 33 left
    assert [policy.next_waiting(waiting), policy.next_waiting([waiting[0], waiting[2]])] == [1, 1]
    assert policy.next_waiting([*waiting, Row(0)]) == 3  # one that has not started needs no page yet
    waiting[0].predicted = 90.0  # asked again while another decoded
    assert policy.next_waiting(waiting) == 0
    for _ in range(9):
        policy.observe_finished(0, 95)
    closed = Row(0, 2, group=SimpleNamespace(pages=None))  # of a prompt that is not resident yet
    assert policy.next_waiting([Row(10, 0, predicted=40), Row(10, 1, predicted=60), closed]) == 1
    # its group's samples turned out long: 89 of 95 left
    assert policy.next_waiting([Row(10, predicted=90), Row(5)]) == 1


def test_who_is_predicted_to_go_on_longest_is_not_preempted():
    policy = TokenBudgetPolicy(1, 100)
    # 5, 35, 10, 10 left
    rows = [
        Row(5, 0, 0, predicted=10),
        Row(60, 0, 1, predicted=95),
        Row(40, 0, 2, predicted=50),
        Row(20, 0, 3, predicted=30),
    ]
    # without predictions: most tokens
    assert policy.victim([Row(row.num_tokens, 0, row.admitted_order) for row in rows]) == 1
    assert policy.victim(rows) == 2  # most tokens of those with at most half of 35 left
    rows[2].predicted = 80.0
    assert policy.victim(rows) == 3
    assert policy.victim([rows[0], rows[1]]) == 1  # row 0 has run longest, nobody else is there
    assert policy.victim([*rows, Row(90, 1, 4, predicted=91), Row(2, 1, 5, predicted=60)]) == 4  # later groups first


def test_preemption_without_a_second_row_is_refused():
    with pytest.raises(RuntimeError, match="budget must hold"):
        TokenBudgetPolicy(1, 100).victim([Row(5)])

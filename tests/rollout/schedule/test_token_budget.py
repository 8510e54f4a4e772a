"""The token_budget policy on hand-made rows, and in a small simulation of the steps of one pool of pages."""

import math
import random
from dataclasses import dataclass, field

import pytest

from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy


@dataclass
class Row:
    num_tokens: int = 0
    group_id: int = 0
    admitted_order: int = -1
    predicted: float | None = None
    length: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass
class Outcome:
    decode_steps: int = 0
    rebuilds: int = 0
    preemptions: int = 0
    longest_wait_for_an_end: int = 0  # decoding steps


def simulate(policy, rows, num_pages, page_size, max_rows=10**6):
    """Run `rows` to their lengths in `num_pages` pages as the engine does: grow, preempt, admit, decode."""
    waiting, running, free, admissions, last_end, result = list(rows), [], num_pages, 0, 0, Outcome()

    def take(pages, own=None):
        nonlocal free
        while pages > free:
            donors = [row for row in waiting if row.pages and row is not own]
            donors[policy.donor(donors)].pages.pop()
            free += 1
        free -= pages

    def needs(row):
        return math.ceil(row.num_tokens / page_size) - len(row.pages)

    while waiting or running:
        while sum(map(needs, running)) > free + sum(len(row.pages) for row in waiting):
            result.preemptions += 1
            victim = running.pop(policy.victim(running))
            assert victim.admitted_order > min(row.admitted_order for row in running), (
                "the row that has run longest was preempted"
            )
            waiting.append(victim)
        for row in running:
            grown = needs(row)
            take(grown)
            row.pages += [0] * grown
        while waiting and len(running) < max_rows:
            index = policy.next_waiting(waiting)
            row = waiting[index]
            if not policy.may_admit(running, row, needs(row), free, num_pages):
                break
            missing = needs(row)
            result.rebuilds += row.num_tokens - 1 > len(row.pages) * page_size
            take(missing, own=row)
            row.pages += [0] * missing
            row.admitted_order = admissions
            admissions += 1
            running.append(waiting.pop(index))
        assert running and free >= 0 and free + sum(len(row.pages) for row in rows) == num_pages
        result.decode_steps += 1
        for row in running:
            row.num_tokens += 1
        ended = [row for row in running if row.num_tokens == row.length]
        for row in ended:
            free, row.pages = free + len(row.pages), []
            policy.observe_finished(row.group_id, row.length)
        running = [row for row in running if row.num_tokens < row.length]
        if ended:
            result.longest_wait_for_an_end = max(result.longest_wait_for_an_end, result.decode_steps - last_end)
            last_end = result.decode_steps
    return result


def test_a_fresh_group_starts_e_times_the_rows_that_the_budget_holds_at_the_prior():
    policy, rows = TokenBudgetPolicy(1, 300), []  # the prior is 100 tokens, the budget 1,200: e x 1200 / 100 = 32.6
    while policy.may_admit(rows, Row(), 0, 1200, 1200):
        rows.append(Row())
    assert len(rows) == 32


def test_expected_peak_is_that_of_exponential_lengths():
    policy = TokenBudgetPolicy(1, 900)
    rows = [Row(100), Row(50)]
    # S = 3 x 300, T = 150: 900 x exp(150 / 900 - 1) = 391.1
    assert policy.may_admit(rows, Row(), 0, 242, 392)
    assert not policy.may_admit(rows, Row(), 0, 241, 391)
    assert not policy.may_admit(rows, Row(), 0, 242, 392, others_wait=True)  # a tenth of the pages is kept back
    assert policy.may_admit(rows, Row(), 0, 242, math.ceil(392 / 0.9), others_wait=True)


def test_a_row_counts_with_twice_what_it_has_between_prior_and_maximum():
    policy = TokenBudgetPolicy(1, 999)
    rows = [Row(20), Row(300), Row(700)]
    # mean (333 + 333 + 600 + 999) / 4, S = 2265, T = 1020: 2265 x exp(1020 / 2265 - 1) = 1307.2
    assert policy.may_admit(rows, Row(), 0, 288, 1308)
    assert not policy.may_admit(rows, Row(), 0, 287, 1307)


def test_held_tokens_are_counted_in_whole_pages():
    policy = TokenBudgetPolicy(16, 900)
    # S = 3 x 300, T = 32 + 16, not 18: 900 x exp(48 / 900 - 1) = 349.2 is above 21 pages, with 18 it were 337.8
    rows = [Row(17), Row(1)]
    assert policy.may_admit(rows, Row(), 0, 19, 22)
    assert not policy.may_admit(rows, Row(), 0, 18, 21)


def test_ended_samples_change_what_their_group_may_start():
    def started(length):
        policy, rows = TokenBudgetPolicy(1, 300), [Row(1)]
        for _ in range(9):
            policy.observe_finished(0, length)
        while policy.may_admit(rows, Row(), 0, 1200, 1200):
            rows.append(Row())
        return len(rows)

    assert started(10) > 100 > 32 > started(250) > 8


def test_other_groups_lengths_are_the_prior_of_a_new_group():
    policy = TokenBudgetPolicy(1, 300)
    for _ in range(99):
        # prior of group 1: (100 + 99 x 20) / 100 = 20.8, budget e x 208 / 20.8 = 27 rows
        policy.observe_finished(0, 20)
    rows = []
    while policy.may_admit(rows, Row(group_id=1), 0, 208, 208):
        rows.append(Row(group_id=1))
    assert len(rows) == 27


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


def test_pages_are_taken_from_the_latest_group_then_least_work_left():
    policy = TokenBudgetPolicy(1, 100)
    rows = [Row(30, 0, 0), Row(10, 0, 1), Row(20, 0, 2)]
    assert policy.donor(rows) == 0
    assert policy.victim(rows) == 2  # row 0 has run longest
    others = [Row(5, 1, 0), Row(30, 0, 1), Row(1, 1, 2)]
    assert policy.victim(others) == 2
    assert policy.donor(others) == 0


def test_a_prediction_tells_the_work_left():
    policy = TokenBudgetPolicy(1, 100)
    rows = [Row(30, predicted=90), Row(0, predicted=20), Row(10, predicted=200)]  # 60, 20 and 90 left
    assert policy.next_waiting(rows) == 2
    assert policy.donor(rows) == 1


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


@pytest.mark.parametrize("predicted", [math.nan, math.inf, -math.inf, 0.0, -5.0, 1e300])
def test_no_prediction_keeps_a_sample_from_ending(predicted):
    rng = random.Random(2)
    rows = [
        Row(length=rng.randint(1, 50), predicted=predicted if rng.random() < 0.7 else rng.choice([None, 20.0]))
        for _ in range(30)
    ]
    result = simulate(TokenBudgetPolicy(4, 50), rows, 15, 4)
    assert [row.num_tokens for row in rows] == [row.length for row in rows]
    assert result.preemptions > 0 and result.longest_wait_for_an_end <= 50


def test_preemption_without_a_second_row_is_refused():
    with pytest.raises(RuntimeError, match="budget must hold"):
        TokenBudgetPolicy(1, 100).victim([Row(5)])


@pytest.mark.parametrize("seed", range(40))
def test_every_sample_ends_within_the_bound_in_any_pool_that_holds_one(seed):
    rng = random.Random(seed)
    page_size, max_new_tokens, groups = rng.choice([1, 3, 16]), rng.randint(1, 60), rng.randint(1, 4)
    rows = [
        Row(group_id=rng.randrange(groups), length=rng.randint(1, max_new_tokens)) for _ in range(rng.randint(1, 40))
    ]
    if seed % 3 == 0:
        for row in rows:
            row.predicted = rng.uniform(0.1, 2 * max_new_tokens)
    num_pages = math.ceil(max_new_tokens / page_size) + rng.choice([0, 0, 1, 5])
    policy = TokenBudgetPolicy(page_size, max_new_tokens)
    total = sum(row.length for row in rows)
    result = simulate(policy, rows, num_pages, page_size, max_rows=rng.choice([1, 3, 100]))
    assert [row.num_tokens for row in rows] == [row.length for row in rows]
    assert result.decode_steps <= total
    assert result.rebuilds <= total
    assert result.longest_wait_for_an_end <= max_new_tokens

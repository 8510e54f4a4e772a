"""The offline optimum beside brute force, and the schedules beside the optimum."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infsample_rl.rollout import optimum
from infsample_rl.rollout.optimum import slot_bound, slot_optimum, token_bound, token_optimum, token_packing
from infsample_rl.rollout.simulator import simulate

small = st.lists(st.integers(1, 12), min_size=1, max_size=8)


def brute_force(lengths, slots):
    """Least makespan over all assignments."""
    best = sum(lengths)
    for slots_of in itertools.product(range(slots), repeat=len(lengths) - 1):  # the first sample in slot 0
        loads = [0] * slots
        for length, slot in zip(lengths, (0, *slots_of), strict=True):
            loads[slot] += length
        best = min(best, max(loads))
    return best


def test_worked_examples():
    assert slot_optimum([3, 3, 2, 2, 2], 2) == (6, True)  # 3 + 3 and 2 + 2 + 2; longest first takes 7
    assert slot_optimum([5, 5, 4, 4, 3, 3, 3], 3) == (9, True)  # 5 + 4, 5 + 4, 3 + 3 + 3; longest first takes 11
    assert slot_optimum([7, 1], 4) == (7, True)
    assert slot_optimum([128] * 9, 4) == (3 * 128, True)  # a bound of 288 that no whole samples reach
    assert slot_bound([4, 1, 2, 6, 3, 1, 5, 2], 4) == 6 and slot_bound([1, 1, 1], 2) == 1.5
    assert token_bound([3, 2], 4) == 3 and token_bound([3, 2, 2], 3) == (6 + 3 + 3) / 3


@settings(max_examples=150, deadline=None, derandomize=True)
@given(small, st.integers(1, 3))
def test_the_optimum_of_the_slots_is_that_of_brute_force(lengths, slots):
    assert slot_optimum(lengths, slots) == (brute_force(lengths, slots), True)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(small, st.integers(1, 3))
def test_lpt_with_true_lengths_is_within_graham_s_bounds_of_the_optimum(lengths, slots):
    best = brute_force(lengths, slots)
    assert best <= simulate(lengths, "lpt", slots=slots).running_steps <= (4 / 3 - 1 / (3 * slots)) * best
    for schedule in ("arrival", "sjf", "infinite"):  # list schedules, whatever their order
        assert best <= simulate(lengths, schedule, slots=slots).running_steps <= (2 - 1 / slots) * best
    for schedule in ("naive", "fixed_slot", "fptas"):
        assert best <= simulate(lengths, schedule, slots=slots).running_steps


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), min_size=5, max_size=8), st.integers(2, 3))
def test_branch_and_bound_alone_finds_the_optimum_too(lengths, slots):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimum, "_improve", lambda groups, lengths, bound: groups)
        assert slot_optimum(lengths, slots) == (brute_force(lengths, slots), True)


def test_a_search_that_is_cut_off_says_so():
    lengths = [47, 43, 41, 37, 31, 29, 23, 19, 17, 13, 11]  # 311 tokens in 5 slots
    found = slot_optimum(lengths, 5, most_nodes=1)
    assert found.steps >= slot_optimum(lengths, 5).steps == 64
    assert not found.proven


def test_groups_of_32_end_within_a_step_of_the_bound():
    draw = random.Random(0)
    for _ in range(10):
        lengths = [min(2048, round(draw.lognormvariate(6, 0.8))) for _ in range(32)]
        found = slot_optimum(lengths, 4)
        assert found.steps - slot_bound(lengths, 4) < 1


def held(lengths, starts, step):
    return sum(step - start for length, start in zip(lengths, starts, strict=True) if start < step <= start + length)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(0, 60))
def test_a_packing_stays_within_its_budget_and_above_the_bound(lengths, more):
    budget = max(lengths) + more
    steps, starts = token_packing(lengths, budget)
    assert steps == max(start + length for start, length in zip(starts, lengths, strict=True))
    assert max(held(lengths, starts, step) for step in range(1, steps + 1)) <= budget
    assert steps >= token_bound(lengths, budget)


def test_a_packing_by_hand():
    # under 4 tokens ramps of 3 and 2 hold 2 and 4 together, then 3; the third begins beside that: 1 + 3, then 2 alone
    assert token_packing([3, 2, 2], 4) == (4, [0, 0, 2])
    # under 3 the shorter first: 1, 2 + 1, then 2 and 3; longest first, the shorter would have to wait until step 4
    assert token_packing([3, 2], 3) == (4, [1, 0])
    with pytest.raises(ValueError, match="budget_tokens must be >= the longest of lengths = 3, got 2"):
        token_packing([3, 2], 2)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(0, 60), st.sampled_from([1, 4]))
def test_the_optimum_of_the_memory_is_bracketed(lengths, more, page_size):
    budget = max(lengths) + more + page_size
    best = token_optimum(lengths, budget, page_size=page_size).steps
    assert best >= token_bound(lengths, budget) - sum(lengths) / budget  # a token's KV is taken one step after it
    assert (
        best
        <= simulate(
            lengths, "token_budget", predicted=lengths, kv_budget_tokens=budget, page_size=page_size
        ).running_steps
    )


def test_the_best_schedule_found_may_preempt():
    # one page of 2 for each token pair, 8 in all: three rows of 8 cannot stay
    assert token_optimum([8, 8, 8], 8, page_size=2) == simulate_best([8, 8, 8], 8, 2)
    assert token_optimum([4, 4], 8) == (4, 0, 0)


def simulate_best(lengths, budget, page_size):
    found = [
        simulate(
            lengths,
            "token_budget",
            predicted=lengths,
            kv_budget_tokens=budget,
            page_size=page_size,
            parks=parks,
        )
        for parks in (True, False)
    ]
    return min((result.running_steps, result.recomputed_tokens, result.parked_tokens) for result in found)


def test_the_memory_bound_can_be_beaten_where_the_newest_token_is_not_yet_held():
    steps = simulate([2] * 100, "token_budget", slots=1).running_steps
    assert steps / token_bound([2] * 100, 2) == pytest.approx(100 / 150)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(0, 60))
def test_token_budget_never_takes_fewer_steps_than_its_bound(lengths, more):
    budget = max(lengths) + more
    steps = simulate(lengths, "token_budget", kv_budget_tokens=budget).running_steps
    assert steps >= token_bound(lengths, budget) - sum(lengths) / budget

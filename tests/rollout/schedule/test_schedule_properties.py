"""Algorithms 1-3 on random lengths: what must hold whatever is predicted."""

import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infsample_rl.config.rollout import PREDICTED_SCHEDULES, SCHEDULES
from infsample_rl.rollout.schedule import fptas_groups
from infsample_rl.rollout.schedule.schedules import make_schedule
from infsample_rl.rollout.simulator import simulate

lengths_of = st.lists(st.integers(1, 40), min_size=1, max_size=24)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.floats(1, 4096), min_size=1, max_size=40), st.integers(1, 9), st.sampled_from([0.01, 0.1, 0.5]))
def test_fptas_assigns_everyone_once_and_goes_above_capacity_only_with_what_fitted_nowhere(
    lengths, num_groups, epsilon
):
    groups = fptas_groups(lengths, num_groups, epsilon)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    unit = epsilon * sum(lengths) / num_groups
    rounded = [math.ceil(length / unit) for length in lengths]
    capacity = math.ceil(sum(rounded) / num_groups)
    assert all(rounded[one] >= rounded[two] for group in groups for one, two in zip(group, group[1:], strict=False)), (
        "longest first in a group"
    )
    loads, waiting = [0] * num_groups, [deque(group) for group in groups]
    for index in sorted(range(len(lengths)), key=lambda i: -rounded[i]):  # the order of Algorithm 2
        place = next(group for group in range(num_groups) if waiting[group] and waiting[group][0] == index)
        waiting[place].popleft()
        fitting = [group for group in range(num_groups) if loads[group] + rounded[index] <= capacity]
        assert place == fitting[0] if fitting else loads[place] == min(loads)
        loads[place] += rounded[index]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    lengths_of, st.integers(1, 6), st.sampled_from([name for name in SCHEDULES if name != "dynamic_slot"]), st.randoms()
)
def test_every_sample_is_decoded_once_in_full_whatever_is_predicted(lengths, slots, schedule, draw):
    predicted = [draw.choice([0.001, 1.0, 40.0, 1e9]) for _ in lengths]
    result = simulate(lengths, schedule, slots=slots, predicted=predicted, record_rows=True)
    assert sorted(result.completed) == list(range(len(lengths)))
    assert result.busy_row_steps == sum(lengths)
    decoded = [0] * len(lengths)
    for stay in result.stays:
        decoded[stay.sample] += stay.end - stay.start
    if result.preemptions == 0:
        assert decoded == lengths and len(result.stays) == len(lengths)
        by_row = sorted((stay.row, stay.start, stay.end) for stay in result.stays)
        assert all(one[0] != two[0] or one[2] <= two[1] for one, two in zip(by_row, by_row[1:], strict=False)), (
            "a row decodes one at a time"
        )
    if schedule not in ("full_group", "token_budget"):
        assert result.running_steps <= sum(lengths)


@pytest.mark.parametrize(
    ("schedule", "constant", "backwards"),
    [("fptas", 85, 127), ("sjf", 78, 72), ("infinite", 73, 73), ("lpt", 78, 82), ("token_budget", 40, 40)],
)
def test_constant_and_reversed_predictions_cost_these_steps(schedule, constant, backwards):
    lengths = [40, 3, 17, 25, 8, 33, 12, 5]  # 143 tokens, 72 in each of two slots at best
    steps = [
        simulate(lengths, schedule, slots=2, predicted=predicted).running_steps
        for predicted in ([7.0] * 8, [50.0 - x for x in lengths])
    ]
    assert steps == [constant, backwards]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -3.0, None, 10**400])
@pytest.mark.parametrize("schedule", [*PREDICTED_SCHEDULES, "token_budget"])
def test_predictions_that_are_no_lengths_are_refused_by_sample(schedule, bad):
    with pytest.raises(ValueError, match=r"lengths must be finite and > 0 tokens, got .* for sample 1"):
        make_schedule(schedule, 3, 2, [1.0, bad, 2.0])
    with pytest.raises(ValueError, match=r"predicted must be finite and > 0 tokens, got .* for sample 1"):
        simulate([5, 6, 7], schedule, slots=2, predicted=[1.0, bad, 2.0])
    with pytest.raises(ValueError, match="repredicted must be finite and > 0 tokens"):
        simulate([5, 6, 7], "token_budget", slots=2, repredicted=[{}, {2: bad}, {}])


@pytest.mark.parametrize("lengths", [[1e308, 1e308], [10**308] * 9, [5e-324, 5e-324]])
def test_lengths_that_cannot_be_rounded_are_refused(lengths):
    with pytest.raises(ValueError, match="cannot be rounded"):
        fptas_groups(lengths, 2, 0.1)


# the KV budget of infinite and fptas


def decode(schedule, lengths, slots, predicted, budget):
    """Decode under a schedule with a KV budget; (steps, most predicted tokens that decoded together, start step of each
    sample)."""
    schedule = make_schedule(schedule, len(lengths), slots, predicted, kv_budget_tokens=budget)
    running, starts, steps, most = {}, {}, 0, 0.0
    while not schedule.is_done:
        for slot in range(slots):
            if slot not in running and (index := schedule.next_sample(slot)) is not None:
                assert index not in starts
                running[slot], starts[index] = [index, lengths[index]], steps
        assert running, "nothing decodes and samples are left"
        most = max(most, sum(predicted[index] for index, _ in running.values()))
        steps += 1
        for slot in list(running):
            running[slot][1] -= 1
            if running[slot][1] == 0:
                schedule.finished(running.pop(slot)[0], slot)
    return steps, most, starts


def test_a_sample_that_does_not_fit_now_is_passed_over():
    # bins [[0, 2], [1, 3, 4]]; 6 + 5 are above 9, so slot 1 takes the shortest, 4 (2 tokens), then 3 (3 tokens); 1 and
    # 2 follow
    assert decode("infinite", [6, 5, 4, 3, 2], 2, [6, 5, 4, 3, 2], 9)[2] == {0: 0, 4: 0, 3: 2, 2: 6, 1: 6}
    # slot 1 takes 3 of its own bin instead of 1, then 4; sample 1 starts when 0 has ended
    assert decode("fptas", [6, 5, 4, 3, 2], 2, [6, 5, 4, 3, 2], 9)[2] == {0: 0, 3: 0, 4: 3, 2: 6, 1: 6}
    assert decode("fptas", [6, 5, 4, 3, 2], 2, [6, 5, 4, 3, 2], 11)[2] == {0: 0, 1: 0, 3: 5, 2: 6, 4: 8}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lengths_of, st.integers(1, 6), st.sampled_from(["infinite", "fptas"]), st.floats(0, 100), st.randoms())
def test_what_decodes_together_stays_within_the_budget_and_everyone_ends(lengths, slots, schedule, more, draw):
    predicted = [draw.uniform(0.1, 50) for _ in lengths]
    budget = max(predicted) + more
    steps, most, starts = decode(schedule, lengths, slots, predicted, budget)
    assert most <= budget * (1 + 1e-12)
    assert sorted(starts) == list(range(len(lengths)))
    assert steps <= sum(lengths)


def test_a_bin_above_the_budget_is_refused_with_the_smallest_that_works():
    with pytest.raises(
        ValueError,
        match="bin 0 takes 6 predicted KV tokens, above kv_budget_tokens = 5 without prompt; the least that works is 6",
    ):
        make_schedule("fptas", 5, 2, [6, 5, 4, 3, 2], kv_budget_tokens=5)
    with pytest.raises(ValueError, match="kv_budget_tokens=5 is not read by schedule lpt: take fptas or infinite"):
        make_schedule("lpt", 2, 2, [1, 2], kv_budget_tokens=5)
    with pytest.raises(ValueError, match="schedule must be one of .*, got 'fastest'"):
        make_schedule("fastest", 2, 2, kv_budget_tokens=5)
    with pytest.raises(ValueError, match="schedule token_budget needs 2 predicted lengths, got 1"):
        make_schedule("token_budget", 2, 2, [1])

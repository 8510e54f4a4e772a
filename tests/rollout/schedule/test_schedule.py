"""Schedules on forced lengths, worked out by hand, and what must hold whatever is predicted."""

import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infsample_rl.config.rollout import PREDICTED_SCHEDULES, SCHEDULES
from infsample_rl.rollout.schedule.schedules import fptas_groups, make_schedule
from infsample_rl.rollout.simulator import simulate


def run(name, lengths, slots, predicted=None, slots_from=None, group_size=None):
    """Decode `lengths` under a schedule; (running steps, sample indices in finishing order, start step of each sample).

    Slot s is there from step slots_from[s] on, as when another prompt still uses it.
    """
    schedule = make_schedule(name, group_size or len(lengths), slots, predicted or lengths)
    slots_from = slots_from or [0] * slots
    running, finished, starts, steps = {}, [], {}, 0
    while not schedule.is_done:
        for slot in range(slots):
            if slot not in running and steps >= slots_from[slot]:
                index = schedule.next_sample(slot)
                if index is not None:
                    running[slot] = [index, lengths[index]]
                    starts[index] = steps
        assert running, "nothing runs and the group is not done"
        steps += 1
        for slot in list(running):
            running[slot][1] -= 1
            if running[slot][1] == 0 and not schedule.is_done:
                schedule.finished()
                finished.append(running.pop(slot)[0])
    return steps, finished, starts


LENGTHS = [4, 1, 2, 6, 3, 1, 5, 2]


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("naive", 6 + 5),  # rounds of lengths [4 1 2 6] and [3 1 5 2]
        ("fixed_slot", 6 + 2),  # slots 4 + 3, 1 + 1, 2 + 5, 6 + 2
        ("arrival", 3 + 5),  # sample 6 (5 tokens) starts when sample 5 ends at 3
        ("sjf", 2 + 6),  # 1, 5, 2, 7 start; sample 3 (6 tokens) is last, when 2 and 7 end
        ("lpt", 6),  # 24 tokens in 4 slots, no idle one
        ("fptas", 6),  # groups [3], [6 1], [0 2], [4 7 5]: 6, 6, 6 and 6 tokens
        ("infinite", 5 + 2),  # 3, 6, 0, 4 start; then 1 at 3, 5 and 2 at 4, and 7 (2 tokens) at 5
    ],
)
def test_running_steps_with_four_slots(name, steps):
    assert run(name, LENGTHS, 4)[0] == steps


def test_full_group_takes_the_longest_sample():
    assert run("full_group", LENGTHS, len(LENGTHS))[0] == 6


def test_arrival_starts_samples_in_order_as_slots_free_up():
    assert run("arrival", [3, 1, 1, 2], 2)[2] == {0: 0, 1: 0, 2: 1, 3: 2}


@pytest.mark.parametrize(
    ("schedule", "predicted", "order"),
    [
        ("sjf", None, [1, 3, 0, 2]),
        ("lpt", None, [2, 0, 3, 1]),
        ("sjf", [1.0, 9.0, 2.0, 3.0], [0, 2, 3, 1]),  # not the true lengths
    ],
)
def test_orders_follow_the_predictions(schedule, predicted, order):
    assert run(schedule, [3, 1, 4, 2], 1, predicted)[1] == order


def test_infinite_starts_the_first_of_each_group_then_the_shortest():
    # fptas_groups gives [[0, 2], [1, 3, 4]]: 0 and 1 start, then 4 (2), 3 (3), 2 (4)
    steps, _, starts = run("infinite", [6, 5, 4, 3, 2], 2)
    assert starts == {0: 0, 1: 0, 4: 5, 3: 6, 2: 7}
    assert steps == 11


def test_naive_waits_for_the_whole_round_also_when_slots_come_late():
    # slot 1 is free from step 2 on only: round one ends at 2 + 3, round two starts both
    steps, _, starts = run("naive", [4, 3, 1, 1], 2, slots_from=[0, 2])
    assert starts == {0: 0, 1: 2, 2: 5, 3: 5}
    assert steps == 6


def test_dynamic_slot_keeps_the_first_to_finish():
    # a group of 3: samples 1, 2 and the extra sample 3 end at 2, 4 and 6, and sample 0 is dropped with 6 of its 9
    # tokens
    assert run("dynamic_slot", [9, 2, 2, 2], 2, group_size=3)[:2] == (6, [1, 2, 3])


def test_a_slot_without_further_use_is_given_up():
    schedule = make_schedule("fixed_slot", 3, 2, [1.0] * 3)  # slot 0: samples 0 and 2, slot 1: sample 1
    assert [schedule.next_sample(0), schedule.next_sample(1)] == [0, 1]
    assert (schedule.holds(0), schedule.holds(1)) == (True, False)
    naive = make_schedule("naive", 3, 2, [1.0] * 3)
    naive.next_sample(0), naive.next_sample(1)
    assert (naive.holds(0), naive.holds(1)) == (True, False)
    assert not make_schedule("arrival", 3, 2, [1.0] * 3).holds(0)


def test_fptas_worked_example():
    # rounded lengths are the lengths (unit 0.1 x 20 / 2 = 1), capacity 10
    assert fptas_groups([6, 5, 4, 3, 2], 2, 0.1) == [[0, 2], [1, 3, 4]]


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
    loads, waiting = [0] * num_groups, [deque(group) for group in groups]
    for index in sorted(range(len(lengths)), key=lambda i: -rounded[i]):  # the order of Algorithm 2
        place = next(group for group in range(num_groups) if waiting[group] and waiting[group][0] == index)
        waiting[place].popleft()
        fitting = [group for group in range(num_groups) if loads[group] + rounded[index] <= capacity]
        assert place == fitting[0] if fitting else loads[place] == min(loads)
        loads[place] += rounded[index]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=24),
    st.integers(1, 6),
    st.sampled_from([name for name in SCHEDULES if name != "dynamic_slot"]),
    st.randoms(),
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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -3.0, None, 10**400])
@pytest.mark.parametrize("schedule", [*PREDICTED_SCHEDULES, "token_budget"])
def test_predictions_that_are_no_lengths_are_refused_by_sample(schedule, bad):
    with pytest.raises(ValueError, match=r"predicted must be finite and > 0 tokens, got .* for sample 1"):
        simulate([5, 6, 7], schedule, slots=2, predicted=[1.0, bad, 2.0])
    with pytest.raises(ValueError, match="repredicted must be finite and > 0 tokens"):
        simulate([5, 6, 7], "token_budget", slots=2, repredicted=[{}, {2: bad}, {}])

"""Schedules on forced lengths: running steps and orders, worked out by hand."""

import pytest

from infsample_rl.rollout.schedule import fptas_groups
from infsample_rl.rollout.schedule.schedules import make_schedule


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
                schedule.finished(running[slot][0], slot)
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


def test_sjf_starts_the_shortest_and_lpt_the_longest_first():
    assert run("sjf", [3, 1, 4, 2], 1)[1] == [1, 3, 0, 2]
    assert run("lpt", [3, 1, 4, 2], 1)[1] == [2, 0, 3, 1]


def test_orders_follow_the_predictions_not_the_true_lengths():
    assert run("sjf", [3, 1, 4, 2], 1, predicted=[1.0, 9.0, 2.0, 3.0])[1] == [0, 2, 3, 1]


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
    schedule = make_schedule("fixed_slot", 3, 2)  # slot 0: samples 0 and 2, slot 1: sample 1
    assert [schedule.next_sample(0), schedule.next_sample(1)] == [0, 1]
    assert (schedule.holds(0), schedule.holds(1)) == (True, False)
    naive = make_schedule("naive", 3, 2)
    naive.next_sample(0), naive.next_sample(1)
    assert (naive.holds(0), naive.holds(1)) == (True, False)
    assert not make_schedule("arrival", 3, 2).holds(0)


def test_fptas_worked_example():
    # rounded lengths are the lengths (unit 0.1 x 20 / 2 = 1), capacity 10
    assert fptas_groups([6, 5, 4, 3, 2], 2, 0.1) == [[0, 2], [1, 3, 4]]


def test_fptas_puts_a_sample_that_fits_nowhere_in_the_least_loaded_group():
    # three equal samples in two groups: unit 1.5, rounded [7, 7, 7], capacity 11: the third fits nowhere
    assert fptas_groups([10, 10, 10], 2, 0.1) == [[0, 2], [1]]


def test_fptas_assigns_every_sample_once():
    groups = fptas_groups([37, 5, 80, 12, 12, 64, 3], 3, 0.1)
    assert sorted(index for group in groups for index in group) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("arguments", [([], 2, 0.1), ([1, 0], 2, 0.1), ([1, 2], 0, 0.1), ([1, 2], 2, 0.0)])
def test_fptas_refuses_what_it_cannot_group(arguments):
    with pytest.raises(ValueError):
        fptas_groups(*arguments)


@pytest.mark.parametrize("arguments", [("shortest", 2, 2), ("arrival", 0, 2), ("arrival", 2, 0), ("sjf", 2, 2)])
def test_unknown_schedules_and_missing_lengths_are_refused(arguments):
    with pytest.raises(ValueError):
        make_schedule(*arguments)

"""What a step waited for, on intervals written by hand."""

from __future__ import annotations

import pytest

from infsample_rl.observe.critical_path import Interval, critical_path, intervals_of, outermost, path_line
from infsample_rl.types import Phase, WorkerPhases


def names(path: list[Interval]) -> list[tuple[str, str, float, float]]:
    return [tuple(interval) for interval in path]


def test_the_walk_goes_from_the_weights_back_to_the_slowest_decoder():
    intervals = [
        Interval("rollout 0", "decode", 0, 4),
        Interval("rollout 1", "decode", 0, 6),  # the last
        Interval("reward 0", "reward", 4, 5),
        Interval("reward 0", "reward", 6, 7),
        Interval("learner 0", "forward", 5, 5.4),
        Interval("learner 0", "backward", 5.4, 5.8),
        Interval("learner 0", "forward", 7.5, 8),
        Interval("learner 0", "backward", 8, 8.5),
        Interval("learner 0", "optimizer", 8.5, 9),
        Interval("learner 0", "sync", 9, 9.5),
        Interval("rollout 0", "sync", 9.5, 9.8),
        Interval("rollout 1", "sync", 9.5, 10),
    ]
    assert names(critical_path(intervals, 0, 10)) == [
        ("rollout 1", "decode", 0, 6),
        ("reward 0", "reward", 6, 7),
        ("", "wait", 7, 7.5),
        ("learner 0", "forward", 7.5, 8),
        ("learner 0", "backward", 8, 8.5),
        ("learner 0", "optimizer", 8.5, 9),
        ("learner 0", "sync", 9, 9.5),
        ("rollout 1", "sync", 9.5, 10),
    ]


def test_a_busy_worker_is_waited_for_rather_than_its_input():
    """The reward worker had the micro-group at 2 but was busy until 5: the step waited for rewards, not for
    decoding."""
    intervals = [
        Interval("rollout 0", "decode", 0, 1),
        Interval("rollout 0", "decode", 1, 2),
        Interval("reward 0", "reward", 1, 5),
        Interval("reward 0", "reward", 5, 9),
        Interval("learner 0", "forward", 9, 10),
    ]
    path = names(critical_path(intervals, 0, 10))
    assert path[0] == ("rollout 0", "decode", 0, 1)
    assert [part[1] for part in path] == ["decode", "reward", "reward", "forward"]


def test_what_the_driver_fits_before_it_publishes_is_waited_for():
    around = [Phase("sample", 0, 6, 0), Phase("update", 6, 7, 0), Phase("publish", 9, 10, 0)]
    driver = WorkerPhases("driver", 0, "here", [*around, Phase("learn", 7, 9, 0)], 10)
    steps = [Phase("backward", 5, 6, 0), Phase("optimizer", 6, 7, 0), Phase("sync", 9, 10, 0)]
    learner = WorkerPhases("learner", 0, "here", steps, 10)
    rollout = WorkerPhases("rollout", 0, "here", [Phase("decode", 0, 4, 0), Phase("learn", 6, 6.5, 0)], 10)
    path = critical_path(intervals_of([driver, learner, rollout]), 0, 10)
    assert [part.name for part in path][-4:] == ["backward", "optimizer", "learn", "sync"]


def test_shares_are_of_the_whole_step_and_add_up():
    """The path has no holes, whatever the phases were: before the step, across its borders, with clocks that differ by
    milliseconds."""
    intervals = [
        Interval("rollout 0", "sync", -3, -1),
        Interval("rollout 0", "decode", -0.5, 6.002),  # the reward worker's clock is 2 ms behind
        Interval("reward 0", "reward", 6, 7),
        Interval("learner 0", "optimizer", 8, 9),
        Interval("learner 0", "save", 10.5, 12),
    ]
    path = critical_path(intervals, 0, 10)
    assert sum(part.end - part.start for part in path) == pytest.approx(10, abs=0.01)
    assert all(
        after.start == pytest.approx(before.end, abs=0.01) for before, after in zip(path, path[1:], strict=False)
    )
    assert path[0].start == 0 and path[-1].end == 10
    assert critical_path([], 0, 10) == [Interval("", "wait", 0, 10)]


def test_the_line_names_the_decoder_that_was_waited_for():
    path = [
        Interval("rollout 1", "decode", 0, 6),
        Interval("reward 0", "reward", 6, 7),
        Interval("", "wait", 7, 8),
        Interval("learner 0", "forward", 8, 9),
        Interval("learner 0", "backward", 9, 9.5),
        Interval("learner 0", "optimizer", 9.5, 10),
    ]
    shares = "decode 60 % (rollout 1) > reward 10 % > forward 10 % > backward 5 % > optimizer 5 %, wait 10 %"
    assert path_line(path) == f"10.0 s: {shares}"


def test_inner_phases_count_to_the_outer_one_of_their_thread():
    phases = [("prefill", 1, 2, 0), ("decode", 0, 4, 0), ("forward", 1, 3, 1), ("decode", 4, 5, 0)]
    found = outermost("rollout 0", [Phase(*phase) for phase in phases])
    assert [interval.name for interval in found] == ["decode", "forward", "decode"]

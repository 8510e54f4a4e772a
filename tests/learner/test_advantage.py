import math

import pytest

from infsample_rl.learner.advantage import group_advantages, overlong_penalty, turn_advantages


@pytest.mark.parametrize(
    ("kind", "rewards", "advantages"),
    [
        # mean 0.25, sample std sqrt((0.75^2 + 3 * 0.25^2) / 3) = 0.5
        ("std", [1.0, 0.0, 0.0, 0.0], [0.75 / 0.500001] + [-0.25 / 0.500001] * 3),
        ("mean_only", [1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, 0.0, 0.0, 0.5], [1 - 0.5 / 3, -0.5, -0.5, 0.5 - 1 / 3]),  # minus the mean of the others
    ],
)
def test_advantages_written_out(kind, rewards, advantages):
    assert group_advantages(rewards, kind) == pytest.approx(advantages, rel=1e-12)


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_a_missing_reward_gets_zero_and_is_outside_mean_and_std(missing):
    assert group_advantages([1.0, missing, 0.0], "std") == pytest.approx(
        [0.5 / (math.sqrt(0.5) + 1e-6), 0.0, -0.5 / (math.sqrt(0.5) + 1e-6)]
    )
    assert group_advantages([1.0, missing, 0.0], "mean_only") == [0.5, 0.0, -0.5]
    assert group_advantages([1.0, missing, 0.0], "rloo") == [1.0, 0.0, -1.0]


@pytest.mark.parametrize("kind", ["std", "mean_only", "rloo"])
def test_equal_rewards_give_exact_zeros(kind):
    assert group_advantages([0.1] * 3, kind) == [0.0, 0.0, 0.0]  # 0.1 + 0.1 + 0.1 != 0.3 in floating point
    assert group_advantages([0.7, None, 0.7], kind) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rewards", [[], [3.0], [None, 3.0], [None, None]])
@pytest.mark.parametrize("kind", ["std", "rloo"])
def test_fewer_than_two_valid_rewards_give_zeros(rewards, kind):
    assert group_advantages(rewards, kind) == [0.0] * len(rewards)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((100, 20, 1.0), {1: 0.0, 80: 0.0, 85: -0.25, 90: -0.5, 100: -1.0}),  # DAPO's equation 13
        ((100, 20, 0.5), {1: 0.0, 80: 0.0, 85: -0.125, 90: -0.25, 100: -0.5}),
        ((20480, 4096, 1.0), {16384: 0.0, 18432: -0.5, 20480: -1.0}),  # the paper's own lengths
        ((100, 0, 1.0), {1: 0.0, 100: 0.0}),  # without a buffer nothing is lost
        ((4, 4, 1.0), {1: -0.25, 2: -0.5, 3: -0.75, 4: -1.0}),  # one of the whole response punishes every token
    ],
)
def test_overlong_penalties_written_out(settings, expected):
    assert {length: overlong_penalty(length, *settings) for length in expected} == expected


@pytest.mark.parametrize(
    ("rewards", "of_turns", "wanted"),
    [
        ([3.0, 1.0], [[1.0, 2.0], [1.0]], [(1.0, 0.0), (-1.0,)]),  # nothing to compare the second turn with
        ([3.0, 1.0, 2.0], [[0.0, 3.0], [0.0, 1.0], [2.0]], [(1.0, 1.0), (-1.0, -1.0), (0.0,)]),
        ([0.3, 0.4], [[0.1, 0.2], [0.2, 0.2]], [(-0.05, 0.0), (0.05, 0.0)]),  # 0.3 - 0.1 != 0.4 - 0.2 as floats are
        ([2.0, None, 1.0], [[1.0, 1.0], [5.0, 5.0], [1.0, 0.0]], [(0.5, 0.5), (0.0, 0.0), (-0.5, -0.5)]),
        ([1.5, 0.0], [[1.0, 0.0], [0.0, 0.0]], [(0.75, 0.25), (-0.75, -0.25)]),  # 0.5 of no turn belongs to the last
        ([], [], []),
    ],
)
def test_a_turn_is_credited_with_what_was_earned_from_it_on(rewards, of_turns, wanted):
    found = turn_advantages(rewards, of_turns, "mean_only")
    assert [len(own) for own in found] == [len(own) for own in wanted]
    for own, expected in zip(found, wanted, strict=True):
        assert own == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("kind", ["std", "mean_only", "rloo"])
def test_of_one_turn_it_is_the_groups_advantage_bit_for_bit(kind):
    rewards = [0.1, 0.7, None, 0.3]
    found = turn_advantages(rewards, [[0.1], [0.7], [0.0], [0.3]], kind)
    assert found == [(advantage,) for advantage in group_advantages(rewards, kind)]

"""Replays of groups that have ended, with and without their predictions. No model."""

import random

import pytest

from infsample_rl.config import RolloutConfig
from infsample_rl.rollout.length_prediction.replay import ReplayedGroup, ReplayedSample, ReplaySettings, replay

LENGTHS = [[40, 3, 9, 27, 60, 5, 14, 33], [8, 50, 21, 2, 44, 17, 30, 6]]


def settings_of(schedule, **changes):
    prefix = {} if schedule == "token_budget" else {"prefix_tokens": 2}
    sizes = {"group_size": 8, "slots": 3, "prompts_at_once": 1, "max_new_tokens": 64, "page_size": 4}
    return ReplaySettings(RolloutConfig(schedule=schedule, **sizes, **prefix, **changes), num_pages=52, parks=False)


def groups_with(predict):
    """Both groups, every sample predicted at 2, 10, 18, ... tokens by predict(length, tokens)."""

    def sample(index, length):
        moments = {tokens: float(predict(length, tokens)) for tokens in range(2, length, 8)}
        return ReplayedSample(index, length, moments)

    return [ReplayedGroup(7, [sample(*each) for each in enumerate(lengths)]) for lengths in LENGTHS]


def test_longest_first_gains_by_true_lengths_and_loses_by_reversed_ones():
    right, without = replay(groups_with(lambda length, _: length), settings_of("lpt"))
    wrong, again = replay(groups_with(lambda length, _: 100 - length), settings_of("lpt"))
    assert without == again
    assert right < without < wrong
    assert right >= sum(map(sum, LENGTHS)) / 3  # slots


@pytest.mark.parametrize("schedule", ["token_budget", "lpt", "sjf", "fptas", "infinite"])
def test_a_replay_ends_whatever_was_predicted(schedule):
    draw = random.Random(3)
    for predict in (
        lambda *_: 1.0,
        lambda *_: 64.0,
        lambda *_: 1e30,
        lambda *_: 1e-30,
        lambda *_: draw.uniform(0.5, 100),
    ):
        steps = replay(groups_with(predict), settings_of(schedule))
        assert min(steps) >= 60
        assert max(steps) <= 2 * sum(map(sum, LENGTHS))


def test_a_replay_rounds_as_the_run_does():
    fine, coarse = (
        replay(groups_with(lambda length, _: length), settings_of("fptas", epsilon=epsilon))[0]
        for epsilon in (0.1, 2.0)
    )
    # where all count as of one size, the samples of 27, 60 and 5 tokens share a slot
    assert coarse > 1.2 * fine


def test_a_group_none_of_which_was_kept_is_left_out():
    groups = groups_with(lambda length, _: length)
    assert replay([*groups, ReplayedGroup(3)], settings_of("lpt")) == replay(groups, settings_of("lpt"))

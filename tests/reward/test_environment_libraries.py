"""Environments of the libraries that users have, unchanged, in their processes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from infsample_rl.config.environment import EnvironmentConfig
from infsample_rl.config.loading import load_config
from infsample_rl.reward.environment_host import EnvironmentHost
from infsample_rl.types import EpisodeStart

pytestmark = pytest.mark.slow
MADE = '''
import gymnasium
import skyrl_gym
import textarena
from skyrl_gym.envs.base_text_env import BaseTextEnv


def guess():
    return textarena.make("GuessTheNumber-v0-raw")


def guess_with_history():
    return textarena.make("GuessTheNumber-v0")


class Numbers(gymnasium.ActionWrapper):
    """Actions as text."""

    def action(self, text):
        return int(text)


def lake():
    return Numbers(gymnasium.make("FrozenLake-v1", is_slippery=False))


def sums(answer, **row) -> BaseTextEnv:
    return skyrl_gym.make("gsm8k_multi_turn", extras={"reward_spec": {"ground_truth": answer}, "max_turns": 3})


def unsaid(answer):
    return None
'''


@pytest.fixture
def play(tmp_path):
    """What an environment says to each of some actions, in order, or what made of what it said first; its opening."""
    path = tmp_path / "made.py"
    path.write_text(MADE)

    def run(name, actions, seed=3, **columns):
        config = replace(load_config([]), environment=EnvironmentConfig(factory=f"{path}:{name}", timeout_s=60))
        host = EnvironmentHost(config)
        try:
            assert host.form == "actions"
            host.open(0, EpisodeStart(seed, columns))
            replies = []
            for action in actions:
                host.ask(0, ("act", action))
                replies.append(host.answers.get(timeout=60)[1])
            return host.opening(seed, columns), replies
        finally:
            host.close()

    return run


def test_textarena_says_what_is_new_and_its_reward_at_the_end(play):
    opening, replies = play("guess", [f"[{number}]" for number in range(1, 11)])
    assert "guess the number between 1 and 20 within 10 turns" in opening
    last = next(place for place, reply in enumerate(replies) if reply.get("ended"))
    hints = [reply["said"] for reply in replies[:last]]
    assert hints == ["The target number is higher."] * last and all(not reply["reward"] for reply in replies[:last])
    assert 0 < replies[last]["reward"] <= 1
    again, same = play("guess", [f"[{number}]" for number in range(1, 11)])
    assert (again, same[: last + 1]) == (opening, replies[: last + 1])  # of one seed
    _, wrapped = play("guess_with_history", ["[1]", "[2]"])
    for reply, number in zip(wrapped, (1, 2), strict=True):
        assert re.fullmatch(rf"\s*\[Player\] \[{number}\]\s*\[GAME\] The target number is \w+\.\s*", reply["said"])


def test_a_gymnasium_environment_that_a_function_makes(play):
    opening, replies = play("lake", ["2", "2", "1", "1", "1", "2"])
    assert opening == "0" and [reply["said"] for reply in replies] == ["1", "2", "6", "10", "14", "15"]
    assert [reply["reward"] for reply in replies] == [0, 0, 0, 0, 0, 1] and replies[-1]["ended"]
    assert "ValueError" in play("lake", ["left"])[1][0]["failed"]


def test_a_skyrl_environment_is_made_of_its_row(play):
    _, replies = play("sums", ["#### 7", "#### 42"], answer="42")
    assert not replies[0]["ended"] and replies[0]["said"]
    assert replies[1]["reward"] > replies[0]["reward"]
    with pytest.raises(ValueError, match="unsaid takes columns: its annotation must say what class it returns"):
        play("unsaid", [])

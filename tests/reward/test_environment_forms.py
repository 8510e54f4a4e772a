"""Forms of environments that are acted in by text, by stand-ins of their libraries' shapes."""

from enum import Enum
from types import SimpleNamespace

import pytest

from infsample_rl.reward.environment_forms import Acted, accepted, acting, acts, begins

Kind = Enum("Kind", ["PLAYER_ACTION", "GAME_MESSAGE"])


class Game:
    """As TextArena's, with a wrapper's text where `wrapped`."""

    def __init__(self, wrapped=False):
        self.wrapped, self.messages, self.told = wrapped, [], 0

    def reset(self, num_players, seed=None):
        self.messages = [(-1, f"{num_players} player, seed {seed}", Kind.GAME_MESSAGE)]

    def get_observation(self):
        new, self.told = self.messages[self.told :], len(self.messages)
        return 0, "".join(f"[{text}]" for _, text, _ in self.messages) if self.wrapped else new

    def step(self, action):
        self.messages += [(0, action, Kind.PLAYER_ACTION), (-1, f"not {action}", Kind.GAME_MESSAGE)]
        return action == "end", {}

    def close(self):
        return {0: 0.75}, {}


class Solve:
    """As SkyRL-gym's."""

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "Begin."}], {}

    def step(self, action):
        return {"observations": [{"role": "user", "content": "Wrong."}], "reward": 0.1, "done": action == "42"}


def test_textarenas_games_say_what_is_new():
    game = acting(Game(), lambda function, *given, **named: function(*given, **named))
    assert game.open(3, {}) == "1 player, seed 3"
    assert game.act("one") == Acted("not one", 0.0, False) and game.act("end") == Acted("", 0.75, True)
    wrapped = acting(Game(wrapped=True), lambda function, *given, **named: function(*given, **named))
    assert wrapped.open(3, {}) == "[1 player, seed 3]" and wrapped.act("one").said == "[one][not one]"


def test_skyrls_environments_speak_in_messages():
    solve = acting(Solve(), lambda function, *given: function(*given))
    assert solve.open(3, {}) == "Begin."
    assert solve.act("1") == Acted("Wrong.", 0.1, False) and solve.act("42").ended


@pytest.mark.parametrize(
    ("kind", "is_acted_in", "can_begin"),
    [
        (Game, True, True),
        (Solve, True, True),
        (SimpleNamespace(reset=print), False, True),
        (SimpleNamespace(init=print), False, False),
        (SimpleNamespace(step=print), True, False),
    ],
)
def test_forms_are_told_by_their_methods(kind, is_acted_in, can_begin):
    assert (acts(kind), begins(kind)) == (is_acted_in, can_begin)


def test_a_function_is_given_what_it_asks_for():
    row = {"answer": "42", "level": 3}
    assert accepted(lambda answer: answer, row) == {"answer": "42"} and accepted(lambda: 0, row) == {}
    assert accepted(lambda **columns: columns, row) == row

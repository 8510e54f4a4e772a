"""Forms of environments that are acted in by text, by stand-ins of their libraries' shapes."""

from enum import Enum
from types import SimpleNamespace

import pytest

from infsample_rl.reward.environment_forms import Acted, acting, acts, begins
from infsample_rl.reward.peer_forms import accepted

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


class Walk:
    """TRL's form, with a tool that is called step."""

    def reset(self, **row):
        return "Go."

    def step(self, where: str) -> str:
        """Goes somewhere.

        Args:
            where: Left or right.
        """
        return where

    def get_reward(self):
        return 1.0


class Old:
    """gymnasium's form, with a helper of that name."""

    def __init__(self, found=("seen", 0.5, True, {"k": 1})):
        self.found = found

    def reset(self):
        return "Go."

    def step(self, action):
        return self.found

    def get_reward(self, action):
        return 1.0


class Typed(Old):
    def step(self, action: str):
        return self.found


@pytest.mark.parametrize(
    ("found", "ended"),
    [
        (("seen", 0.5, False, {"k": 1}), False),
        (("seen", 0.5, True, {}), True),
        (("seen", 0.5, False, True), True),
        (("seen", 0.5, False, False, {"k": 1}), False),
        (("seen", 0.5, False, True, {}), True),
    ],
)
def test_a_step_may_have_one_word_for_both_ends_before_its_info(found, ended):
    assert acting(Old(found), lambda function, *given: function(*given)).act("go") == Acted("seen", 0.5, ended)


@pytest.mark.parametrize(
    ("found", "got"), [(("seen", 0.5), "2 of them"), ("seen", "str"), (["seen", 0.5, False, False, {}], "list")]
)
def test_a_step_that_returns_something_else_says_so(found, got):
    with pytest.raises(ValueError, match=f"step must return .observation, reward, .* got {got}"):
        acting(Old(found), lambda function, *given: function(*given)).act("go")


def test_actions_that_are_no_text_are_refused():
    made = Old()
    made.action_space = SimpleNamespace(n=4)
    with pytest.raises(ValueError, match="its actions are namespace.n=4., a policy's are texts: wrap it"):
        acting(made, lambda function, *given: function(*given)).open(3, {})
    wrapped = SimpleNamespace(env=made, action_space=made.action_space, reset=lambda: "seen", step=made.step)
    assert acting(wrapped, lambda function, *given: function(*given)).open(3, {}) == "seen"
    wrapped = type("OrderEnforcing", (SimpleNamespace,), {"__module__": "gymnasium.wrappers.common"})(**vars(wrapped))
    with pytest.raises(ValueError, match="its actions are"):
        acting(wrapped, lambda function, *given: function(*given)).open(3, {})


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
        (Walk, False, True),
        (Old, True, True),
        (Typed, True, True),
    ],
)
def test_forms_are_told_by_their_methods(kind, is_acted_in, can_begin):
    assert (acts(kind), begins(kind)) == (is_acted_in, can_begin)


def test_a_function_is_given_what_it_asks_for():
    row = {"answer": "42", "level": 3}
    assert accepted(lambda answer: answer, row) == {"answer": "42"} and accepted(lambda: 0, row) == {}
    assert accepted(lambda **columns: columns, row) == row

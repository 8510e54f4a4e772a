"""Environments that are acted in by text, one text a turn, in the forms that their libraries give them; told apart by
their methods. Each is made into one form.

    gymnasium    reset(seed, options), step(action) -> (observation, reward, terminated, truncated, info)
    SkyRL-gym    init(prompt) -> (messages, info), step(action) -> {"observations": messages, "reward", "done", ...}
    TextArena    reset(num_players, seed), get_observation(), step(action) -> (done, info), close() -> (rewards, ...)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

Call = Callable[..., Any]  # calls a method, and waits for one that is async


class Acted(NamedTuple):
    """What comes of an action."""

    said: Any
    reward: Any
    ended: bool


class Acting(Protocol):
    """An environment of one trajectory."""

    def open(self, seed: int, columns: dict[str, Any]) -> Any:
        """Begin; what is said then, None: nothing."""

    def act(self, text: str) -> Acted:
        """What comes of a turn's text."""


def acts(kind: Any) -> bool:
    """Whether instances of a class are acted in by text."""
    return callable(getattr(kind, "step", None))


def begins(kind: Any) -> bool:
    """Whether instances of a class can begin an episode."""
    return callable(getattr(kind, "reset", None)) or (acts(kind) and callable(getattr(kind, "init", None)))


def acting(made: Any, call: Call) -> Acting:
    """An instance in the one form."""
    if callable(getattr(made, "init", None)):
        return SkyRL(made, call)
    return TextArena(made, call) if callable(getattr(made, "get_observation", None)) else Gymnasium(made, call)


def accepted(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """What of `given` a function has parameters for."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in given.items() if takes_all or name in parameters}


class Gymnasium:
    """As Acting."""

    def __init__(self, made: Any, call: Call) -> None:
        self._made, self._call = made, call

    def open(self, seed: int, columns: dict[str, Any]) -> Any:
        """As Acting.open; the row's columns are reset's options."""
        given = accepted(self._made.reset, {"seed": seed, "options": columns})
        said = self._call(self._made.reset, **given)
        return said[0] if isinstance(said, tuple) else said  # beside it is info

    def act(self, text: str) -> Acted:
        """As Acting.act."""
        said, reward, terminated, truncated = self._call(self._made.step, text)[:4]
        return Acted(said, reward, bool(terminated or truncated))


class SkyRL:
    """As Acting."""

    def __init__(self, made: Any, call: Call) -> None:
        self._made, self._call = made, call

    def open(self, seed: int, columns: dict[str, Any]) -> Any:
        """As Acting.open. The prompt is the row's, so that it is given none; it has no seed."""
        messages, _ = self._call(self._made.init, [])
        return _contents(messages) or None

    def act(self, text: str) -> Acted:
        """As Acting.act."""
        found = self._call(self._made.step, text)
        return Acted(_contents(found["observations"]), found["reward"], bool(found["done"]))


class TextArena:
    """As Acting, of games of one player. The reward comes with the end."""

    def __init__(self, made: Any, call: Call) -> None:
        self._made, self._call, self._said = made, call, ""

    def open(self, seed: int, columns: dict[str, Any]) -> Any:
        """As Acting.open."""
        self._call(self._made.reset, num_players=1, seed=seed)
        return self._observe()

    def act(self, text: str) -> Acted:
        """As Acting.act."""
        done, _ = self._call(self._made.step, text)
        if not done:
            return Acted(self._observe(), 0.0, False)
        rewards, *_ = self._call(self._made.close)
        return Acted("", rewards[0], True)

    def _observe(self) -> str:
        """What is new: messages but the player's own, or what a wrapper's text, which repeats all, has more."""
        _, found = self._call(self._made.get_observation)
        if not isinstance(found, str):
            return "\n".join(text for _, text, kind in found if kind.name != "PLAYER_ACTION")
        before, self._said = self._said, found
        return found[len(before) :] if found.startswith(before) else found


def _contents(messages: Sequence[dict[str, Any]]) -> str:
    return "\n".join(str(message["content"]) for message in messages)

"""Environments that are acted in by text, one text a turn, in the forms that their libraries give them; told apart by
their methods. Each is made into one form.

    gymnasium    reset(seed, options), step(action) -> (observation, reward, terminated, truncated, info)
    SkyRL-gym    init(prompt) -> (messages, info), step(action) -> {"observations": messages, "reward", "done", ...}
    TextArena    reset(num_players, seed), get_observation(), step(action) -> (done, info), close() -> (rewards, ...)
    a program    rollout(base_url, api_key, ...) -> reward, which calls the policy itself, as OpenAI's or vLLM's API
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from infsample_rl.reward.peer_forms import accepted
from infsample_rl.reward.policy_conversation import Asked, PolicyTurn
from infsample_rl.reward.policy_endpoint import PolicyEndpoint

Call = Callable[..., Any]  # calls a method, and waits for one that is async


class Acted(NamedTuple):
    """What comes of an action."""

    said: Any  # where tools were called, a list of what each of them said
    reward: Any
    ended: bool
    token_ids: list[int] | None = None  # in the place of what is said


def acts(kind: Any) -> bool:
    """Whether instances of a class are acted in by text."""
    return _is_no_tool(kind, "step") or plays(kind)


def plays(kind: Any) -> bool:
    """Whether instances of a class call the policy themselves."""
    return _is_no_tool(kind, "rollout")


def _is_no_tool(kind: Any, name: str) -> bool:
    """Whether a class has the method, and not as one of the tools of TRL's form: beside get_reward, and written for a
    model, with a docstring and types."""
    method = getattr(kind, name, None)
    if not callable(method) or not callable(getattr(kind, "get_reward", None)):
        return callable(method)
    _, *parameters = inspect.signature(method).parameters.values()
    return not inspect.getdoc(method) or any(each.annotation is each.empty for each in parameters)


def begins(kind: Any) -> bool:
    """Whether instances of a class can begin an episode."""
    openings = ("reset", "init", "rollout") if acts(kind) else ("reset",)
    return any(callable(getattr(kind, name, None)) for name in openings)


def acting(made: Any, call: Call) -> Acting:
    """An instance in the one form."""
    if plays(made):
        return Program(made)
    if callable(getattr(made, "init", None)):
        return SkyRL(made, call)
    return TextArena(made, call) if callable(getattr(made, "get_observation", None)) else Gymnasium(made, call)


class Gymnasium:
    """An environment of one trajectory, as the other forms are made."""

    def __init__(self, made: Any, call: Call) -> None:
        self._made, self._call = made, call

    def open(self, seed: int, columns: dict[str, Any]) -> Any:
        """Begin; what is said then, None: nothing. The row's columns are reset's options. ValueError for actions that
        are no text."""
        space = getattr(self._made, "action_space", None)
        if space is not None and type(space).__name__ != "Text" and not _is_wrapped(self._made):
            raise ValueError(f"its actions are {space}, a policy's are texts: wrap it in a class whose step takes one")
        given = accepted(self._made.reset, {"seed": seed, "options": columns})
        said = self._call(self._made.reset, **given)
        return said[0] if isinstance(said, tuple) else said  # beside it is info

    def act(self, text: str, is_last: bool = False, calls: Sequence[tuple[str, dict[str, Any]]] = ()) -> Acted:
        """What comes of a turn's text. `is_last`: no turn follows. `calls`: of the tools that a program has offered."""
        found = self._call(self._made.step, text)
        if not isinstance(found, tuple) or len(found) not in (4, 5):
            got = f"{len(found)} of them" if isinstance(found, tuple) else type(found).__name__
            raise ValueError(f"step must return (observation, reward, terminated, truncated, info), got {got}")
        said, reward, *ends = found
        if isinstance(ends[-1], dict):  # info: before gymnasium 0.26 behind one word for both ends
            ends.pop()
        return Acted(said, reward, any(map(bool, ends)))


def _is_wrapped(made: Any) -> bool:
    """Whether a wrapper stands around an environment that is not gymnasium's (or gym's) own: it may take a policy's
    texts without saying so."""
    while (inner := getattr(made, "__dict__", {}).get("env")) is not None:
        if not type(made).__module__.startswith(("gymnasium.", "gym.")):
            return True
        made = inner
    return False


class SkyRL:
    """As Gymnasium."""

    def __init__(self, made: Any, call: Call) -> None:
        self._made, self._call = made, call

    def open(self, seed: int, columns: dict[str, Any]) -> Any:
        """As Gymnasium.open. The prompt is the row's, so that it is given none; it has no seed."""
        messages, _ = self._call(self._made.init, [])
        return _contents(messages) or None

    def act(self, text: str, is_last: bool = False, calls: Sequence[tuple[str, dict[str, Any]]] = ()) -> Acted:
        """As Gymnasium.act."""
        found = self._call(self._made.step, text)
        return Acted(_contents(found["observations"]), found["reward"], bool(found["done"]))


class TextArena:
    """As Gymnasium, of games of one player. The reward comes with the end."""

    def __init__(self, made: Any, call: Call) -> None:
        self._made, self._call, self._said = made, call, ""

    def open(self, seed: int, columns: dict[str, Any]) -> Any:
        """As Gymnasium.open."""
        self._call(self._made.reset, num_players=1, seed=seed)
        return self._observe()

    def act(self, text: str, is_last: bool = False, calls: Sequence[tuple[str, dict[str, Any]]] = ()) -> Acted:
        """As Gymnasium.act."""
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


class Program:
    """As Gymnasium. A thread is where it runs, between its requests."""

    def __init__(self, made: Any) -> None:
        self._made, self._endpoint = made, PolicyEndpoint()
        self._ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def open(self, seed: int, columns: dict[str, Any]) -> Asked:
        """Its first request, which takes the place of a row's prompt. ValueError for one that ends without any."""
        own = {"base_url": self._endpoint.base_url, "api_key": self._endpoint.key, "seed": seed}
        given = accepted(self._made.rollout, columns | own)
        threading.Thread(target=self._play, args=(given,), daemon=True).start()
        asked = self._endpoint.asked.get()
        if asked is None:
            self._reward()
            raise ValueError("rollout ended without a request to the policy")
        return asked

    def act(
        self,
        text: str | None,
        is_last: bool = False,
        calls: Sequence[tuple[str, dict[str, Any]]] = (),
        sampled: Sequence[Any] = (),
    ) -> Acted:
        """Its next request, or its end, which has the reward. `text`: None after the last turn. `sampled`: what more a
        PolicyTurn has."""
        self._endpoint.answer(None if text is None else PolicyTurn(text, calls, *sampled), is_last=is_last)
        asked = self._endpoint.asked.get()
        if asked is None:
            return Acted("", self._reward(), True)
        if asked.token_ids is not None:
            return Acted("", 0.0, False, asked.token_ids)
        said = [message["content"] for message in asked.messages[-max(1, len(calls)) :]]
        return Acted(said if calls else said[0], 0.0, False)

    def _play(self, given: dict[str, Any]) -> None:
        reward, error = None, None
        try:
            reward = self._made.rollout(**given)
            if inspect.isawaitable(reward):
                reward = asyncio.run(awaited(reward))
        except BaseException as raised:
            error = raised
        self._ended.put((reward, error))
        self._endpoint.asked.put(None)

    def _reward(self) -> Any:
        reward, error = self._ended.get()
        if error is not None:
            raise error
        return reward


Acting = Gymnasium | SkyRL | TextArena | Program


async def awaited(found: Any) -> Any:
    """What an async function of a user's returns."""
    return await found


def _contents(messages: Sequence[dict[str, Any]]) -> str:
    return "\n".join(str(message["content"]) for message in messages)

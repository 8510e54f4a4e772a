"""Settings of environments: what a policy acts in, over several turns. Standard library only."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from infsample_rl.config.fields import check_bounds, setting

T = TypeVar("T")
NAME_COLUMN = "environment"  # of a row, where environment.factory is a dictionary
NAMELESS = ""  # the only environment where it is none


def of_row(by_name: Mapping[str, T], columns: Mapping[str, Any]) -> T:
    """What is there for the environment of a row. ValueError where the row names none that there is."""
    if NAMELESS in by_name:
        return by_name[NAMELESS]
    name = columns.get(NAME_COLUMN)
    if not isinstance(name, str) or name not in by_name:
        known = ", ".join(by_name)
        raise ValueError(f"{NAME_COLUMN} must be one of {known} (environment.factory), got {name!r}")
    return by_name[name]


def _is_set(config: Any) -> bool:
    return bool(config.environment.is_set)


@dataclass(kw_only=True)
class EnvironmentConfig:
    """The environment of a trajectory, and what bounds it."""

    factory: str | None = setting(
        None,
        "the environment's class, or a function that makes one, as path/to/file.py:Class: TRL's form (reset(**row), "
        "its public methods as tools, get_reward()), gymnasium's (reset(seed, options), step(action)), or a program "
        "that calls the policy as OpenAI's or vLLM's API (rollout(base_url, api_key)); a dictionary of such, of which "
        "a row's column `environment` takes one; or a TRL script and its arguments, whose trainer's "
        "environment_factory it is; none: a response has one turn",
    )
    tools: list[str] = setting([], "functions that the model may call, as path/to/file.py:function, without a state")
    max_turns: int = setting(16, "turns of a trajectory that the policy samples", low=1, read_if=_is_set)
    max_observation_tokens: int = setting(
        1024, "tokens of one observation; what is longer is cut in its middle", low=16, read_if=_is_set
    )
    timeout_s: float = setting(
        30.0,
        "seconds that a call may take before its environment is ended and counts as failed",
        above=0,
        read_if=_is_set,
    )
    straggler_s: float | None = setting(
        None,
        "seconds that the calls of a trajectory's environment may take in all: above, it gets no further turn and "
        "counts as cut, by the clock, so that a run does not repeat; one that is cut within the call of a tool or of a "
        "program has no reward; none: any time",
        above=0,
        read_if=_is_set,
    )
    workers: int = setting(8, "calls of one rollout worker's environments at a time", low=1, read_if=_is_set)

    def __post_init__(self) -> None:
        check_bounds("environment", self)
        for name, path in [("factory", self.factory), *(("tools", tool) for tool in self.tools)]:
            file, _, function = (path or "").rpartition(":")
            is_script = name == "factory" and bool(self.script)
            if path is not None and not is_script and not (file.endswith(".py") and function):
                or_script = ", or a TRL script and its arguments" if name == "factory" else ""
                raise ValueError(f"environment.{name} must be path/to/file.py:NAME{or_script}, got {path!r}")

    @property
    def is_set(self) -> bool:
        """Whether trajectories have an environment."""
        return self.factory is not None or bool(self.tools)

    @property
    def script(self) -> list[str]:
        """The words of a factory that is a TRL script with its arguments; none where it is file.py:NAME."""
        try:
            words = shlex.split(self.factory or "")
        except ValueError as error:
            raise ValueError(f"environment.factory={self.factory}: {error}") from None
        return words if words and words[0].endswith(".py") else []

    @property
    def files(self) -> list[str]:
        """Of the user's code."""
        names = [*filter(None, [None if self.script else self.factory]), *self.tools]
        return [*self.script[:1], *(name.rpartition(":")[0] for name in names)]

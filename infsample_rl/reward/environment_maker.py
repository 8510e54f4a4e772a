"""Makes a user's environments: of what form their class is, which tools it has, and what rewards them."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from infsample_rl.config import RewardFunctionConfig
from infsample_rl.config.environment import NAME_COLUMN, NAMELESS, EnvironmentConfig, of_row
from infsample_rl.reward.environment_forms import acts, begins, plays
from infsample_rl.reward.functions import load_function
from infsample_rl.reward.peer_forms import accepted, required
from infsample_rl.reward.policy_endpoint import check_network
from infsample_rl.reward.user_function import describe_error, given_to_trainer, import_name

TOOLS, ACTIONS, PROGRAM = "tools", "actions", "program"


@dataclass(frozen=True)
class Kind:
    """Environments that one class or function makes, or plain functions as the tools of one without a state."""

    factory: Callable[..., Any] | None
    form: str  # TOOLS, ACTIONS or PROGRAM
    rewards: bool  # it gives a reward
    schemas: list[dict[str, Any]]  # of its tools, as chat templates take them
    columns: list[str]  # that a row must have


class Maker:
    """Makes environments of what a user's setting names."""

    def __init__(self, config: EnvironmentConfig, functions: Mapping[str, RewardFunctionConfig]) -> None:
        """Imports the files. ValueError in one line for what is not there, or is in neither form."""
        self.path = config.files[0]
        self.functions = [import_name(*_parts(tool), "environment.tools") for tool in config.tools]
        found: Any = None
        if config.script:
            found = given_to_trainer(config.script, "environment_factory", "environment.factory")
        elif config.factory is not None:
            found = import_name(*_parts(config.factory), "environment.factory")
        named = found if isinstance(found, dict) else {NAMELESS: found}
        label = f"environment.factory={config.factory}"
        labels = {name: label if name == NAMELESS else f"{label}, {name!r}," for name in named}
        self.kinds = {str(name): self._kind(factory, labels[name]) for name, factory in named.items()}
        forms = {name: kind.form for name, kind in self.kinds.items()}
        if len(set(forms.values())) != 1:
            raise ValueError(f"{label}: all must be of one form, got {forms or 'none'}")
        self.form = next(iter(forms.values()))
        loaded = {name: load_function(function) for name, function in functions.items()}
        self.scoring = {name: function for name, function in loaded.items() if function.form == "environments"}
        if self.form != TOOLS and self.scoring:
            raise ValueError(
                f"reward.functions: {next(iter(self.scoring))} takes environments with tools; {label} has turns, and "
                "rewards them itself"
            )
        self.schemas = {name: kind.schemas for name, kind in self.kinds.items()}
        self.columns = {name: kind.columns for name, kind in self.kinds.items()}
        self.rewards = any(kind.rewards for kind in self.kinds.values())

    def make(self, columns: dict[str, Any]) -> Any:
        """A new environment of a row; None where there are functions alone."""
        factory = of_row(self.kinds, columns).factory
        if factory is None:
            return None
        return factory() if inspect.isclass(factory) else factory(**accepted(factory, columns))

    def given(self, columns: dict[str, Any]) -> dict[str, Any]:
        """What of a row reset gets: the name that chose its environment is not for it."""
        chose = () if NAMELESS in self.kinds else (NAME_COLUMN,)
        return {name: value for name, value in columns.items() if name not in chose}

    def tools(self, made: Any) -> dict[str, Callable[..., Any]]:
        """By their names."""
        own = [] if made is None or self.form != TOOLS else _tools_of(type(made))
        methods = {each.__name__: getattr(made, each.__name__) for each in own}
        return methods | {function.__name__: function for function in self.functions}

    def _kind(self, factory: Any, label: str) -> Kind:
        """ValueError for what is in neither form; it is called `label`."""
        made: Any = factory
        if factory is not None and not inspect.isclass(factory):
            if not callable(factory):
                raise ValueError(f"{label} is neither a class nor a function")
            made = self._first(factory)
        elif factory is not None and (needed := required(factory)):
            raise ValueError(f"{label} needs {needed[0]!r} to be made: give a function that makes one")
        form = PROGRAM if plays(made) else ACTIONS if acts(made) else TOOLS
        if made is not None and not begins(made):
            raise ValueError(f"{label} has no method reset")
        if form == PROGRAM:
            if len(accepted(made.rollout, {"base_url": "", "api_key": ""})) < 2:
                raise ValueError(f"{label}: rollout must take base_url and api_key")
            check_network()
        if form != TOOLS and self.functions:
            raise ValueError(f"environment.tools cannot be beside {label}: it has turns")
        methods = [] if made is None or form != TOOLS else _tools_of(made)
        schemas = [_schema(function) for function in (*methods, *self.functions)]
        if form == TOOLS and not schemas:
            raise ValueError(f"{label} has no public method as a tool, step or rollout")
        rewards = form != TOOLS or callable(getattr(made, "get_reward", None))
        return Kind(factory, form, rewards, schemas, [] if made is None else _columns(factory, made, form))

    def _first(self, factory: Callable[..., Any]) -> Any:
        """The class of what a function makes, or what its annotation says where it takes a row's columns. ValueError in
        one line for one that raises."""
        try:
            signature = inspect.signature(factory, eval_str=True)
            if not signature.parameters:
                return type(factory())
        except Exception as error:
            raise ValueError(f"environment.factory: {describe_error(error, os.path.abspath(self.path))}") from None
        made = signature.return_annotation
        if not inspect.isclass(made) or made is inspect.Signature.empty:
            name = factory.__name__
            raise ValueError(
                f"environment.factory: {name} takes columns: its annotation must say what class it returns"
            )
        return made


def _columns(factory: Callable[..., Any], made: Any, form: str) -> list[str]:
    """That making one and opening an episode ask a row for."""
    asked = [] if inspect.isclass(factory) else required(factory)
    if form != ACTIONS:
        asked += required(made.rollout if form == PROGRAM else made.reset)[1:]  # behind the instance
    return [name for name in dict.fromkeys(asked) if name not in ("seed", "prompt", "base_url", "api_key")]


def _tools_of(made: Any) -> list[Callable[..., Any]]:
    """The public methods of a class but reset and get_reward, in the order in which they are written. As in TRL no
    other attribute is a tool, although it can be called."""
    names = [name for each in reversed(made.__mro__[:-1]) for name in vars(each)]
    return [
        getattr(made, name)
        for name in dict.fromkeys(names)
        if not name.startswith("_")
        and name not in ("reset", "get_reward", "close")
        and inspect.isfunction(getattr(made, name))
    ]


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    """As chat templates take it. ValueError in one line where its docstring or its types do not say enough."""
    from transformers.utils.chat_template_utils import get_json_schema  # here: it takes a second

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(f"{name} cannot be a tool: {' '.join(str(error).split())}") from None
    return json.loads(json.dumps(schema))


def _parts(name: str) -> tuple[str, str]:
    path, _, function = name.rpartition(":")
    return path, function

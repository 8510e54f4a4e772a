"""Every reward function by its name: which kind it is, how it is loaded, how it is called. Standard library only.

A rule is score(response, columns), one sample a call: the modules rule_NAME. A user's function has one of peer_forms'
forms; TRL's and verl's batched one get a whole micro-group a call, the others one sample.
"""

from __future__ import annotations

import importlib
import math
import numbers
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from infsample_rl.config import RewardFunctionConfig
from infsample_rl.config.fields import did_you_mean
from infsample_rl.config.reward import ENVIRONMENT, JUDGE, RULES
from infsample_rl.reward.hidden_values import without_values
from infsample_rl.reward.peer_forms import Called, call_form, check_keywords, columns_of, form_of
from infsample_rl.reward.user_function import import_name

IN_PROCESSES = ("rule", "user")  # kinds of functions
MODEL_PREFIX = "model:"
# reward/... and eval/... of the run itself, whose names no function may take
METRICS_OF_RUN = ("mean", "std", "failed", "groups_with_signal", "accuracy", "length_mean")


@dataclass(frozen=True, kw_only=True)
class LoadedFunction:
    """A reward function ready to be called in a function process."""

    form: str  # rule, or one of peer_forms; takes_one() says how many samples a call has
    function: Callable[..., Any]
    kwargs: dict[str, Any]
    path: str | None = None  # the user's file
    needs: list[list[str]] = field(default_factory=list)  # see checks.py


def takes_one(form: str) -> bool:
    """Whether one call of a function of this form scores one sample (else a whole micro-group)."""
    return form not in ("trl", "verl_batch")


def kind_of(name: str) -> str:
    """ "rule", "user", "model", "judge" or "environment"; ValueError with the nearest known name when it is none of
    them."""
    if name in RULES:
        return "rule"
    if name in (JUDGE, ENVIRONMENT):
        return name
    if name.startswith(MODEL_PREFIX) and name != MODEL_PREFIX:
        return "model"
    path, _, function = name.rpartition(":")
    if path.endswith(".py") and function:
        return "user"
    if name.rstrip(":").endswith(".py"):
        raise ValueError(f"reward.functions: {name} names no function of the file: give {name.rstrip(':')}:FUNCTION")
    known = [*RULES, JUDGE, ENVIRONMENT]
    raise ValueError(
        f"reward.functions: unknown name {name!r}; give {', '.join(known)}, path/to/file.py:function or "
        f"model:<folder or hub name>{did_you_mean(name, known, 0.5)}"
    )


def files_of(functions: Iterable[RewardFunctionConfig]) -> list[str]:
    """Of the user's functions among them."""
    return [function.name.rpartition(":")[0] for function in functions if kind_of(function.name) == "user"]


def component_names(functions: list[RewardFunctionConfig]) -> list[str]:
    """Short names for messages and metrics, all different: "rewards/length.py:brevity" is "brevity", a second one
    "brevity_2"."""
    names: list[str] = []
    for function in functions:
        short = function.name
        if kind_of(short) == "user":
            short = short.rpartition(":")[2]
        elif kind_of(short) == "model":
            short = MODEL_PREFIX + os.path.basename(short.removeprefix(MODEL_PREFIX).rstrip("/"))
        numbered = (short if number == 1 else f"{short}_{number}" for number in count(1))
        names.append(next(name for name in numbered if name not in (*METRICS_OF_RUN, *names)))
    return names


def load_function(config: RewardFunctionConfig) -> LoadedFunction:
    """Import a rule or a user's function; ValueError in one line when that is not possible or the signature does not
    fit."""
    if kind_of(config.name) == "rule":
        module = importlib.import_module(f"infsample_rl.reward.rule_{config.name}")  # here: some are slow to import
        function = module.score
        check_keywords(config.name, function, config.kwargs, given=("response", "columns"))
        return LoadedFunction(form="rule", function=function, kwargs=config.kwargs, needs=module.NEEDS)
    path, _, name = config.name.rpartition(":")
    function = import_name(path, name, "reward.functions")
    form = form_of(config.name, function, config.kwargs)
    columns = columns_of(form, function, config.kwargs)
    return LoadedFunction(
        form=form,
        function=function,
        kwargs=config.kwargs,
        path=os.path.abspath(path),
        needs=[columns] if columns else [],
    )


def call_function(loaded: LoadedFunction, prompt: dict[str, Any], samples: list[dict[str, Any]]) -> Called:
    """The values of one call, whatever the function returned, and what it reported beside; it may raise anything.

    prompt: {"row", "messages", "text", "columns", "label", "trainer_state"}; a sample: {"text", "token_ids",
    "messages"}, one of them where takes_one(). A rule is given what was said last, not what an environment said.
    """
    if loaded.form == "rule":
        said = [each["content"] for each in samples[0].get("messages") or [] if each["role"] == "assistant"]
        return [loaded.function(said[-1] if said else samples[0]["text"], prompt["columns"], **loaded.kwargs)], {}
    return call_form(loaded.form, loaded.function, loaded.kwargs, prompt, samples)


def as_reward(value: Any) -> tuple[float | None, str]:
    """(reward, "") of a finite number; (None, what is wrong) of anything else. Booleans and numpy scalars are
    numbers."""
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0:
        value = value.item()  # numpy and torch scalars, without importing either
    if value is None:
        return None, "returned None"
    if not isinstance(value, numbers.Real):
        return None, f"returned {without_values(repr(value)):.60}, which is not a number"
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    return (reward, "") if math.isfinite(reward) else (None, f"returned {reward}")

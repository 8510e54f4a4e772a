"""TRL's reward functions as ours: rules, functions in files, reward models, and the punishment that is a setting."""

from __future__ import annotations

from typing import Any

from infsample_rl.commands.convert.common import reward_entry
from infsample_rl.commands.convert.conversion import Conversion
from infsample_rl.commands.convert.trl_table import OWN_REWARDS
from infsample_rl.commands.convert.values import number, whole
from infsample_rl.reward.functions import RULES


def set_rewards(c: Conversion) -> None:
    """reward.functions with their weights."""
    model, entries = c.value("reward_model_name_or_path"), []
    weights = [number(weight) for weight in c.list("reward_weights")]
    functions = ([f"model:{model}"] if model else []) + c.list("reward_funcs")
    for index, function in enumerate(functions):
        weight = weights[index] if index < len(weights) else 1.0
        name = function["name"] if isinstance(function, dict) else str(function)
        if name.rpartition(".")[2] == "get_soft_overlong_punishment":
            _overlong(c, function if isinstance(function, dict) else {}, weight)
            continue
        ours = None if isinstance(function, dict) else reward_name(name)
        if ours is None:
            made = f"reward_funcs: {name} is made by code" if isinstance(function, dict) else f"reward_funcs: {name}"
            c.no_equivalent.append(f"{made}; write it into a file and give path/to/file.py:function")
            continue
        if name.endswith("reasoning_accuracy_reward"):
            c.differs.append(
                "reasoning_accuracy_reward reads the answer behind </think>; reward math reads the last answer stated"
            )
        entries.append(reward_entry(ours, weight))
    if entries:
        names = ("reward_funcs", "reward_model_name_or_path", "reward_weights")
        c.set("reward.functions", entries, " ".join(name for name in names if name in c.given))


def reward_name(name: str) -> str | None:
    """One of our names for a reward function of TRL's: a rule, file.py:function, model:PATH; None where there is
    none."""
    module, dot, function = name.rpartition(".")
    if function in OWN_REWARDS and module in ("", "trl.rewards"):
        return OWN_REWARDS[function]
    if name.startswith("model:") or ".py:" in name or name in RULES:
        return name
    if dot and not name.startswith("trl.") and name.replace(".", "").replace("_", "").isalnum():
        return f"{module.replace('.', '/')}.py:{function}"
    return None


def _overlong(c: Conversion, call: dict[str, Any], weight: float) -> None:
    """get_soft_overlong_punishment(max_completion_len, soft_punish_cache) is DAPO's equation 13, which is a setting
    here."""
    values = {"max_completion_len": 1280, "soft_punish_cache": 256}
    values |= dict(zip(values, call.get("args", ()), strict=False)) | call.get("kwargs", {})
    c.set("objective.overlong_buffer_tokens", whole(values["soft_punish_cache"]), "reward_funcs")
    c.set("objective.overlong_penalty", weight, "reward_funcs", "its weight")
    if values["max_completion_len"] != c.value("max_completion_length"):
        c.differs.append(
            f"the punishment begins before {values['max_completion_len']} tokens in TRL, before rollout.max_new_tokens "
            "here"
        )

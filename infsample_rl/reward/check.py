"""Whether all reward functions can be loaded, found out before a run starts. Standard library only, but for reward
models."""

from __future__ import annotations

from infsample_rl.config import RewardConfig
from infsample_rl.reward.functions import kind_of
from infsample_rl.reward.process_pool import FunctionProcess


def check_reward_functions(reward: RewardConfig) -> None:
    """Import every reward function in a process of its own and read every reward model's config.

    ValueError in one line: an unknown name, a missing file, function or model, a file that cannot be imported, a
    signature that fits no form, settings in kwargs that the function does not take, a model with more than one label, a
    reward.isolation that this system cannot hold.
    """
    kinds = [kind_of(function.name) for function in reward.functions]
    in_processes = [function for function, kind in zip(reward.functions, kinds, strict=True) if kind != "model"]
    if in_processes:
        FunctionProcess(reward, in_processes).kill()
    for function, kind in zip(reward.functions, kinds, strict=True):
        if kind == "model":
            from infsample_rl.reward.reward_model import check_model  # here: it imports torch and transformers

            check_model(function)

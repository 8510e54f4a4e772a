"""What the user has brought, read first: a mistake in it is said before anybody waits for torch. Imports neither torch
nor transformers."""

from __future__ import annotations

from dataclasses import dataclass

from infsample_rl.config import Config
from infsample_rl.data.fields import Problem
from infsample_rl.data.prompts import held_out_problems, train_problems
from infsample_rl.reward.checks import check_columns, check_reward_functions


@dataclass(kw_only=True, slots=True)
class Inputs:
    """Rows that can be used, by the reward functions too."""

    train: dict[str, list[Problem]]  # by the names in DataConfig.parts
    held_out: dict[str, list[Problem]]


def read_inputs(config: Config) -> Inputs:
    """ValueError in one line for what cannot be read or used."""
    needs = check_reward_functions(config.reward, config.environment.factory)
    train = check_columns(config, needs, train_problems(config))
    held_out = check_columns(config, needs, held_out_problems(config), evaluation=True)
    return Inputs(train=train, held_out=held_out)

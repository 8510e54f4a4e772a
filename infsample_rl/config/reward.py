"""Settings of rewards: the functions, and what the processes they run in may do. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from infsample_rl.config.fields import check_bounds, parse_bytes, read_entry, setting

ISOLATIONS = ("none", "limits", "sandbox")
SMALLEST_MEMORY = 256 * 2**20  # Python with the rules' own libraries


@dataclass(kw_only=True)
class RewardFunctionConfig:
    """One reward function of the weighted sum."""

    name: str = setting(
        "",
        "gsm8k, math, kk, reasoning_gym, data_source, think_format, path/to/file.py:function, or model:<folder or hub "
        "name>",
    )
    weight: float = setting(1.0, "factor in the sum")
    kwargs: dict[str, Any] = setting(
        {}, "keywords passed to the function; no keys: name their variables in reward.environment"
    )

    def is_called(self, name: str) -> bool:
        """Whether `name` means it: its whole name, or that of the function in its file."""
        return name in (self.name, self.name.rpartition(".py:")[2])


def _is_isolated(config: Any) -> bool:
    return config.reward.isolation != "none"


@dataclass(kw_only=True)
class RewardConfig:
    """Reward functions and the processes they run in."""

    functions: list[Any] = setting(  # once checked each is a RewardFunctionConfig
        [], "the functions of the weighted sum, e.g. `[gsm8k, {name: my_rewards.py:short, weight: 0.1}]`"
    )
    timeout_s: float = setting(
        30.0, "seconds a call may take before its process is killed and the reward is None", above=0
    )
    max_failed_steps: int = setting(3, "steps in a row in which every reward fails, after which the run ends", low=1)
    processes: int = setting(1, "processes of one reward worker that run reward functions", low=1)
    isolation: str = setting(
        "limits",
        "none: just a process of its own; limits: memory is bounded, the environment holds no keys; sandbox: also no "
        "network, no other files",
        choices=ISOLATIONS,
    )
    memory_limit: str = setting(
        "4GB",
        "memory of a reward process and all it starts, and the largest file it may write; e.g. 4GB or 512MiB",
        read_if=_is_isolated,
    )
    environment: list[str] = setting(
        [],
        "environment variables that functions get beside PATH, LANG and the like, by name, e.g. [JUDGE_API_KEY]",
        read_if=_is_isolated,
    )
    read_paths: list[str] = setting(
        [],
        "with isolation=sandbox: files and folders that functions may read beside Python's and their own",
        read_if=lambda c: c.reward.isolation == "sandbox",
    )

    def __post_init__(self) -> None:
        check_bounds("reward", self)
        self.functions = [
            read_entry(f"reward.functions[{index}]", entry, RewardFunctionConfig, "name")
            for index, entry in enumerate(self.functions)
        ]
        for index, function in enumerate(self.functions):
            if not isinstance(function.kwargs, dict):
                raise ValueError(f"reward.functions[{index}].kwargs must be {{key: value}}, got {function.kwargs!r}")
            if not function.name:
                raise ValueError(
                    f"reward.functions[{index}].name is empty: give gsm8k, math, kk, reasoning_gym, file.py:function "
                    "or model:PATH"
                )
        if not all(isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*", name) for name in self.environment):
            raise ValueError(
                "reward.environment holds names of environment variables, never values; got an entry that cannot be a "
                "name"
            )
        if self.memory_bytes < SMALLEST_MEMORY:
            raise ValueError(
                f"reward.memory_limit must be >= 256MiB, got {self.memory_limit}; the nearest that works is 256MiB"
            )

    @property
    def memory_bytes(self) -> int:
        """reward.memory_limit in bytes."""
        return parse_bytes(self.memory_limit, "reward.memory_limit must be a size")

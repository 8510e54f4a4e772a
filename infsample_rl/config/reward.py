"""Settings of rewards: the functions, and what the processes they run in may do. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from infsample_rl.config.fields import check_bounds, parse_bytes, read_entry, setting

ISOLATIONS = ("none", "limits", "sandbox")
RULES = ("gsm8k", "math", "kk", "reasoning_gym", "data_source", "think_format")  # each a module rule_NAME
JUDGE = "judge"
ENVIRONMENT = "environment"  # what a trajectory's environment gave it
JUDGE_FORMS = ("score", "pairwise", "rubric")
NAME = r"[A-Za-z_]\w*"  # of an environment variable
SMALLEST_MEMORY = 256 * 2**20  # Python with the rules' own libraries


@dataclass(kw_only=True)
class RewardFunctionConfig:
    """One reward function of the weighted sum."""

    name: str = setting(
        "",
        "gsm8k, math, kk, reasoning_gym, data_source, think_format, path/to/file.py:function, model:<folder or hub "
        "name>, environment, or judge",
    )
    weight: float = setting(1.0, "factor in the sum")
    kwargs: dict[str, Any] = setting(
        {}, "keywords passed to the function; no keys: name their variables in reward.environment"
    )


@dataclass(kw_only=True)
class JudgeConfig(RewardFunctionConfig):
    """A model behind OpenAI's protocol that judges responses: an entry whose name is judge."""

    url: str = setting("", "where it answers, e.g. http://127.0.0.1:8000/v1")
    model: str = setting("", "its name there")
    prompt: str = setting(
        "",
        "file with what it is asked: `{question}` and `{response}` stand for the last message and what was answered, "
        "`{COLUMN}` for any column of the row",
    )
    form: str = setting(
        "score",
        "score: it gives a number on `scale`; pairwise: it says which of `{first}` and `{second}` is better, the "
        "response and what stands in the column `against`, asked both ways round; rubric: it says of every one of "
        "`{criteria}` whether the response meets it, and the reward is the share that it meets",
        choices=JUDGE_FORMS,
    )
    scale: list[float] = setting([0, 10], "lowest and highest score, which become rewards of 0 and 1")
    against: str | None = setting(None, "pairwise: the column of the text that every response is compared with")
    criteria: list[str] = setting([], "rubric: what a response shall meet; one name in braces: the column of them")
    key: str | None = setting(None, "environment variable with the key, which goes to the reward worker alone")
    at_once: int = setting(
        32,
        "requests under way at a time, of each reward worker; when as many in a row (at least 4) have timed out, those "
        "that wait fail at once",
        low=1,
    )
    retries: int = setting(
        5, "times that a request is sent again after 429, 5xx or a lost connection, within reward.timeout_s", low=0
    )
    price: list[float] = setting([0, 0], "of a million tokens read and of a million written, for reward/judge/cost")
    options: dict[str, Any] = setting(
        {},
        "further fields of every request; temperature is 0 and max_tokens 1024 where they say nothing, null leaves out",
    )
    keep: bool = setting(True, "keep verdicts in the cache folder, so that no request is paid for twice")

    def __post_init__(self) -> None:
        where = "reward.functions: judge"
        for name in ("url", "model", "prompt"):
            if not getattr(self, name):
                raise ValueError(f"{where}: {name} must be given")
        if self.kwargs:
            raise ValueError(f"{where} takes no kwargs; fields of its requests go into options")
        if not re.match(r"https?://[^/@]+(/|$)", str(self.url)):
            raise ValueError(f"{where}: url must be http://HOST... or https://HOST..., without a key in it")
        if self.key is not None and not re.fullmatch(NAME, str(self.key)):
            raise ValueError(f"{where}: key is the name of an environment variable, never its value")
        for name in ("scale", "price"):
            pair = getattr(self, name)
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(each, (int, float)) for each in pair):
                raise ValueError(f"{where}: {name} must be two numbers, got {pair!r}")
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"{where}: scale must be [lowest, highest], got {self.scale}")
        if (self.form == "pairwise") != (self.against is not None):
            raise ValueError(f"{where}: against names a column for form=pairwise, got {self.against} for {self.form}")
        if (self.form == "rubric") != bool(self.criteria):
            raise ValueError(f"{where}: criteria are for form=rubric, got {self.criteria} for {self.form}")


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
        "memory of a reward process and all it starts, of a worker's environments together, whose largest is ended "
        "when they hold more, and the largest file that any may write; e.g. 4GB or 512MiB",
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
            read_function(f"reward.functions[{index}]", entry) for index, entry in enumerate(self.functions)
        ]
        for index, function in enumerate(self.functions):
            if not function.name:
                raise ValueError(
                    f"reward.functions[{index}].name is empty: give gsm8k, math, kk, reasoning_gym, file.py:function "
                    "or model:PATH"
                )
        if not all(isinstance(name, str) and re.fullmatch(NAME, name) for name in self.environment):
            raise ValueError(
                "reward.environment holds names of environment variables, never values; got an entry that cannot be a "
                "name"
            )
        if self.memory_bytes < SMALLEST_MEMORY:
            raise ValueError(
                f"reward.memory_limit must be >= 256MiB, got {self.memory_limit}; the nearest that works is 256MiB"
            )

    @property
    def judges(self) -> list[JudgeConfig]:
        """Those of the functions that are models to ask."""
        return [function for function in self.functions if isinstance(function, JudgeConfig)]

    @property
    def memory_bytes(self) -> int:
        """reward.memory_limit in bytes."""
        return parse_bytes(self.memory_limit, "reward.memory_limit must be a size")


def read_function(label: str, entry: Any) -> RewardFunctionConfig:
    """An entry of reward.functions, checked; ValueError as read_entry."""
    name = entry.get("name") if isinstance(entry, dict) else getattr(entry, "name", entry)
    return read_entry(label, entry, JudgeConfig if name == JUDGE else RewardFunctionConfig, "name")


def full_name(name: str, functions: list[str]) -> str:
    """The name of these functions that a name in data.sources means: its own, else a rule's, else that of the only file
    with a function called so. ValueError where there are several; what nothing is called stays as it is."""
    if name in functions or name in (*RULES, ENVIRONMENT):
        return name
    found = list(dict.fromkeys(each for each in functions if each.rpartition(".py:")[2] == name))
    if len(found) > 1:
        raise ValueError(f"data.sources: reward={name} could be each of {', '.join(found)}: give its file too")
    return found[0] if found else name

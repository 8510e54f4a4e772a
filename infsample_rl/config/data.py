"""Settings of prompts: where they come from and how they are rendered. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from infsample_rl.config.fields import check_bounds, read_entry, setting

# Data sets by short names, whatever folder is called so here. Each has a training and a test half of its own.
DATA_NAMES = ("gsm8k", "math", "kk", "kk_tiny")


@dataclass(kw_only=True)
class DataSourceConfig:
    """One of several data sources; the keys from `split` on stand in for those of data of the same name."""

    source: str = setting("", "as data.source")
    weight: float = setting(1.0, "prompts from it, in proportion to the other sources' weights", above=0)
    reward: Any = setting(
        [], "functions that score it, by the names they have in reward.functions or would have there; empty: all of it"
    )
    eval_source: str | None = setting("auto", "held-out problems, as data.eval_source")
    split: str | None = setting(None, "split of a hub data set; none: data.split")
    prompt_field: str | None = setting(None, "field of the question; none: data.prompt_field")
    answer_field: str | None = setting(None, "field of the answer; none: data.answer_field")
    instruction: str | None = setting(None, "text appended to every question; none: data.instruction")
    generator_kwargs: dict[str, Any] | None = setting(
        None, "settings of a reasoning_gym task; none: data.generator_kwargs"
    )


_OWN = ("split", "prompt_field", "answer_field", "instruction", "generator_kwargs")


@dataclass(kw_only=True)
class DataConfig:
    """Where prompts come from and how they are rendered."""

    source: str = setting(
        "", "gsm8k, math, kk (hub), a .jsonl or .parquet file, a hub data set, or reasoning_gym:<task>"
    )
    sources: list[Any] = setting(  # once checked each is a DataSourceConfig
        [],
        "several sources in place of data.source, e.g. `[{source: kk, weight: 2, reward: kk}, {source: sums.jsonl, "
        "reward: my_rewards.py:score}]`",
    )
    split: str = setting(
        "train",
        "split of a hub data set; a slice, `train[:1000]`, of a file too",
        read_if=lambda c: not all(_is_made(part.source) for part in c.data.parts.values()),
    )
    eval_source: str | None = setting(
        "auto",
        "held-out problems, given like data.source; auto: the test half of gsm8k, math, kk, kk_tiny, reasoning_gym, "
        "else none; none: no evaluation",
    )
    eval_split: str = setting("test", "data.split of held-out problems")
    prompt_field: str | None = setting(None, "field of the question; none: found (question, problem, prompt, quiz)")
    answer_field: str | None = setting(
        None, "field the reward functions get as `answer`; none: found (answer, solution, ...)"
    )
    system_prompt: str | None = setting(None, "system message before every question")
    instruction: str | None = setting(None, "text appended to every question, after a blank line")
    apply_chat_template: bool = setting(
        True, "false: the model is given the plain text, as where its tokenizer has no chat template"
    )
    chat_template_kwargs: dict[str, Any] = setting(
        {}, "keywords of the model's chat template, e.g. {enable_thinking: false}"
    )
    prompts_per_step: int = setting(
        8, "prompts of one step; samples of a step = prompts_per_step x rollout.group_size", low=1
    )
    max_prompt_tokens: int = setting(1024, "longest prompt in tokens", low=1)
    long_prompts: str = setting(
        "error",
        "a prompt above max_prompt_tokens: error, drop it, or truncate its question from the left",
        choices=("error", "drop", "truncate"),
    )
    bad_rows: str = setting(
        "error", "a row that cannot be used: error, or skip it with a warning", choices=("error", "skip")
    )
    shuffle: bool = setting(True, "a new order every epoch, made from run.seed")
    generator_kwargs: dict[str, Any] = setting(
        {},
        "settings of the reasoning_gym task, e.g. {max_terms: 3}, and of its data set: size (1000 problems) and seed "
        "(0; held-out problems use another range)",
        read_if=lambda c: any(_is_made(part.source) or _is_made(part.held_out) for part in c.data.parts.values()),
    )

    def __post_init__(self) -> None:
        check_bounds("data", self)
        self.sources = [_read_source(index, entry) for index, entry in enumerate(self.sources)]
        if not self.source and not self.sources:
            raise ValueError(
                "data.source is empty: give gsm8k, math, kk, a .jsonl or .parquet file, a hub name or "
                "reasoning_gym:<task>, or several of them in data.sources"
            )
        if self.source and self.sources:
            raise ValueError(
                f"data.source={self.source} and data.sources are both given: take one; data.source='' leaves it out"
            )
        if self.sources and self.eval_source not in ("auto", None):
            raise ValueError(
                f"data.eval_source must be auto or none with data.sources, got {self.eval_source}: give eval_source in "
                "an entry of data.sources"
            )
        for name, low in (("size", 1), ("seed", 0)):
            value = self.generator_kwargs.get(name, low)
            if not isinstance(value, int) or value < low:
                raise ValueError(f"data.generator_kwargs.{name} must be a whole number >= {low}, got {value!r}")

    @property
    def named_sources(self) -> dict[str, DataSourceConfig]:
        """The entries of data.sources by their names in metrics, all different: "sums" of /data/sums.jsonl, then
        "sums_2"; "products" of reasoning_gym:products."""
        named: dict[str, DataSourceConfig] = {}
        for entry in self.sources:
            last = entry.source.removeprefix("reasoning_gym:").partition(":")[0].rstrip("/").rpartition("/")[2]
            short = re.sub(r"\.(jsonl|ndjson|json|parquet)$|[^\w.-]", "", last) or "source"
            numbered = (short if number == 1 else f"{short}_{number}" for number in count(1))
            named[next(name for name in numbered if name not in named)] = entry
        return named

    @property
    def parts(self) -> dict[str, DataConfig]:
        """Every source as settings of its own, by its name in metrics; that of data.source alone is ""."""
        parts = {} if self.sources else {"": self}
        for name, entry in self.named_sources.items():
            own = {key: value for key in _OWN if (value := getattr(entry, key)) is not None}
            held_out = self.eval_source if entry.eval_source == "auto" else entry.eval_source
            parts[name] = replace(self, sources=[], source=entry.source, eval_source=held_out, **own)
        return parts

    @property
    def held_out(self) -> str | None:
        """Where held-out problems come from, `auto` resolved."""
        if self.eval_source != "auto":
            return self.eval_source
        return self.source if self.source in DATA_NAMES or _is_made(self.source) else None


def _is_made(source: str | None) -> bool:
    """Whether reasoning_gym makes its problems, which have no splits."""
    return source is not None and source.startswith("reasoning_gym:")


def _read_source(index: int, given: Any) -> DataSourceConfig:
    """An entry of data.sources, `reward` as a list of names. ValueError, naming it, for one that cannot be."""
    name = f"data.sources[{index}]"
    entry = read_entry(name, given, DataSourceConfig, "source")
    rewards = [entry.reward] if isinstance(entry.reward, str) else entry.reward
    if not isinstance(rewards, list) or not all(isinstance(reward, str) and reward for reward in rewards):
        raise ValueError(f"{name}.reward must be names of functions, as kk or [kk, my_rewards.py:f], got {rewards!r}")
    if not entry.source:
        raise ValueError(f"{name}.source is empty: give what data.source takes")
    return replace(entry, reward=list(rewards))

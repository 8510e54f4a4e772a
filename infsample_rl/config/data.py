"""Settings of prompts: where they come from and how they are rendered. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infsample_rl.config.fields import check_bounds, setting

# Data sets by short names, whatever folder is called so here. Each has a training and a test half of its own.
DATA_NAMES = ("gsm8k", "math", "kk", "kk_tiny")


@dataclass(kw_only=True)
class DataConfig:
    """Where prompts come from and how they are rendered."""

    source: str = setting(
        "", "gsm8k, math, kk (hub), a .jsonl or .parquet file, a hub data set, or reasoning_gym:<task>"
    )
    split: str = setting("train", "split of a hub data set")
    eval_source: str | None = setting(
        "auto",
        "held-out problems, given like data.source; auto: the test half of gsm8k, math, kk, kk_tiny, reasoning_gym, "
        "else none; none: no evaluation",
    )
    eval_split: str = setting("test", "split of a hub data set for evaluation")
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
        read_if=lambda c: any(source.startswith("reasoning_gym:") for source in (c.data.source, c.data.held_out or "")),
    )

    def __post_init__(self) -> None:
        check_bounds("data", self)
        if not self.source:
            raise ValueError(
                "data.source is empty: give gsm8k, math, kk, a .jsonl or .parquet file, a hub name or "
                "reasoning_gym:<task>"
            )
        for name, low in (("size", 1), ("seed", 0)):
            value = self.generator_kwargs.get(name, low)
            if not isinstance(value, int) or value < low:
                raise ValueError(f"data.generator_kwargs.{name} must be a whole number >= {low}, got {value!r}")

    @property
    def held_out(self) -> str | None:
        """Where held-out problems come from, `auto` resolved."""
        if self.eval_source != "auto":
            return self.eval_source
        return self.source if self.source in DATA_NAMES or self.source.startswith("reasoning_gym:") else None

"""The prompts of a run: checked once at the start, then dealt step by step in a seeded order that resumes where it
stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from fractions import Fraction
from typing import Any

import numpy as np

from infsample_rl.config import Config
from infsample_rl.data.chat import render_all
from infsample_rl.data.fields import Problem
from infsample_rl.data.sources import load_problems
from infsample_rl.types import Prompt

logger = logging.getLogger(__name__)

REWARDS_OF_ANSWERS = ("gsm8k", "math", "data_source")  # reward functions that read the column `answer`


class PromptStream:
    """Batches of prompts without end. Item k is item k mod n of epoch k // n, so batches wrap over the epoch's end.

    An epoch's order depends on (run.seed, epoch) alone; the position is all there is to save.
    """

    def __init__(self, prompts: list[Prompt], *, prompts_per_step: int, seed: int, shuffle: bool) -> None:
        self.prompts = prompts
        self.num_rows = len(prompts)  # of one epoch
        self.first_rendered = prompts[0].text  # for the log
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0  # items dealt since the start of the run
        self.fingerprint = _fingerprint(prompts)
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))  # the epoch it is of, row positions

    def next_batch(self, count: int | None = None, first_index: int = 0) -> list[Prompt]:
        """The next `count` prompts (default: a step's), prompt_index from `first_index` on; one comes twice only when
        the epoch ends within."""
        items = range(self.position, self.position + (self.prompts_per_step if count is None else count))
        self.position = items.stop
        return [dataclasses.replace(self._item(k), prompt_index=first_index + index) for index, k in enumerate(items)]

    def steps_for_epochs(self, epochs: float) -> int:
        """Steps that deal every prompt `epochs` times: ceil(epochs x rows / prompts_per_step)."""
        # 0.1 is a tenth here, as written
        return math.ceil(Fraction(str(epochs)) * self.num_rows / self.prompts_per_step)

    def state(self) -> dict[str, Any]:
        """What restore() needs, as plain JSON."""
        return {"position": self.position, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where state() was taken. ValueError when the prompts or their order are not the ones of then."""
        meanings = {
            "num_rows": "the number of usable rows",
            "fingerprint": "the hash of all prompts and answers (data set, chat template, tokenizer)",
            "seed": "run.seed",
            "shuffle": "data.shuffle",
        }
        for name, now in self._identity().items():
            if state[name] != now:
                raise ValueError(
                    f"cannot resume: {meanings[name]} was {state[name]} and is {now} now; put it back, or start anew "
                    "in another run.dir"
                )
        self.position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows, "fingerprint": self.fingerprint, "seed": self.seed, "shuffle": self.shuffle}

    def _item(self, k: int) -> Prompt:
        epoch, place = divmod(k, self.num_rows)
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.num_rows, self.seed, epoch, self.shuffle))
        return self.prompts[self._order[1][place]]


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The order of one epoch, [num_rows] positions: a permutation made from (seed, epoch), or 0, 1, 2, ... without
    shuffle."""
    if not shuffle:
        return np.arange(num_rows)
    # RandomState: NumPy keeps its numbers the same for ever
    return np.random.RandomState([seed, epoch]).permutation(num_rows)


def build_train_prompts(config: Config, tokenizer: Any, context_length: int | None) -> PromptStream:
    """Load, render and check all training prompts. `context_length`: the model's, none when it has no bound.

    ValueError in one line for anything that cannot work: the source, its rows, the template's keywords, the lengths.
    """
    data = config.data
    problems = load_problems(data, evaluation=False)
    _check_answers(problems, config, f"data.source={data.source}")
    if tokenizer.chat_template is None:
        logger.warning(
            "the tokenizer %s has no chat template: prompts are plain text, their parts joined by blank lines",
            tokenizer.name_or_path,
        )
    prompts = render_all(problems, tokenizer, data)
    _check_context(prompts, config, context_length, problems[0].origin)
    return PromptStream(prompts, prompts_per_step=data.prompts_per_step, seed=config.run.seed, shuffle=data.shuffle)


def build_eval_prompts(config: Config, tokenizer: Any, context_length: int | None) -> list[Prompt]:
    """The first run.eval_prompts prompts of data.eval_source, in its order; none without one. Checked like the training
    prompts."""
    data, count = config.data, config.run.eval_prompts
    if data.held_out is None or count == 0:
        return []
    problems = load_problems(data, evaluation=True, limit=count)
    if data.long_prompts != "drop":  # where long ones are dropped, later ones take their place
        problems = problems[:count]
    _check_answers(problems, config, f"data.eval_source={data.held_out}")
    prompts = render_all(problems, tokenizer, data)[:count]
    _check_context(prompts, config, context_length, problems[0].origin)
    return prompts


def _check_answers(problems: list[Problem], config: Config, label: str) -> None:
    """A reward function that compares with a gold answer needs one."""
    readers = [function.name for function in config.reward.functions if function.name in REWARDS_OF_ANSWERS]
    if readers and "answer" not in problems[0].columns:
        names = ", ".join(problems[0].columns) or "none"
        raise ValueError(
            f"{label}: no field is known to be the answer that reward {readers[0]} needs: set data.answer_field "
            f"(fields: {names})"
        )


def _check_context(prompts: list[Prompt], config: Config, context_length: int | None, origin: str) -> None:
    """Prompt and response together must fit into the model's context."""
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    new, tokens = config.rollout.max_new_tokens, len(longest.token_ids)
    if context_length is None or tokens + new <= context_length:
        return
    room = context_length - tokens
    at = (
        f"the longest prompt ({origin}, row {longest.row}) has {tokens} tokens and the model's context {context_length}"
    )
    if room >= 1:
        raise ValueError(f"rollout.max_new_tokens must be <= {room}, got {new}: {at}")
    raise ValueError(
        f"data.max_prompt_tokens must be < the model's context {context_length}, got {config.data.max_prompt_tokens}: "
        f"{at}; set data.long_prompts=drop or truncate"
    )


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.token_ids.tobytes())
        digest.update(f"|{prompt.row}|{prompt.columns.get('answer')!r}|".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()[:16]

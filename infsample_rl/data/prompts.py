"""The prompts of a run: checked once at the start, then dealt step by step in a seeded order that resumes where it
stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from infsample_rl.config import Config, DataConfig
from infsample_rl.data.chat import NO_TOOLS, Tools, render_all
from infsample_rl.data.fields import Problem
from infsample_rl.data.rows import check_is_there
from infsample_rl.data.sources import is_file, load_problems
from infsample_rl.types import Prompt

logger = logging.getLogger(__name__)

ONE_SOURCE = "one source"


class Mixture:
    """Which source item k of the stream is of: every source's share of the first k items is that of its weight, as
    nearly as items can be divided (smooth weighted round robin). A function of k alone, in whole numbers."""

    def __init__(self, weights: list[float]) -> None:
        """`weights` > 0 count as they are written: 0.1 is a tenth."""
        shares = [Fraction(str(weight)) for weight in weights]
        whole = [int(share * math.lcm(*(share.denominator for share in shares))) for share in shares]
        self._weights = [weight // math.gcd(*whole) for weight in whole]
        self._cycle = sum(self._weights)  # items after which it starts again
        self._due, self._dealt = list[int](), list[int]()  # of every source: its claim to the next item, its items
        self._restart()

    def __call__(self, k: int) -> tuple[int, int]:
        """(number of the source of item k, how many items before it are of that source)."""
        cycle, place = divmod(k, self._cycle)
        if place < self._next:
            self._restart()
        source = 0
        while self._next <= place:
            self._next += 1
            self._due = [due + weight for due, weight in zip(self._due, self._weights, strict=True)]
            source = self._due.index(max(self._due))
            self._due[source] -= self._cycle
            self._dealt[source] += 1
        return source, cycle * self._weights[source] + self._dealt[source] - 1

    def _restart(self) -> None:
        self._next, self._due, self._dealt = 0, [0] * len(self._weights), [0] * len(self._weights)


class PromptStream:
    """Batches of prompts without end, of one source or of several in proportion to their weights.

    Item j of a source is item j mod n of its epoch j // n, so batches wrap over its end. An epoch's order depends on
    (run.seed, epoch, number of the source) alone; the position is all there is to save.
    """

    def __init__(self, sources: dict[str, list[Prompt]], weights: list[float], *, data: DataConfig, seed: int) -> None:
        """`sources`: prompts by the names in DataConfig.parts, one weight each."""
        self.sources, self.weights = sources, weights
        self.num_rows = sum(map(len, sources.values()))
        self.first_rendered = next(iter(sources.values()))[0].text  # for the log
        self.prompts_per_step, self.shuffle, self.seed = data.prompts_per_step, data.shuffle, seed
        self.position = 0  # items dealt since the start of the run
        self.fingerprint = _fingerprint([prompt for prompts in sources.values() for prompt in prompts])
        self._of_source, self._mixture = list(sources.values()), Mixture(weights)
        # of every source the epoch that its order is of, and row positions
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def next_batch(self, count: int | None = None, first_index: int = 0) -> list[Prompt]:
        """The next `count` prompts (default: a step's), prompt_index from `first_index` on; one comes twice only when
        the epoch ends within."""
        items = range(self.position, self.position + (self.prompts_per_step if count is None else count))
        self.position = items.stop
        return [dataclasses.replace(self._item(k), prompt_index=first_index + index) for index, k in enumerate(items)]

    def steps_for_epochs(self, epochs: float) -> int:
        """Steps that deal `epochs` times as many prompts as there are rows, of all sources together, rounded up."""
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
            "mixture": "the mixture of data.sources (names, rows, weights)",
        }
        for name, now in self._identity().items():
            was = state.get(name, ONE_SOURCE)  # older checkpoints know of no mixture
            if was != now:
                raise ValueError(
                    f"cannot resume: {meanings[name]} was {was} and is {now} now; put it back, or "
                    "start anew in another run.dir"
                )
        self.position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        mixture = ", ".join(
            f"{name} ({len(prompts)} rows) x {weight:g}"
            for (name, prompts), weight in zip(self.sources.items(), self.weights, strict=True)
            if name
        )
        known = {"num_rows": self.num_rows, "fingerprint": self.fingerprint, "seed": self.seed, "shuffle": self.shuffle}
        return known | {"mixture": mixture or ONE_SOURCE}

    def _item(self, k: int) -> Prompt:
        source, item = self._mixture(k)
        prompts = self._of_source[source]
        epoch, place = divmod(item, len(prompts))
        if self._orders.get(source, (-1,))[0] != epoch:
            self._orders[source] = (epoch, epoch_order(len(prompts), self.seed, epoch, self.shuffle, source))
        return prompts[self._orders[source][1][place]]


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool, source: int = 0) -> np.ndarray:
    """The order of a source's epoch, [num_rows] positions: a permutation made from (seed, epoch, source), or 0, 1, 2,
    ... without shuffle."""
    if not shuffle:
        return np.arange(num_rows)
    # RandomState: NumPy keeps its numbers the same for ever
    return np.random.RandomState([seed, epoch, source] if source else [seed, epoch]).permutation(num_rows)


def train_problems(config: Config) -> dict[str, list[Problem]]:
    """What there is to train on, by the names in DataConfig.parts. ValueError in one line for sources and rows that
    cannot be used."""
    return {name: load_problems(data, evaluation=False) for name, data in config.data.parts.items()}


def held_out_problems(config: Config) -> dict[str, list[Problem]]:
    """As train_problems(), of data.eval_source where there is one and held-out problems are evaluated: the first
    run.eval_prompts."""
    found = {}
    for name, data in config.data.parts.items():
        if data.held_out is not None and config.run.eval_prompts > 0:
            problems = load_problems(data, evaluation=True, limit=config.run.eval_prompts)
            # where long ones are dropped, later ones take their place
            found[name] = problems if data.long_prompts == "drop" else problems[: config.run.eval_prompts]
        elif data.held_out is not None and is_file(data.held_out):  # said before somebody turns evaluations on
            check_is_there(Path(data.held_out), f"data.eval_source={data.held_out}")
    return found


def build_train_prompts(
    config: Config,
    tokenizer: Any,
    context_length: int | None,
    tools: Tools = NO_TOOLS,
    problems: dict[str, list[Problem]] | None = None,
) -> PromptStream:
    """Render and check all training prompts. `context_length`: the model's, none when it has no bound. `tools`: what
    the chat template offers the model. `problems`: train_problems(), where they have been loaded.

    ValueError in one line for anything that cannot work: the sources, their rows, the template's keywords, the lengths.
    """
    if tokenizer.chat_template is None:
        logger.warning(
            "the tokenizer %s has no chat template: prompts are plain text, their parts joined by blank lines",
            tokenizer.name_or_path,
        )
    sources = {}
    for name, own in (train_problems(config) if problems is None else problems).items():
        sources[name] = _of_source(name, render_all(own, tokenizer, config.data.parts[name], tools))
        _check_context(sources[name], config, context_length, own[0].origin)
    weights = [entry.weight for entry in config.data.sources] or [1.0]
    return PromptStream(sources, weights, data=config.data, seed=config.run.seed)


def build_eval_prompts(
    config: Config,
    tokenizer: Any,
    context_length: int | None,
    tools: Tools = NO_TOOLS,
    problems: dict[str, list[Problem]] | None = None,
) -> list[Prompt]:
    """The first run.eval_prompts prompts of data.eval_source, of each where there are several data.sources, in its
    order; none without one. Checked like the training prompts. `problems`: held_out_problems(), where they have been
    loaded."""
    count, found = config.run.eval_prompts, list[Prompt]()
    for name, own in (held_out_problems(config) if problems is None else problems).items():
        prompts = render_all(own, tokenizer, config.data.parts[name], tools)[:count]
        _check_context(prompts, config, context_length, own[0].origin)
        found += _of_source(name, prompts)
    return [dataclasses.replace(prompt, prompt_index=index) for index, prompt in enumerate(found)]


def _of_source(name: str, prompts: list[Prompt]) -> list[Prompt]:
    return [dataclasses.replace(prompt, source=name) for prompt in prompts] if name else prompts


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

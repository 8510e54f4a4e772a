"""How many tokens are drafted for which row of a step, by what drafts have come to and what a query costs.

A drafted token is right when it is the one that would be sampled at its place, which follows from its logits and its
hashed noise: so drafts change steps, never samples. Letters: R rows, Q queries of a step (its rows and drafted tokens).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infsample_rl.config.rollout import MOST_DRAFTS, MOST_QUERIES, RolloutConfig
from infsample_rl.rollout.engine.decoder import FusedDecoder
from infsample_rl.rollout.engine.model_runner import ModelRunner
from infsample_rl.rollout.kernels import cpu_kernels
from infsample_rl.rollout.kernels.cpu_kernels import Kernels
from infsample_rl.rollout.schedule.drafter import Drafter, needs_compiler, shared_out
from infsample_rl.rollout.schedule.prompt_group import Sample
from infsample_rl.rollout.schedule.step_planner import StepPlanner

MEMORY = 0.99  # of what was drafted by matches of a length, at every token more
LEARNING = 0.2  # by how much a token changes a row's skill
FORGET = 0.98  # of what steps took, at every step
FIRST_COST = 0.1  # of a query beside a step of one, before any was measured
LAUNCHED_AHEAD = 0.9  # of a step's seconds, where it could be launched before the one before is read (H200)
LOSS = 0.01  # of all seconds that drafting, and looking for drafts, may lose
MOST_SAVED = 8  # steps whose seconds may be lost again after drafts have gained them
FEW_STEPS = 8  # of which nothing is concluded
MANY_STEPS = 64  # of as many queries, after which older ones count less
MOST_BESIDE = 0.5  # that a step may lie beside the line
LEAST = 0.5  # of the chance that pays by the line, below which a draft is not looked at


@dataclass(slots=True)
class Record:
    """Drafted tokens that were reached, and those that were right."""

    tries: float = 0.0
    hits: float = 0.0

    def add(self, is_right: bool) -> None:
        """One more; what is older counts less."""
        self.tries, self.hits = MEMORY * self.tries + 1, MEMORY * self.hits + is_right

    def chance(self, skill: float) -> float:
        """Of the next, in a row with so much skill (logits beside the mean of rows), as if half of one more were right:
        no record says never or always."""
        return 1 / (1 + (self.tries - self.hits + 0.5) / (self.hits + 0.5) * math.exp(-skill))


class Found(NamedTuple):
    """What a row may say next."""

    sample: Sample
    start: int  # its tokens before
    tokens: list[int]
    matches: list[int]  # tokens of the match that each was found by


class StepCost:
    """Seconds of a step over its queries: a line c0 + c1 Q, fitted to the steps so far, the newest most, and how far
    steps of just Q lie beside it, since products and graphs take whole tiles of queries."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, Q, Q^2, seconds, Q x seconds
        self._beside: defaultdict[int, list[float]] = defaultdict(lambda: [FEW_STEPS, 0.0])  # of Q: steps, share
        self._left_out = 0  # steps one after another

    def add(self, queries: int, seconds: float) -> None:
        """A step has taken so long. One that took several times what it should is left out: something else ran, or was
        compiled. All before are forgotten after one that took far less, or several that took far more."""
        is_late = self._sums[0] > FEW_STEPS and seconds > 4 * self.of(queries)
        self._left_out = self._left_out + 1 if is_late else 0
        if is_late and self._left_out < FEW_STEPS:
            return
        if is_late or (self._sums[0] and self.of(queries) > 4 * seconds):
            self._sums, self._left_out = [0.0] * 5, 0
            self._beside.clear()
        new = (1.0, queries, queries**2, seconds, queries * seconds)
        self._sums = [FORGET * old + each for old, each in zip(self._sums, new, strict=True)]
        base, slope = self._line()
        share = min(max(seconds / (base + slope * queries) - 1, -MOST_BESIDE), MOST_BESIDE)
        beside = self._beside[queries]
        beside[0] = min(beside[0] + 1, MANY_STEPS)
        beside[1] += (share - beside[1]) / beside[0]

    def of(self, queries: int) -> float:
        """Seconds of a step of so many queries, > 0."""
        return self.of_each(range(queries, queries + 1))[0]

    def of_each(self, queries: Iterable[int]) -> list[float]:
        """Seconds of steps of so many queries."""
        (base, slope), beside = self._line(), self._beside
        return [(base + slope * each) * (1 + beside[each][1]) for each in queries]

    def of_query(self) -> float:
        """Seconds that one more takes, by the line."""
        return self._line()[1]

    def _line(self) -> tuple[float, float]:
        count, queries, squares, seconds, products = self._sums
        if not count:
            return 1.0, FIRST_COST
        mean, mean_seconds = queries / count, seconds / count
        spread = squares / count - mean**2
        guess = FIRST_COST * mean_seconds / (1 + FIRST_COST * mean)
        # a slope that few steps or few different numbers of queries give counts little
        prior = FEW_STEPS / count
        slope = (products / count - mean * mean_seconds + prior * guess) / (spread + prior)
        slope = min(max(slope, 1e-3 * guess), mean_seconds / mean)
        return max(mean_seconds - slope * mean, 1e-9), slope


class Speculation:
    """Drafts for the rows of one engine's calls."""

    def __init__(self, kernels: Kernels, drafts: int | None, *, holds_up: bool = False) -> None:
        """`drafts`: for every row and step, where so many are found; None: as many as pay. `holds_up`: steps could be
        launched ahead if nothing were drafted for them."""
        self.drafter, self._drafts, self._holds_up = Drafter(kernels), drafts, holds_up
        self._by_match: defaultdict[int, Record] = defaultdict(Record)
        self._skill: defaultdict[Sample, float] = defaultdict(float)
        self._cost = StepCost()
        self._started = 0.0
        self._found_now: list[Found] = []
        self._saved = 0.0  # seconds that drafts have gained, less what looking for them took, within bounds
        self._plain = 0.0  # seconds of the last step that was looked at, had nothing been drafted
        self._was_long = False  # whether its drafts took more than that
        self.seconds_of_drafts = 0.0  # what drafts took of the last step, beside the model's

    def rest(self) -> bool:
        """Asked before every step: whether nothing is drafted for it, since more was lost than may be."""
        self._saved += LOSS * self._plain
        return self._drafts is None and self._saved < 0

    def drafts_of(self, rows: Sequence[Sample], planner: StepPlanner) -> list[list[int]] | None:
        """The tokens drafted for every row of a step, whose KV has pages; None where nothing is drafted."""
        self._started, self.seconds_of_drafts = time.perf_counter(), 0.0
        room = MOST_QUERIES - len(rows)
        if room <= 0:
            return None
        self._found_now = found = [Found(sample, len(sample.tokens), *self._find(sample)) for sample in rows]
        if self._drafts is None:
            counts = self._paying(found, room)
        else:
            counts = shared_out([len(each.tokens) for each in found], room)
        drafts = []
        for each, count in zip(found, counts, strict=True):
            drafts.append(each.tokens[: planner.lend_pages(each.sample, count)] if count else [])
        self.seconds_of_drafts = time.perf_counter() - self._started
        return drafts if any(drafts) else None

    def end(self, samples: Sequence[Sample]) -> float:
        """These samples have ended; the seconds that it takes to keep them."""
        started = time.perf_counter()
        for sample in samples:
            self.drafter.end(sample)
            self._skill.pop(sample, None)
        return time.perf_counter() - started

    def end_step(self, rows: int, queries: int, tokens: int) -> None:
        """A step that drafts_of() began is read: it had so many rows and queries and gave so many tokens.

        What was found is judged by what was drawn, whether it was run or not.
        """
        read = time.perf_counter()
        self._cost.add(queries, read - self._started - self.seconds_of_drafts)
        self._judge()
        self.seconds_of_drafts += time.perf_counter() - read
        plain = self._plain = self._cost.of(rows) * (LAUNCHED_AHEAD if self._holds_up else 1.0)
        looking, was_long = self.seconds_of_drafts, self._was_long
        self._was_long = looking > plain
        if self._was_long and not was_long:  # the first: something else ran
            looking = plain
        self._saved += tokens / rows * plain - self._cost.of(queries) - looking
        self._saved = min(self._saved, MOST_SAVED * plain)

    def close(self) -> None:
        """A call has ended."""
        self._skill.clear()
        self._found_now = []
        self.drafter.close()

    def _judge(self) -> None:
        for sample, start, tokens, matches in self._found_now:
            for token, match, drawn in zip(tokens, matches, sample.tokens[start:], strict=False):
                record, is_right = self._by_match[match], token == drawn
                self._skill[sample] += LEARNING * (is_right - record.chance(self._skill[sample]))
                record.add(is_right)
                if not is_right:
                    break
        self._found_now = []

    def _find(self, sample: Sample) -> tuple[list[int], list[int]]:
        if not sample.tokens:  # the first comes from the prompt's logits
            return [], []
        return self.drafter.draft(sample, MOST_DRAFTS if self._drafts is None else self._drafts)

    def _paying(self, found: Sequence[Found], room: int) -> list[int]:
        """Of all drafted tokens, the likeliest first, as many as give the most tokens a second. A row that is expected
        to have more left than the others counts for more: it sets the end."""
        left = [max(1.0, (sample.predicted or 0.0) - sample.num_tokens) for sample, *_ in found]
        known = [each for each, (sample, *_) in zip(left, found, strict=True) if sample.predicted is not None]
        mean = sum(known) / len(known) if known else 1.0
        counts, tokens = [0] * len(found), float(len(found))
        least = LEAST * tokens * self._cost.of_query() / self._cost.of(len(found))
        offers = []
        for row, (sample, _, _, matches) in enumerate(found):
            weight = min(2.0, max(0.5, left[row] / mean)) if sample.predicted is not None else 1.0
            chance, skill = 1.0, self._skill[sample]
            for match in matches:
                chance *= self._by_match[match].chance(skill)
                if weight * chance < least:
                    break
                offers.append((chance * weight, row))
        offers = sorted(offers, reverse=True)[:room]
        costs = self._cost.of_each(range(len(found), len(found) + len(offers) + 1))
        best, many = tokens / costs[0], 0
        for number, ((worth, _), seconds) in enumerate(zip(offers, costs[1:], strict=True), 1):
            tokens += worth
            if tokens / seconds > best:
                best, many = tokens / seconds, number
        for _, row in offers[:many]:
            counts[row] += 1
        return counts


def speculation_of(config: RolloutConfig, runner: ModelRunner) -> Speculation | None:
    """What drafts tokens for a model, where rollout.speculate asks for it: on the CPU where a row's bits depend on no
    row beside it, on a GPU for the decoders of this package.

    ValueError where a number of drafts is asked for that cannot be.
    """
    on_gpu = runner.device.type == "cuda" and isinstance(runner.decoder, FusedDecoder) and not runner.length_rope
    kernels = None
    if config.speculates and (runner.is_exact or on_gpu):
        kernels = cpu_kernels.load("no tokens are drafted") if on_gpu else runner.kernels
    if kernels is not None:
        return Speculation(kernels, None if config.speculate == "auto" else int(config.speculate), holds_up=on_gpu)
    if config.speculate not in ("auto", "0"):
        if on_gpu:
            raise ValueError(needs_compiler("rollout.speculate", config.speculate))
        raise ValueError(
            f"rollout.speculate={config.speculate} needs the compiled decoder or Llama, Qwen2 or Qwen3 on a GPU, and "
            f"this is model type {runner.model.config.model_type} in {runner.dtype} on {runner.device.type}; take "
            "rollout.speculate=auto"
        )
    return None

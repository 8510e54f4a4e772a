"""How many tokens are drafted for which row of a step, by what drafts have come to and what a query costs.

A drafted token is right when it is the one that would be sampled at its place, which follows from its logits and its
hashed noise: so drafts change steps, never samples. Letters: R rows, Q queries of a step (its rows and drafted tokens).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from infsample_rl.config.rollout import MOST_DRAFTS, MOST_QUERIES, RolloutConfig
from infsample_rl.rollout.engine.decoder import FusedDecoder
from infsample_rl.rollout.engine.model_runner import ModelRunner
from infsample_rl.rollout.kernels import cpu_kernels
from infsample_rl.rollout.kernels.cpu_kernels import Kernels
from infsample_rl.rollout.schedule.drafter import Drafter
from infsample_rl.rollout.schedule.prompt_group import Sample
from infsample_rl.rollout.schedule.step_planner import StepPlanner

PRIOR_TRIES = 4  # a row's own record counts as much as that of its match's length after so many
FORGET = 0.98  # of what steps took, at every step
FIRST_COST = 0.04  # of a query beside a step of one, before any was measured
LEAST_GAIN = 1.02  # in tokens a second, below which nothing is drafted for a while
LEAST_GAIN_AHEAD = 1.1  # where steps could be launched ahead, which hides what the host does (H200)
REST_STEPS = 64  # that while; twice as long every time, up to MOST_REST
MOST_REST = 4096
TRIED_STEPS = 8  # before drafts are judged


@dataclass(slots=True)
class Record:
    """Drafted tokens that were reached, and those that were right."""

    tries: float = 0.0
    hits: float = 0.0

    def add(self, hit: bool) -> None:
        """One more; what is older counts less."""
        self.tries, self.hits = 0.95 * self.tries + 1, 0.95 * self.hits + hit


class StepCost:
    """Seconds of a step over its queries, c0 + c1 Q, fitted to the steps so far, the newest most."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, Q, Q^2, seconds, Q x seconds

    def add(self, queries: int, seconds: float) -> None:
        """A step has taken so long. One that took several times what it should is left out: something else ran, or was
        compiled; so are all before one that took far less."""
        if self._sums[0] > TRIED_STEPS and seconds > 4 * self.of(queries):
            return
        if self._sums[0] and self.of(queries) > 4 * seconds:
            self._sums = [0.0] * 5
        new = (1.0, queries, queries**2, seconds, queries * seconds)
        self._sums = [FORGET * old + each for old, each in zip(self._sums, new, strict=True)]

    def of(self, queries: float) -> float:
        """Seconds of a step of so many queries, > 0."""
        base, slope = self._line()
        return base + slope * queries

    def of_query(self) -> float:
        """Seconds that one more takes."""
        return self._line()[1]

    def _line(self) -> tuple[float, float]:
        count, queries, squares, seconds, products = self._sums
        if not count:
            return 1.0, FIRST_COST
        mean, mean_seconds = queries / count, seconds / count
        spread = squares / count - mean**2
        guess = FIRST_COST * mean_seconds / (1 + FIRST_COST * mean)
        # a slope that few different numbers of queries give counts little
        slope = (products / count - mean * mean_seconds + guess) / (spread + 1)
        slope = min(max(slope, 1e-3 * guess), mean_seconds / mean)
        return max(mean_seconds - slope * mean, 1e-9), slope


class Speculation:
    """Drafts for the rows of one engine's calls."""

    def __init__(self, kernels: Kernels, drafts: int | None, *, holds_up: bool = False) -> None:
        """`drafts`: for every row and step, where so many are found; None: as many as pay. `holds_up`: steps could be
        launched ahead if nothing were drafted for them."""
        self.drafter, self._drafts, self._holds_up = Drafter(kernels), drafts, holds_up
        self._by_match: defaultdict[int, Record] = defaultdict(lambda: Record(1.0, 0.5))
        self._by_sample: defaultdict[Sample, Record] = defaultdict(Record)
        self._cost = StepCost()
        self._started = self._tokens = 0.0
        self._tried = self._left_to_rest = 0
        self._rest = REST_STEPS
        self._matches: dict[Sample, list[int]] = {}
        self.seconds_of_drafts = 0.0  # of the last drafts_of()

    def rest(self) -> bool:
        """Asked before every step: whether nothing is drafted for it, since drafts have not paid."""
        self._left_to_rest = max(0, self._left_to_rest - 1)
        return self._left_to_rest > 0

    def drafts_of(self, rows: Sequence[Sample], planner: StepPlanner) -> list[list[int]] | None:
        """The tokens drafted for every row of a step, whose KV has pages; None where nothing is drafted."""
        self._started, self.seconds_of_drafts = time.perf_counter(), 0.0
        room = MOST_QUERIES - len(rows)
        if room <= 0:
            return None
        found = [self._found(sample) for sample in rows]
        counts = self._fixed(found, room) if self._drafts is not None else self._paying(rows, found, room)
        drafts = []
        for sample, count, (tokens, _) in zip(rows, counts, found, strict=True):
            drafts.append(tokens[: planner.lend_pages(sample, count)] if count else [])
        self._matches = {
            sample: matches[: len(draft)]
            for sample, draft, (_, matches) in zip(rows, drafts, found, strict=True)
            if draft
        }
        self.seconds_of_drafts = time.perf_counter() - self._started
        return drafts if self._matches else None

    def judge(self, sample: Sample, accepted: int) -> None:
        """So many of a row's drafted tokens were right."""
        own = self._by_sample[sample]
        for place, match in enumerate(self._matches.get(sample, ())[: accepted + 1]):
            own.add(place < accepted)
            self._by_match[match].add(place < accepted)

    def end(self, samples: Sequence[Sample]) -> None:
        """These samples have ended."""
        for sample in samples:
            self.drafter.end(sample)
            self._by_sample.pop(sample, None)

    def end_step(self, rows: int, queries: int, tokens: int) -> None:
        """A step that drafts_of() began is read: it had so many rows and queries and gave so many tokens."""
        self._cost.add(queries, time.perf_counter() - self._started)
        if self._drafts is not None or (queries == rows and not self._holds_up):
            return
        self._tried += 1
        self._tokens += tokens * self._cost.of(rows) / (rows * self._cost.of(queries))
        if self._tried >= TRIED_STEPS:
            gain, self._tried, self._tokens = self._tokens / self._tried, 0, 0.0
            if gain < (LEAST_GAIN_AHEAD if self._holds_up else LEAST_GAIN):
                self._left_to_rest, self._rest = self._rest, min(2 * self._rest, MOST_REST)
            else:
                self._rest = REST_STEPS

    def close(self) -> None:
        """A call has ended."""
        self._by_sample.clear()
        self._matches = {}
        self.drafter.close()

    def _found(self, sample: Sample) -> tuple[list[int], list[int]]:
        if not sample.tokens:  # the first comes from the prompt's logits
            return [], []
        return self.drafter.draft(sample, MOST_DRAFTS if self._drafts is None else self._drafts)

    def _fixed(self, found: Sequence[tuple[list[int], list[int]]], room: int) -> list[int]:
        counts = []
        for tokens, _ in found:
            counts.append(min(len(tokens), room))
            room -= counts[-1]
        return counts

    def _paying(self, rows: Sequence[Sample], found: Sequence[tuple[list[int], list[int]]], room: int) -> list[int]:
        """Of all drafted tokens, the likeliest first, those that add more to the tokens of a second than they take
        away. A row that is expected to have more left than the others counts for more: it sets the end."""
        left = [max(1.0, (sample.predicted or 0.0) - sample.num_tokens) for sample in rows]
        known = [each for each, sample in zip(left, rows, strict=True) if sample.predicted is not None]
        mean = sum(known) / len(known) if known else 1.0
        offers = []
        for row, (sample, (_, matches)) in enumerate(zip(rows, found, strict=True)):
            own, chance = self._by_sample[sample], 1.0
            weight = min(2.0, max(0.5, left[row] / mean)) if sample.predicted is not None else 1.0
            for match in matches:
                record = self._by_match[match]
                chance *= (PRIOR_TRIES * record.hits / record.tries + own.hits) / (PRIOR_TRIES + own.tries)
                offers.append((chance * weight, chance, row))
        offers.sort(reverse=True)
        counts, tokens = [0] * len(rows), float(len(rows))
        seconds, of_query = self._cost.of(len(rows)), self._cost.of_query()
        for weighted, chance, row in offers[:room]:
            if weighted * seconds < tokens * of_query:
                break
            counts[row] += 1
            tokens, seconds = tokens + chance, seconds + of_query
        return counts


def speculation_of(config: RolloutConfig, runner: ModelRunner) -> Speculation | None:
    """What drafts tokens for a model, where rollout.speculate asks for it: on the CPU where a row's bits depend on no
    row beside it, on a GPU for the decoders of this package.

    ValueError where a number of drafts is asked for that cannot be.
    """
    on_gpu = runner.device.type == "cuda" and isinstance(runner.decoder, FusedDecoder) and not runner.length_rope
    kernels = None
    if config.speculates and (runner.is_exact or on_gpu):
        kernels = cpu_kernels.load() if on_gpu else runner.kernels
    if kernels is not None:
        return Speculation(kernels, None if config.speculate == "auto" else int(config.speculate), holds_up=on_gpu)
    if config.speculate not in ("auto", "0"):
        raise ValueError(
            f"rollout.speculate={config.speculate} needs the compiled decoder or Llama, Qwen2 or Qwen3 on a GPU, and "
            f"this is model type {runner.model.config.model_type} in {runner.dtype} on {runner.device.type}; take "
            "rollout.speculate=auto"
        )
    return None

"""Which samples share a learner row, and which of a row one pass. Pure Python on ints; the same order of groups gives
the same rows.

A row is a list of samples in order; neighbours of one prompt form a segment, which holds the prompt once. A pass is
what is run forward and backward at a time: a row, or, of a row of one prompt, the prompt and some of its responses.
Invariants: each sample is in exactly one row; no pass is above the token budget; a prompt is computed more than once
only when its group does not fit in one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from infsample_rl.types import Completion, ReferenceResult, ReferenceTokens, SampleSpec, TrainingSample

# What a query-key pair costs beside a token's linear layers: 4 h of about 24 h^2 operations a layer (12 h^2 weights),
# for hidden size h = 1,024.
PAIR_COST = 1 / (6 * 1024)


class RowPlanner:
    """Fills rows as groups complete, while other prompts still decode.

    Example, 10 tokens a row, prompt 0 of 3 and prompt 1 of 2 tokens: group 0 of lengths [2, 2] opens a row of 3 + 2 + 2
    = 7; group 1 of length [4] needs 2 + 4 = 6 more, so the row of 7 is returned as full and group 1 opens the next.
    """

    def __init__(self, max_tokens: int, prompt_lengths: Mapping[int, int], *, long_rows: int = 0) -> None:
        """`max_tokens`: of a pass. Rows are one pass each; with `long_rows` a group above it becomes so many rows of
        several passes."""
        self.max_tokens = max_tokens
        self.prompt_lengths = prompt_lengths
        self.long_rows = long_rows
        self._row: list[SampleSpec] = []
        self._tokens = 0

    def add_group(self, specs: list[SampleSpec]) -> list[list[SampleSpec]]:
        """Place the samples of one prompt, each of which fits in a row, and return the rows that are full."""
        tokens = row_tokens(specs, self.prompt_lengths)
        if self.long_rows and tokens > self.max_tokens:
            return self.flush() + _even_parts(specs, self.long_rows)
        # A group that does not fit behind the open row starts a new one: the prompt is then computed once, not twice.
        full = self.flush() if self._tokens + tokens > self.max_tokens else []
        for spec in specs:
            cost = self._cost(spec)
            if self._tokens + cost > self.max_tokens:
                full += self.flush()
                cost = self._cost(spec)
            self._tokens += cost
            self._row.append(spec)
        return full

    def flush(self) -> list[list[SampleSpec]]:
        """The open row, if any: call it when no further group comes."""
        rows = [self._row] if self._row else []
        self._row, self._tokens = [], 0
        return rows

    def _cost(self, spec: SampleSpec) -> int:
        shares_prompt = bool(self._row) and self._row[-1].prompt_index == spec.prompt_index
        return spec.length + (0 if shares_prompt else self.prompt_lengths[spec.prompt_index])


def _even_parts(specs: list[SampleSpec], count: int) -> list[list[SampleSpec]]:
    """At most `count` runs of neighbours, of nearly the same number of tokens."""
    parts: list[list[SampleSpec]] = [[] for _ in range(count)]
    share, before = sum(spec.length for spec in specs) / count, 0
    for spec in specs:
        parts[int((before + spec.length / 2) / share)].append(spec)
        before += spec.length
    return [part for part in parts if part]


def split_passes(row: list[TrainingSample], max_tokens: int) -> list[list[TrainingSample]]:
    """A row in passes of at most `max_tokens`, prompts included: [row] where it fits, else runs of its samples, which
    have one prompt."""
    prompts = [len(next(group).prompt_ids) for _, group in groupby(row, key=lambda sample: sample.prompt_index)]
    if sum(prompts) + sum(len(sample.response_ids) for sample in row) <= max_tokens:
        return [row]
    if len(prompts) > 1:
        raise ValueError(
            f"a row of {len(prompts)} prompts is above {max_tokens} tokens: only one prompt's takes passes"
        )
    return [row[part] for part in runs_within([len(sample.response_ids) for sample in row], prompts[0], max_tokens)]


def runs_within(lengths: Sequence[int], prompt_tokens: int, max_tokens: int) -> list[slice]:
    """Responses, in order, in runs that have at most `max_tokens` with their prompt; one that is longer is alone."""
    starts: list[int] = []
    tokens = prompt_tokens
    for number, length in enumerate(lengths):
        if not starts or tokens + length > max_tokens:
            starts.append(number)
            tokens = prompt_tokens
        tokens += length
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(lengths)], strict=False)]


def row_tokens(row: list[SampleSpec], prompt_lengths: Mapping[int, int]) -> int:
    """Tokens of a row: each segment's prompt once, and every response."""
    prompts = [prompt_lengths[prompt] for prompt, _ in groupby(row, key=lambda spec: spec.prompt_index)]
    return sum(prompts) + sum(spec.length for spec in row)


def row_cost(row: list[SampleSpec], prompt_lengths: Mapping[int, int]) -> float:
    """Estimated time of a row, in units of one token in the linear layers: its tokens, and PAIR_COST for every
    query-key pair.

    A prompt of P tokens has P (P + 1) / 2 pairs, a response of L tokens L P + L (L + 1) / 2. Prompt 4, responses 2 and
    3: 9 tokens, 10 + 11 + 18 = 39 pairs.
    """
    pairs = 0
    for index, segment in groupby(row, key=lambda spec: spec.prompt_index):
        prompt = prompt_lengths[index]
        pairs += prompt * (prompt + 1) // 2
        pairs += sum(spec.length * prompt + spec.length * (spec.length + 1) // 2 for spec in segment)
    return row_tokens(row, prompt_lengths) + PAIR_COST * pairs


def balanced_waves(
    rows: list[list[SampleSpec]], num_ranks: int, prompt_lengths: Mapping[int, int]
) -> list[list[list[SampleSpec] | None]]:
    """Deal rows that are all known to the ranks: waves[i][rank] is a row, or None in the last wave where there is none
    left.

    A wave takes as long as its slowest rank, so rows of similar `row_cost` share one, the dearest first (what does not
    fit in memory fails at once): the sum over waves of the dearest row is the least there is. In a wave the rank that
    has had least takes the dearest row, so ranks' totals differ by no more than the rows of one wave do. The same rows
    give the same waves.
    """
    costs = [row_cost(row, prompt_lengths) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: (-costs[index], index))
    loads, waves = [0.0] * num_ranks, []
    for start in range(0, len(order), num_ranks):
        wave: list[list[SampleSpec] | None] = [None] * num_ranks
        ranks = sorted(range(num_ranks), key=lambda rank: (loads[rank], rank))
        for rank, index in zip(ranks, order[start : start + num_ranks], strict=False):
            wave[rank] = rows[index]
            loads[rank] += costs[index]
        waves.append(wave)
    return waves


def assemble(
    row: list[SampleSpec],
    prompt_ids: Mapping[int, np.ndarray],
    micro_groups: list[list[Completion]],
    references: list[ReferenceResult],
) -> list[TrainingSample]:
    """The row's training samples from the fetched micro-groups, in the row's order.

    `references` is aligned with `micro_groups`, or empty when no reference is used. RuntimeError for a sample that is
    missing or whose length is not the planned one.
    """
    found: dict[tuple[int, int], tuple[Completion | None, ReferenceTokens | None]] = {}
    for number, micro_group in enumerate(micro_groups):
        tokens = references[number].tokens if references else [None] * len(micro_group)
        for completion, reference in zip(micro_group, tokens, strict=True):
            found[completion.prompt_index, completion.sample_index] = (completion, reference)
    samples = []
    for spec in row:
        sampled, reference = found.get((spec.prompt_index, spec.sample_index), (None, None))
        if sampled is None or len(sampled.token_ids) != spec.length:
            raise RuntimeError(
                f"sample {spec.sample_index} of prompt {spec.prompt_index} was not delivered with the {spec.length} "
                "tokens that its learner row was planned with"
            )
        samples.append(
            TrainingSample(
                prompt_index=spec.prompt_index,
                sample_index=spec.sample_index,
                prompt_ids=prompt_ids[spec.prompt_index],
                response_ids=sampled.token_ids,
                advantages=spec.advantages,
                engine_logprobs=sampled.logprobs,
                reference=reference,
            )
        )
    return samples

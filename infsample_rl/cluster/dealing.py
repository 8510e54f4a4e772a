"""Which worker samples what: the step's samples are cut into parts of near-equal expected length. Plain ints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from infsample_rl.types import Prompt, RolloutWork

KEPT_ROWS = 100_000  # of the data source, those sampled last


class ExpectedLengths:
    """Expected response length of a prompt: the mean when it was last sampled, else that of the newest samples."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        """`state`: what state() gave."""
        state = state or {"rows": [], "newest": 1.0}
        self._by_row: dict[int | str, float] = dict(state["rows"])  # Prompt.place -> tokens
        self._newest: float = state["newest"]

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as plain JSON."""
        return {"rows": [[row, length] for row, length in self._by_row.items()], "newest": self._newest}

    def __call__(self, prompt: Prompt) -> float:
        """Tokens, > 0."""
        return self._by_row.get(prompt.place, self._newest)

    def observe(self, lengths_by_row: dict[int | str, list[int]]) -> None:
        """Take the lengths of a step's samples."""
        for row, lengths in lengths_by_row.items():
            if lengths:
                self._by_row.pop(row, None)  # the newest last
                self._by_row[row] = sum(lengths) / len(lengths)
        for row in list(self._by_row)[: max(0, len(self._by_row) - KEPT_ROWS)]:
            del self._by_row[row]
        everything = [length for lengths in lengths_by_row.values() for length in lengths]
        if everything:
            self._newest = sum(everything) / len(everything)


def deal(
    prompts: list[Prompt], group_size: int, num_workers: int, *, whole_prompts: bool, expected: list[float]
) -> list[list[RolloutWork]]:
    """Cut the step's samples, in (prompt, sample) order, into one contiguous part for every worker, near-equal in
    expected tokens.

    `expected`: tokens of a sample of every prompt. A prompt's group may be split over workers; `whole_prompts` keeps it
    on one (dynamic_slot needs that). Example: 1 prompt, G = 4, 2 workers -> [[prompt 0: samples 0, 1], [prompt 0:
    samples 2, 3]].
    """
    if whole_prompts:
        return [
            [work_of(prompt, range(group_size)) for prompt in prompts[worker::num_workers]]
            for worker in range(num_workers)
        ]
    work = [work_of(prompt, range(group_size)) for prompt in prompts]
    return split(work, num_workers, {prompt.prompt_index: e for prompt, e in zip(prompts, expected, strict=True)})


def split(
    work: Iterable[RolloutWork], num_parts: int, expected: dict[int, float] | None = None
) -> list[list[RolloutWork]]:
    """Cut work into contiguous parts of near-equal expected tokens, {prompt_index: of a sample}; None: all equal."""
    work = list(work)
    costs = [1.0 if expected is None else expected[item.prompt_index] for item in work]
    total = sum(cost * len(item.sample_indices) for cost, item in zip(costs, work, strict=True))
    parts: list[list[RolloutWork]] = [[] for _ in range(num_parts)]
    before = 0.0
    for cost, item in zip(costs, work, strict=True):
        of_part: dict[int, list[int]] = {}
        for place, sample in enumerate(item.sample_indices):
            share = (before + cost * (place + 1)) * num_parts / total  # where the sample ends, in parts
            of_part.setdefault(min(num_parts - 1, int(share - 1e-9)), []).append(sample)
        for part, samples in of_part.items():
            parts[part].append(replace(item, sample_indices=samples))
        before += cost * len(item.sample_indices)
    return parts


def by_prompt(work: list[RolloutWork]) -> dict[int, RolloutWork]:
    """One piece of work for every prompt, samples in order."""
    merged: dict[int, RolloutWork] = {}
    for item in sorted(work, key=lambda item: item.prompt_index):
        before = merged[item.prompt_index].sample_indices if item.prompt_index in merged else []
        merged[item.prompt_index] = replace(item, sample_indices=sorted([*before, *item.sample_indices]))
    return merged


def settle(owed: dict[int, RolloutWork], prompt_index: int, samples: list[int]) -> RolloutWork:
    """Take samples of a prompt out of what is owed; they as work."""
    work = owed.pop(prompt_index)
    if left := sorted(set(work.sample_indices) - set(samples)):
        owed[prompt_index] = replace(work, sample_indices=left)
    return replace(work, sample_indices=list(samples))


def work_of(prompt: Prompt, samples: Iterable[int]) -> RolloutWork:
    """Some samples of a prompt."""
    return RolloutWork(
        prompt_index=prompt.prompt_index,
        prompt_ids=prompt.token_ids,
        sample_indices=list(samples),
        start=prompt.start,
    )

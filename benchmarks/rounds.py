"""Measurements in rounds, and what may be said of their ratio.

Every measurement is taken once a round, and the order turns round after each, so that what disturbs the machine for a
while disturbs all sides. A ratio is of two measurements of one round; its median stands with the lowest and the highest
of all rounds, and where these lie on both sides of 1, or the rounds are too few, none is said.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from benchmarks.process import Record

FEWEST_ROUNDS = 3  # of which a ratio is said

Point = tuple[str, Callable[[int], Record]]  # what is said of it, and what measures it in a round


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of all rounds, with the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def measure_rounds(points: Sequence[Point], rounds: int, found: list[list[Record]]) -> bool:
    """Fill `found`, for every point its records, one a round, which its caller has also where the process is ended
    meanwhile. Whether a point failed: that has no records, and is left out of the rounds that follow."""
    found[:] = [[] for _ in points]
    failed = set[int]()
    for number in range(rounds):
        order = range(len(points)) if number % 2 == 0 else reversed(range(len(points)))
        for index in (index for index in order if index not in failed):
            said, measure = points[index]
            print(f"{said}, round {number + 1} of {rounds} ...", file=sys.stderr, flush=True)
            try:
                found[index].append(measure(number))
            except RuntimeError as error:
                print(f"{said} failed: {error}", file=sys.stderr, flush=True)
                found[index].clear()
                failed.add(index)
    return bool(failed)


def median_round(records: Sequence[Record], key: str) -> Record:
    """The record of the round whose `key` is the median, the lower one of two, with the peak of all rounds."""
    middle = median_low([record[key] for record in records])
    record = next(record for record in records if record[key] == middle)
    return record | {"peak_memory_bytes": max(each["peak_memory_bytes"] for each in records)}


def ratio(first: Sequence[float], these: Sequence[float]) -> Spread | None:
    """The first over these, of rounds in the same order; None where the rounds are fewer than FEWEST_ROUNDS, or do not
    agree on which side of 1 it lies."""
    if len(first) < FEWEST_ROUNDS or len(first) != len(these):
        return None
    found = Spread.of([one / this for one, this in zip(first, these, strict=True)])
    return None if found.low <= 1 <= found.high else found


def beside(first: Sequence[float], these: Sequence[float]) -> Record:
    """A record's fields on its ratio to the first measurement: `ratio` [median, lowest, highest] or None, and
    `ratio_said`, what a table says of it."""
    if these is first:
        return {"ratio": None, "ratio_said": ""}
    found = ratio(first, these)
    why_not = f"{FEWEST_ROUNDS} rounds are needed" if len(first) < FEWEST_ROUNDS else "not told apart"
    return {"ratio": found and [found.median, found.low, found.high], "ratio_said": str(found or why_not)}

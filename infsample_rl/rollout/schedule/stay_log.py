"""Who decodes in which row of an engine, from when to when: noted where rows come and go, which is rare beside the
steps. Plain ints."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import pairwise

from infsample_rl.rollout.schedule.prompt_group import Sample
from infsample_rl.types import AcceptedSpan, RowStay

MOST_SPANS = 16  # of a stay


class StayLog:
    """The stays of one call's samples, until each is asked for."""

    def __init__(self) -> None:
        self._open: dict[Sample, tuple[int, int, float, int]] = {}  # row, running step, time.time(), tokens it had
        self._stays: dict[Sample, list[RowStay]] = {}
        self._accepted: dict[Sample, list[AcceptedSpan]] = {}  # of the stays that are open

    def arrange(self, rows: Iterable[Sample], step: int, left: int) -> None:
        """From the running step that follows `step` others on, these samples decode, each in its slot; the others have
        not since step `left`."""
        now, staying = time.time(), set(rows)
        for sample, (row, *_) in list(self._open.items()):
            if sample not in staying or sample.slot != row:  # preempted, or waits with its prefix
                self._close(sample, left, now)
        for sample in staying - self._open.keys():
            self._open[sample] = (sample.slot, step, now, len(sample.tokens))

    def accept(self, sample: Sample, step: int, tokens: int) -> None:
        """The running step that follows `step` others gave a sample so many drafted tokens too."""
        spans = self._accepted.setdefault(sample, [])
        if spans and spans[-1].end == step:
            before = spans.pop()
            spans.append(AcceptedSpan(before.start, step + 1, before.tokens + tokens))
        else:
            spans.append(AcceptedSpan(step, step + 1, tokens))

    def end(self, samples: Iterable[Sample], step: int) -> None:
        """These samples have ended, after `step` running steps."""
        now = time.time()
        for sample in samples:
            self._close(sample, step, now)

    def take(self, sample: Sample) -> list[RowStay]:
        """The stays of a sample that has ended, first to last."""
        return self._stays.pop(sample, [])

    def _close(self, sample: Sample, step: int, now: float) -> None:
        row, start, started, before = self._open.pop(sample)
        tokens, accepted = len(sample.tokens) - before, joined(self._accepted.pop(sample, []))
        self._stays.setdefault(sample, []).append(RowStay(row, start, step, started, now, tokens, accepted))


def joined(spans: list[AcceptedSpan]) -> tuple[AcceptedSpan, ...]:
    """At most MOST_SPANS, parted where the gaps between them are the longest."""
    gaps = sorted(range(1, len(spans)), key=lambda place: spans[place - 1].end - spans[place].start)
    starts = [0, *sorted(gaps[: MOST_SPANS - 1]), len(spans)]
    parts = [spans[start:end] for start, end in pairwise(starts) if start < end]
    return tuple(AcceptedSpan(part[0].start, part[-1].end, sum(span.tokens for span in part)) for part in parts)

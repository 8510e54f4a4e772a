"""What a step waited for: walked back from its end through the phases of all workers. Pure.

    weights are in the engines <- optimizer <- last backward <- its reward <- its decoding <- ...

A phase began when two things were there: its worker, and its input. Whichever came last is what it waited for, so the
walk goes on there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from infsample_rl.types import Phase, WorkerPhases

# What other workers must have done before a phase can begin.
INPUTS = {
    "reward": ("decode",),
    "reference": ("decode",),
    "forward": ("reward", "reference"),
    "optimizer": ("backward",),
    "learn": ("decode", "backward", "optimizer", "learn"),
    "sync": ("optimizer", "sync", "learn"),
    "decode": ("sync",),
}
WAIT = "wait"  # nobody on the path worked: messages, the driver, back-pressure
CLOCK_S = 0.005  # clocks of two nodes may differ by this much


class Interval(NamedTuple):
    """A worker's phase that is in no other.

    Example: Interval(worker="rollout 0", name="decode", start=1763630000.25, end=1763630001.5)
    """

    worker: str
    name: str
    start: float
    end: float


def outermost(worker: str, phases: Iterable[Phase]) -> list[Interval]:
    """The phases of one worker that lie in no other phase of the same thread."""
    found: list[Interval] = []
    until: dict[int, float] = defaultdict(float)
    for phase in sorted(phases, key=lambda phase: (phase.start, -phase.end)):
        if phase.end > until[phase.thread]:
            until[phase.thread] = phase.end
            found.append(Interval(worker, phase.name, phase.start, phase.end))
    return found


def intervals_of(workers: Iterable[WorkerPhases]) -> list[Interval]:
    """The outermost phases of several workers. Of the driver, whose phases are others' work seen from outside, only its
    own: learn."""
    intervals = []
    for worker in workers:
        own = worker.phases if worker.role != "driver" else [phase for phase in worker.phases if phase.name == "learn"]
        intervals += outermost(f"{worker.role} {worker.index}", own)
    return intervals


def critical_path(intervals: Iterable[Interval], started: float, ended: float) -> list[Interval]:
    """The path through a step of time.time() `started` to `ended`, first to last, without holes: where nobody worked it
    is a "wait".

    Example: decoding 0-6, reward 6-7, forward 8-9, backward 9-9.5, optimizer 9.5-10 -> these five and a wait 7-8.
    """
    inside = [interval for interval in intervals if interval.end > started and interval.start < ended]
    by_worker, by_name = _sorted_by_end(inside, "worker"), _sorted_by_end(inside, "name")
    path: list[Interval] = []
    seen: set[Interval] = set()
    now, found = ended, _latest([sorted(inside, key=lambda interval: interval.end)], ended, seen)
    while found is not None and now > started:
        seen.add(found)
        _wait(path, found.end, now)
        path.append(found._replace(start=max(started, found.start), end=min(now, found.end)))
        now = path[-1].start
        lines = [by_worker[found.worker], *(by_name[name] for name in INPUTS.get(found.name, ()))]
        found = _latest(lines, found.start, seen)
    _wait(path, started, now)
    return path[::-1]


def _sorted_by_end(intervals: list[Interval], field: str) -> dict[str, list[Interval]]:
    sorted_lists: dict[str, list[Interval]] = defaultdict(list)
    for interval in sorted(intervals, key=lambda interval: interval.end):
        sorted_lists[getattr(interval, field)].append(interval)
    return sorted_lists


def _latest(lines: list[list[Interval]], before: float, seen: set[Interval]) -> Interval | None:
    """The interval that ended last of all that had ended `before`, and were not walked through yet."""
    latest: Interval | None = None
    for line in lines:
        at = bisect_right(line, before + CLOCK_S, key=lambda interval: interval.end) - 1
        while at >= 0 and line[at] in seen:
            at -= 1
        if at >= 0 and (latest is None or line[at].end > latest.end):
            latest = line[at]
    return latest


def _wait(path: list[Interval], start: float, end: float) -> None:
    if end > start:
        path.append(Interval("", WAIT, start, end))


def path_line(path: list[Interval]) -> str:
    """A path in one line, shares of the step in the order in which its phases first came.

    Example: "10.0 s: decode 60 % (rollout 0) > reward 10 % > forward 10 % > backward 5 % > optimizer 5 %, wait 10 %"
    """
    seconds: dict[str, float] = defaultdict(float)
    workers: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for interval in path:
        seconds[interval.name] += interval.end - interval.start
        workers[interval.name][interval.worker] += interval.end - interval.start
    whole = sum(seconds.values()) or 1.0
    shares = {name: f"{name} {100 * spent / whole:.0f} %" for name, spent in seconds.items()}
    if "decode" in workers:  # who was slowest is worth a look; of the other roles there are few
        shares["decode"] += f" ({max(workers['decode'], key=workers['decode'].__getitem__)})"
    waited = shares.pop(WAIT, f"{WAIT} 0 %")
    return f"{whole:.1f} s: " + ", ".join(filter(None, [" > ".join(shares.values()), waited]))

"""Who did what when: the phases of all workers become trace.json and one line a step, its critical path. Standard
library only.

Workers are asked for their phases when a step ends and answer while the next one runs, so a step is drawn when the next
one has ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from infsample_rl.observe.critical_path import critical_path, intervals_of, path_line
from infsample_rl.observe.trace import Event, TraceFile
from infsample_rl.types import Phase, WorkerPhases

ROLES = ("driver", "rollout", "reward", "reference", "learner", "colocated")  # in this order they are shown
MOST_WORKERS = 100_000  # of one role: process numbers of the trace are (place of the role) x this + index


class Step(NamedTuple):
    """A step and its time.time(). What comes after it and before the next (evaluation, checkpoint) counts to it in the
    trace."""

    number: int
    started: float
    ended: float


class Timeline:
    """Collects phases, writes trace.json for the last `keep_steps` steps and hands every step's critical path to `say`.

    All of it in a thread of its own, in order: with many workers a step takes a tenth of a second to draw, for which no
    step waits. What first went wrong there is raised by the next call, once.
    """

    def __init__(self, path: Path, *, keep_steps: int, start_step: int, say: Callable[[str], None]) -> None:
        self._trace = TraceFile(path, keep_steps=keep_steps, start_step=start_step)
        self._say = say
        self._steps: list[Step] = []  # the last to be drawn, and those to draw
        self._phases: dict[tuple[str, int], WorkerPhases] = {}  # not drawn yet
        self._thread = ThreadPoolExecutor(1, "timeline")
        self._handed_in: deque[Future[None]] = deque()  # what is not known to have gone well

    def add(self, workers: list[WorkerPhases]) -> None:
        """Phases that have arrived."""
        self._later(self._add, workers)

    def end_step(self, number: int, started: float, ended: float) -> None:
        """A step has ended; the one before, whose phases were asked for when it ended, is drawn. time.time() both."""
        self._later(self._end_step, Step(number, started, ended))

    def flush(self) -> None:
        """Wait until all that was handed in is drawn."""
        while self._handed_in:
            self._handed_in.popleft().result()

    def close(self) -> None:
        """Draw the last step with what is there, and write the file."""
        self._handed_in.append(self._thread.submit(self._close))
        self._thread.shutdown()
        self.flush()

    def _later(self, call: Callable[..., None], *arguments: Any) -> None:
        self._handed_in.append(self._thread.submit(call, *arguments))
        while self._handed_in and self._handed_in[0].done():
            self._handed_in.popleft().result()

    def _add(self, workers: list[WorkerPhases]) -> None:
        for worker in workers:
            key = worker.role, worker.index
            before = self._phases[key].phases if key in self._phases else []
            self._phases[key] = worker._replace(phases=before + worker.phases)
            self._name(worker)

    def _end_step(self, step: Step) -> None:
        before = self._steps[-1:]
        self._steps = [*before, step]
        for ended in before:
            self._draw(ended)

    def _close(self) -> None:
        if self._steps:
            self._draw(self._steps[-1])
        self._trace.write()

    def _draw(self, step: Step) -> None:
        path = critical_path(intervals_of(self._phases.values()), step.started, step.ended)
        self._say(f"step {step.number}: critical path, {path_line(path)}")
        known = self._steps[: self._steps.index(step) + 1]
        ends = [one.ended for one in known]
        events = [_event("driver", 0, Phase(f"step {step.number}", step.started, step.ended, 0), step.number)]
        for key, worker in self._phases.items():
            until = min(worker.until, step.ended)
            drawn = [phase for phase in worker.phases if phase.start < until]
            self._phases[key] = worker._replace(phases=[phase for phase in worker.phases if phase.start >= until])
            for phase in drawn:  # one whose answer came late belongs to an earlier step than is drawn
                number = known[min(bisect_right(ends, phase.start), len(known) - 1)].number
                events.append(_event(worker.role, worker.index, phase, number))
        self._trace.add(sorted(events, key=lambda event: (event["ts"], -event["dur"])))

    def _name(self, worker: WorkerPhases) -> None:
        pid = _pid(worker.role, worker.index)
        title = f"{worker.role} {worker.index}" if worker.role != "driver" else "driver"
        self._trace.name({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"{title} on {worker.node}"}})
        self._trace.name({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})


def _pid(role: str, index: int) -> int:
    return ROLES.index(role) * MOST_WORKERS + index + 1


def _event(role: str, index: int, phase: Phase, step: int) -> Event:
    """A complete event: begin and duration in microseconds."""
    start = round(phase.start * 1e6)
    return {
        "name": phase.name,
        "cat": role,
        "ph": "X",
        "ts": start,
        "dur": round(phase.end * 1e6) - start,
        "pid": _pid(role, index),
        "tid": phase.thread,
        "args": {"step": step},
    }

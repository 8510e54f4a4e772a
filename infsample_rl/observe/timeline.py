"""Who did what when: the phases of all workers as trace.json, in Chrome's Trace Event Format for ui.perfetto.dev.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (JSON array format).
"""

from __future__ import annotations

import contextlib
import json
import time
from bisect import bisect_right
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from infsample_rl.observe.files import write_atomically
from infsample_rl.observe.records import set_aside
from infsample_rl.types import Phase, WorkerPhases

KEPT_STEPS = 20  # of this start of the run, the newest
WRITE_EVERY_S = 10.0  # short steps are written together
ROLES = ("driver", "rollout", "reward", "reference", "learner", "colocated")  # in this order they are shown
MOST_WORKERS = 100_000  # of one role: process numbers of the trace are (place of the role) x this + index + 1


class Step(NamedTuple):
    """A step, and what is between it and the one before: events as lines of JSON."""

    number: int
    ended: float  # time.time()
    events: list[str]


class Timeline:
    """Collects phases and keeps trace.json, which is whole at any moment; a new run sets an older file aside.

    Workers are asked for their phases when a step ends and answer while the next one runs. Events are made and written
    in a thread of their own: with many workers that takes a tenth of a second. What goes wrong there is raised by the
    next call.
    """

    def __init__(self, path: Path, *, start_step: int) -> None:
        if start_step == 0:
            set_aside(path)
        self._path = path
        self._arrived: list[WorkerPhases] = []
        self._steps: deque[Step] = deque(maxlen=KEPT_STEPS)
        self._names: dict[int, str] = {}  # of processes
        self._written_at = 0.0
        self._thread = ThreadPoolExecutor(1, "timeline")
        self._drawing: Future[None] = self._thread.submit(lambda: None)

    def add(self, workers: list[WorkerPhases]) -> None:
        """Phases that have arrived, to be drawn when the step ends."""
        self._arrived += workers

    def end_step(self, number: int, started: float, ended: float) -> None:
        """A step has ended; time.time() both."""
        self._drawing.result()  # of the step before
        whole = _event("driver", 0, Phase(f"step {number}", started, ended, 0), number)
        self._steps.append(Step(number, ended, [whole]))
        self._drawing = self._thread.submit(self._draw, self._arrived)
        self._arrived = []

    def close(self) -> None:
        """Draw what has arrived since the last step, and write the file."""
        self._drawing.result()
        self._thread.shutdown()
        self._written_at = 0.0
        self._draw(self._arrived)

    def _draw(self, workers: list[WorkerPhases]) -> None:
        ends = [step.ended for step in self._steps]
        for worker in workers if ends else ():
            title = worker.role if worker.role == "driver" else f"{worker.role} {worker.index}"
            self._names[_pid(worker.role, worker.index)] = f"{title} on {worker.node}"
            for phase in worker.phases:
                step = self._steps[min(bisect_right(ends, phase.start), len(ends) - 1)]
                step.events.append(_event(worker.role, worker.index, phase, step.number))
        if ends and time.monotonic() - self._written_at >= WRITE_EVERY_S:
            self._written_at = time.monotonic()
            lines = [line for pid, name in self._names.items() for line in _named(pid, name)]
            lines += [line for step in self._steps for line in step.events]
            with contextlib.suppress(OSError):  # a full disk: the checkpoint's warning tells of it
                write_atomically(self._path, "[\n" + ",\n".join(lines) + "\n]\n")


def _pid(role: str, index: int) -> int:
    return ROLES.index(role) * MOST_WORKERS + index + 1


def _named(pid: int, name: str) -> list[str]:
    """Metadata events: a process's name and its place among the others."""
    kinds: dict[str, dict[str, Any]] = {"process_name": {"name": name}, "process_sort_index": {"sort_index": pid}}
    return [json.dumps({"name": kind, "ph": "M", "pid": pid, "args": args}) for kind, args in kinds.items()]


def _event(role: str, index: int, phase: Phase, step: int) -> str:
    """A complete event: begin and duration in microseconds."""
    start, end = round(phase.start * 1e6), round(phase.end * 1e6)
    times = {"ts": start, "dur": end - start, "pid": _pid(role, index), "tid": phase.thread}
    return json.dumps({"name": phase.name, "cat": role, "ph": "X", **times, "args": {"step": step}})

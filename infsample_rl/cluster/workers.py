"""The workers of a run as handles, by role and index; a lost one is replaced under its index, so often and no more."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray

LONGEST_PAUSE_S = 30.0  # before a restart

Handle = Any  # of a Ray actor


class WorkerLost(RuntimeError):
    """The process of one worker is gone, or no longer answers: "rollout worker 1: its process died"."""

    def __init__(self, role: str, index: int, reason: str) -> None:
        super().__init__(f"{worker_name(role, index)}: {reason}")
        self.role, self.index, self.reason = role, index, reason


class EngineLost(WorkerLost):
    """Its process lives, but what samples in it cannot go on."""


class StepLost(RuntimeError):
    """The unfinished step cannot be ended, as with a lost learner rank: the run goes back to its last checkpoint."""


def worker_name(role: str, index: int) -> str:
    """Example: worker_name("learner", 0) -> "learner rank 0", worker_name("reward", 1) -> "reward worker 1" """
    return f"{role} rank {index}" if role == "learner" else f"{role} worker {index}"


class Restarts:
    """Counts restarts: at most `limit` of a part between two steps that the run had not finished before, with pauses
    that double from the second on. Each part counts for itself: a node that is lost takes many with it."""

    def __init__(
        self,
        limit: int,
        note: Callable[[str], None],
        sleep: Callable[[float], None],
        explain: Callable[[str], str],
    ) -> None:
        """`explain`: adds to what is said of a lost worker what is known beside."""
        self._explain = explain
        self.total = 0  # since this start of the run
        self._limit, self._note, self._sleep = limit, note, sleep
        self._in_a_row = Counter[str]()

    def begin(self, who: str, reason: str) -> None:
        """Say that `who` is started again, and wait for its turn. RuntimeError when there were too many."""
        said = self._explain(f"{who}: {reason}")
        before = self._in_a_row[who]
        if before >= self._limit:
            raise RuntimeError(
                f"{said}; cluster.max_restarts={self._limit}: {before} restarts since the run last finished a new step "
                "are enough"
            )
        self._in_a_row[who] += 1
        self.total += 1
        pause = 0.0 if before == 0 else min(LONGEST_PAUSE_S, 0.5 * 2.0 ** (before - 1))
        after = f" after {pause:g} s" if pause else ""
        self._note(
            f"{said}; started again{after} (restart {before + 1} of at most {self._limit} before a step is finished)"
        )
        self._sleep(pause)

    def step_finished(self) -> None:
        """A step has ended that the run had not finished before: what failed until then no longer counts."""
        self._in_a_row.clear()


class Workers:
    """All of them. `begin(role, index)` starts one without waiting for it: its handle, and a reference that is there
    once it has started or has failed to."""

    def __init__(self, begin: Callable[[str, int], tuple[Handle, ray.ObjectRef]], restarts: Restarts) -> None:
        self._begin, self.restarts = begin, restarts
        self._handles: dict[str, dict[int, Handle]] = {}
        self._answers: dict[tuple[str, int], ray.ObjectRef | None] = {}  # None: it was there
        self._added: dict[tuple[str, int], float] = {}  # when, time.monotonic()
        self._shared: dict[str, str] = {}  # role -> the one whose workers do its calls

    def start(self, role: str, count: int) -> None:
        """Start workers 0 to count - 1 of a role."""
        self._handles[role] = {}
        for index in range(count):
            self.add(role, index)

    def add(self, role: str, index: int) -> Handle:
        """Start one worker."""
        self._added[role, index] = time.monotonic()
        self._handles[role][index], self._answers[role, index] = self._begin(role, index)
        return self._handles[role][index]

    def share(self, role: str, other: str) -> None:
        """The workers of `role` do the calls of `other` too."""
        self._handles[other], self._shared[other] = self._handles[role], role

    def all(self, role: str) -> dict[int, Handle]:
        """Handles by index, also of those that are still starting."""
        return self._handles.get(role, {})

    def has_started(self, role: str, index: int) -> bool:
        """Whether a worker answers, or has failed to start: it no longer waits for a place or loads what it needs."""
        key = self._shared.get(role, role), index
        answer = self._answers[key]
        if answer is not None and ray.wait([answer], timeout=0)[0]:
            self._answers[key] = None  # looked at once: every version of the weights asks for every worker
        return self._answers[key] is None

    def starting_s(self, role: str, index: int) -> float:
        """Since when a worker that has not started should have, in seconds."""
        return time.monotonic() - self._added[role, index]

    def still_has_no_place(self, role: str, index: int) -> None:
        """Its time to start begins now."""
        self._added[role, index] = time.monotonic()

    def is_current(self, role: str, index: int, handle: Handle) -> bool:
        """Whether a handle has not been replaced."""
        return self._handles[role].get(index) is handle

    def replace(self, lost: WorkerLost) -> Handle:
        """Another worker in place of one that is gone, once it is its turn. RuntimeError when there were too many."""
        self.restarts.begin(worker_name(lost.role, lost.index), lost.reason)
        ray.kill(self._handles[lost.role][lost.index])
        return self.add(lost.role, lost.index)

    def replace_all(self, role: str, reason: str) -> None:
        """Kill every worker of a role, and start as many."""
        self.restarts.begin("the learner" if role == "learner" else f"all {role} workers", reason)
        for handle in self._handles[role].values():
            ray.kill(handle)
        for index in self._handles[role]:
            self.add(role, index)

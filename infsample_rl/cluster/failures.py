"""What may be lost while a run goes on, and how often it is brought back. No Ray here: cluster.py finds out, driver.py
decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

LONGEST_PAUSE_S = 30.0


class WorkerLost(RuntimeError):
    """The process of one worker is gone, or no longer answers: "rollout worker 1: its process died"."""

    def __init__(self, role: str, index: int, reason: str) -> None:
        super().__init__(f"{worker_name(role, index)}: {reason}")
        self.role, self.index, self.reason = role, index, reason


class StepLost(RuntimeError):
    """The unfinished step cannot be ended: a learner rank is gone, or something the learner needs. The run goes back to
    its last checkpoint."""


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
        explain: Callable[[str], str] = lambda text: text,
    ) -> None:
        """`explain`: adds to what is said of a lost worker what is known beside."""
        self._explain = explain
        self.by_part: dict[str, int] = {}  # of the run
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
        self.by_part[who] = self.by_part.get(who, 0) + 1
        pause = 0.0 if before == 0 else min(LONGEST_PAUSE_S, 0.5 * 2.0 ** (before - 1))
        after = f" after {pause:g} s" if pause else ""
        self._note(
            f"{said}; started again{after} (restart {before + 1} of at most {self._limit} before a step is finished)"
        )
        self._sleep(pause)

    @property
    def total(self) -> int:
        """Restarts of the run."""
        return sum(self.by_part.values())

    def step_finished(self) -> None:
        """A step has ended that the run had not finished before: what failed until then no longer counts."""
        self._in_a_row.clear()

"""Who of those that are waited for still moves, and what is said of one that does not."""

from __future__ import annotations

import time
from typing import NamedTuple

from infsample_rl.cluster.arrivals import PendingCall, Return, Stream
from infsample_rl.cluster.calls import POLL_S, SHOWN, Calls, Requests, standing
from infsample_rl.cluster.workers import Handle, worker_name
from infsample_rl.config import Config

Worker = tuple[str, int]  # role and index of a process


class Waited(NamedTuple):
    """A worker that is waited for."""

    handle: Handle
    idle_s: float  # since it moved, or was first waited for
    limit_s: float


class Watchdog:
    """Of one wait. Each worker has a time of its own: that it moves is shown by its answers and by its progress(),
    which grows within a call. One that has not started has `cluster.start_timeout_s`."""

    def __init__(self, config: Config, calls: Calls) -> None:
        self._config, self._note, self._has_started = config, calls.note, calls.workers.has_started
        self._began = self._looked = self._last_move = time.monotonic()
        self._moved: dict[Worker, float] = {}  # when
        self._starting: set[Worker] = set()  # at the last look
        self._questions = Requests(lambda handle: handle.progress.remote())
        self._standings = Requests(lambda handle: handle.status.remote())
        self._late: set[Worker] = set()  # at the last look
        self._asked: dict[Handle, Worker] = {}
        self._progress: dict[Handle, int] = {}
        # Often enough that a worker which still works has been asked, and has answered, well within its limit.
        self._every_s = min(POLL_S, config.cluster.progress_timeout_s / 3)

    def moved(self, role: str, index: int) -> None:
        """Something of this worker has arrived."""
        self._moved[self._process(role, index)] = self._last_move = time.monotonic()

    def _process(self, role: str, index: int) -> Worker:
        """A process that samples and learns by turns is one."""
        return ("learner" if self._config.shares_process and role == "rollout" else role), index

    def silent(self, in_flight: list[Stream | PendingCall | Return]) -> dict[Worker, str]:
        """Workers that have to be given up, and why; before, it is said who has not moved."""
        now = time.monotonic()
        if now - self._looked < self._every_s:
            return {}
        if now - self._looked > 2 * self._every_s + POLL_S:
            self._began = now  # this process itself was stopped, or busy: it has not seen who moved
        self._looked = now
        self._hear()
        waited = self._waited(now, in_flight)
        self._say(waited)
        quiet = {item.handle: worker for worker, item in waited.items() if item.idle_s >= self._every_s}
        self._asked |= quiet
        self._questions.ask(quiet)
        return self._give_up({worker: item for worker, item in waited.items() if item.idle_s > item.limit_s})

    def _waited(self, now: float, in_flight: list[Stream | PendingCall | Return]) -> dict[Worker, Waited]:
        cluster, found = self._config.cluster, dict[Worker, Waited]()
        for item in in_flight:
            worker, limit_s = self._process(item.role, item.index), cluster.progress_timeout_s
            if not self._has_started(item.role, item.index):  # it waits for its place, or loads what it needs
                limit_s = max(limit_s, cluster.start_timeout_s)
                self._starting.add(worker)
            elif worker in self._starting:
                self._starting.remove(worker)
                self.moved(item.role, item.index)
            if item.role == "reward":
                limit_s += self._config.reward.timeout_s  # a function call may take it all
            elif item.role == "rollout" and self._config.environment.is_set:
                limit_s += self._config.environment.timeout_s  # so may a call that all samples left wait for
            # One on its way to the weights waits for its place, or for a learner that has rows to do: while anything
            # moves, so may it.
            asked = max(item.since, self._last_move) if isinstance(item, Return) else item.since
            idle_s = now - max(asked, self._began, self._moved.get(worker, 0.0))
            before = found.get(worker, Waited(item.handle, idle_s, limit_s))
            found[worker] = Waited(item.handle, max(idle_s, before.idle_s), max(limit_s, before.limit_s))
        return found

    def _say(self, waited: dict[Worker, Waited]) -> None:
        """Name who has used up half of its time; everybody, when nothing moves at all."""
        nothing_moves = all(item.idle_s > 1.5 * POLL_S for item in waited.values())
        quiet = [
            f"{worker_name(*worker)} has not moved for {item.idle_s:.0f} s"
            for worker, item in waited.items()
            if nothing_moves or item.idle_s > item.limit_s / 2
        ]
        if quiet:
            more = f" and {len(quiet) - SHOWN} more" if len(quiet) > SHOWN else ""
            self._note(f"waiting: {', '.join(quiet[:SHOWN])}{more}")

    def _hear(self) -> None:
        """Progress of those that have answered since the last look."""
        for handle, progress in self._questions.take().items():
            if self._progress.get(handle) != progress:
                self.moved(*self._asked[handle])
            self._progress[handle] = progress

    def _give_up(self, late: dict[Worker, Waited]) -> dict[Worker, str]:
        """Those that were late at the last look already, and so had the time to say where they stand: nobody waits."""
        said, given_up = self._standings.take(), dict[Worker, str]()
        for worker in self._late & late.keys():
            item = late[worker]
            given_up[worker] = (
                f"it has not moved for {item.idle_s:.0f} s "
                f"(cluster.progress_timeout_s={self._config.cluster.progress_timeout_s:g})"
            )
            self._note(f"{worker_name(*worker)}: {given_up[worker]}; {standing(said.get(item.handle))}")
        self._late = late.keys() - given_up.keys()
        self._standings.ask(late[worker].handle for worker in self._late)
        return given_up

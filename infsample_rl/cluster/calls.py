"""Calls on workers: asked with a deadline, waited for in words, and which failure it is when no value comes."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray

from infsample_rl.cluster.interruption import SLICE_S, Interruption
from infsample_rl.cluster.observed import status_of
from infsample_rl.cluster.out_of_memory import is_out_of_memory
from infsample_rl.cluster.workers import EngineLost, Handle, StepLost, WorkerLost, Workers, worker_name
from infsample_rl.types import EngineFailed, WorkerStatus

POLL_S = 10.0  # how long one wait lasts before it is said what is waited for
SHOWN = 8  # workers named in a line
# What gloo and NCCL say on a rank that waits in a collective to which another does not come.
COLLECTIVE_TIMED_OUT = re.compile(r"Timed out waiting \d+ ?ms|collective operation timeout")
NOT_STARTED = "it could not be started"  # in the reason of a worker whose constructor raised


class PayloadLost(RuntimeError):
    """What a call needed, or gave, was in the object store of a node that is gone."""


class Patience:
    """How long a wait has lasted; it is said every POLL_S what is waited for."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._since, self._said = note, time.monotonic(), time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._since

    def say(self, what: str) -> None:
        """Note what is waited for, if it is time."""
        if time.monotonic() - self._said >= POLL_S:
            self._said = time.monotonic()
            self._note(f"still waiting for {what} ({self.idle_s:.0f} s)")


class Requests:
    """Asks workers something without waiting for them. `question`: of a worker, the reference of its answer."""

    def __init__(self, question: Callable[[Handle], ray.ObjectRef]) -> None:
        self._question = question
        self._asked: dict[ray.ObjectRef, Handle] = {}  # answer to come -> worker

    def ask(self, workers: Iterable[Handle]) -> None:
        """Ask every worker that has answered the question before."""
        waiting = set(self._asked.values())
        self._asked |= {self._question(worker): worker for worker in workers if worker not in waiting}

    def take(self, wait_s: float = 0.0) -> dict[Handle, Any]:
        """Answers that are there within `wait_s` seconds; a worker that died has none."""
        ready = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=wait_s)[0] if self._asked else []
        opened, answers = open_at_once(ready), dict[Handle, Any]()
        for ref in ready:
            worker = self._asked.pop(ref)
            with contextlib.suppress(ray.exceptions.RayError):
                answers[worker] = opened[ref] if opened else ray.get(ref)
        return answers


class Calls:
    """Calls of which all answers are needed."""

    def __init__(self, workers: Workers, note: Callable[[str], None], interruption: Interruption) -> None:
        self.workers, self.note, self.interruption = workers, note, interruption
        self.waited_s = 0.0  # in which the driver waited for something to arrive, here and in traffic.py

    def wait(self, refs: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        """As ray.wait, timed."""
        started = time.monotonic()
        try:
            return ray.wait(refs, **options)
        finally:
            self.waited_s += time.monotonic() - started

    def ask(
        self,
        role: str,
        what: str,
        call: Callable[[Handle], ray.ObjectRef],
        timeout_s: float,
        *,
        only: list[int] | None = None,
    ) -> list[Any]:
        """Answers of all workers of a role, or of those in `only`, in their order. Raises as gather()."""
        handles = self.workers.all(role)
        return self.gather({call(handles[index]): (role, index) for index in only or sorted(handles)}, what, timeout_s)

    def gather(self, calls: dict[ray.ObjectRef, tuple[str, int]], what: str, timeout_s: float) -> list[Any]:
        """All answers, in order, of calls by role and index of the worker; says what is waited for.

        WorkerLost, for the learner StepLost, when a worker is gone or has not answered after `timeout_s`; Terminated
        after SIGTERM; what a worker raised, as ValueError or RuntimeError.
        """
        patience, pending, answers = Patience(self.note), list(calls), dict[ray.ObjectRef, Any]()
        while pending:
            self.interruption.check()
            ready, pending = self.wait(pending, num_returns=len(pending), timeout=SLICE_S)
            opened = open_at_once(ready)
            for ref in ready:
                answers[ref] = self._value(ref, *calls[ref], opened)
            if pending and patience.idle_s > timeout_s:
                self._give_up(what, [calls[ref] for ref in pending], timeout_s)
            if pending:
                patience.say(f"{what}: {', '.join(worker_name(*calls[ref]) for ref in pending[:SHOWN])}")
        return [answers[ref] for ref in calls]

    def _give_up(self, what: str, silent: list[tuple[str, int]], timeout_s: float) -> None:
        for role, index in silent:
            where = standing(status_of(self.workers.all(role)[index]))
            self.note(f"{what}: {worker_name(role, index)} has not answered within {timeout_s:g} s; {where}")
        lost = WorkerLost(*silent[0], f"{what}: no answer within {timeout_s:g} s")
        raise StepLost(str(lost)) if lost.role == "learner" else lost

    def _value(self, ref: ray.ObjectRef, role: str, index: int, opened: dict[ray.ObjectRef, Any]) -> Any:
        try:
            return value_of(ref, role, index, opened)
        except RuntimeError as error:
            if role == "learner":
                raise self.learner_failure(error) from error
            if isinstance(error, WorkerLost):
                raise
            if gone := self.first_gone("learner"):  # which gives them what they load
                raise StepLost(f"{gone}, and so {error}") from error
            if isinstance(error, PayloadLost):
                raise
            raise self.first_gone(role) or error from error  # a link that one member has left fails on all

    def first_gone(self, role: str) -> WorkerLost | None:
        """The first worker of a role that has started and does not answer."""
        for index, handle in self.workers.all(role).items():
            if self.workers.has_started(role, index) and status_of(handle) is None:
                return WorkerLost(role, index, "its process died")
        return None

    def learner_failure(self, error: Exception) -> Exception:
        """What a failed call of the learner means: StepLost when a rank is gone or hangs, else the error."""
        if isinstance(error, (WorkerLost, PayloadLost)):
            return StepLost(str(error))
        ranks = self.workers.all("learner").items()
        if gone := [worker_name("learner", index) for index, handle in ranks if status_of(handle) is None]:
            return StepLost(f"{', '.join(gone)}: gone, and so {error}")
        if COLLECTIVE_TIMED_OUT.search(str(error)):
            return StepLost(f"a learner rank hangs, and so within half of cluster.progress_timeout_s {error}")
        return error


def open_at_once(refs: list[ray.ObjectRef]) -> dict[ray.ObjectRef, Any]:
    """Values of calls that have ended, fetched in one request. Empty when one failed: value_of then tells which."""
    try:
        return dict(zip(refs, ray.get(refs), strict=True)) if refs else {}
    except ray.exceptions.RayError:
        return {}


def value_of(ref: ray.ObjectRef, role: str, index: int, opened: dict[ray.ObjectRef, Any] | None = None) -> Any:
    """The value of a call on a worker, `opened` or still to be fetched.

    WorkerLost when its process, or its engine, is gone, PayloadLost when the data is; ValueError, RuntimeError for what
    it raised."""
    if opened and ref in opened:
        return opened[ref]
    who = worker_name(role, index)
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        # RayActorError: the process that was to send an argument died before it had, in a stream between a header and
        # its payload
        lost = (ray.exceptions.ObjectLostError, ray.exceptions.OwnerDiedError, ray.exceptions.RayActorError)
        if isinstance(cause, lost):
            raise PayloadLost(f"{who}: {cause}") from error
        if isinstance(cause, EngineFailed):
            raise EngineLost(role, index, str(cause)) from error
        kind = ValueError if isinstance(cause, ValueError) else RuntimeError
        raise kind(f"{who}: {what_was_raised(cause)}") from error
    except ray.exceptions.RayActorError as error:  # died, or cannot be reached: to the run it is the same
        refused = re.findall(r"^ValueError: (.+)$", str(error), re.MULTILINE)  # raised where the worker was constructed
        if refused:
            raise ValueError(f"{who}: {refused[-1]}") from error
        raise WorkerLost(role, index, _in_short(error)) from error
    except ray.exceptions.ObjectLostError as error:
        raise PayloadLost(f"{who}: {error}") from error
    except ray.exceptions.OutOfMemoryError as error:
        reason = "its process died (Ray's memory monitor ended it: the node ran low on memory)"
        raise WorkerLost(role, index, reason) from error
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"{who}: {type(error).__name__}: {error}") from error


def what_was_raised(cause: Exception) -> str:
    """What a worker raised; of memory that was not there also in which phase (phases.py notes it)."""
    text = str(cause) or type(cause).__name__  # a MemoryError of Python's own has no text
    notes = cause.__dict__.get("__notes__", [])
    return "; ".join([text, *notes[:1]]) if isinstance(cause, MemoryError) or is_out_of_memory(text) else text


def _in_short(error: Exception) -> str:
    """Ray's reason without what it advises: "its process died (Worker exit type: SYSTEM_ERROR)"."""
    text = " ".join(str(error).split())
    if "creation task" in text:
        return f"{NOT_STARTED}: {str(error).strip().splitlines()[-1].strip()}"
    known = re.search(
        r"low on memory|Worker exit type: \w+|actor's node was terminated|node has (?:died|been marked dead)[^.]*", text
    )
    return f"its process died ({known[0] if known else text[:160]})"


def standing(status: WorkerStatus | None) -> str:
    """Where a worker stands, in words, for a log; None: it has not answered."""
    if status is None:
        return "its process does not answer"
    return (
        f"in phase {status.phase} for {status.phase_s:.0f} s, process {status.pid} on {status.node}; last log line: "
        f"{status.last_line or 'none'}; its threads:\n{status.stack or 'none is in this package'}"
    )

"""What a reference of a worker's call holds, and which failure it is when it holds none."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import ray

from infsample_rl.cluster.failures import StepLost, WorkerLost, worker_name
from infsample_rl.cluster.out_of_memory import is_out_of_memory
from infsample_rl.types import WorkerStatus

POLL_S = 10.0  # how long one wait lasts before it is said what is waited for
SLICE_S = 0.5  # how long a wait lasts before it is looked whether the run is to stop
# What gloo and NCCL say on a rank that waits in a collective to which another does not come.
COLLECTIVE_TIMED_OUT = re.compile(r"Timed out waiting \d+ ?ms|collective operation timeout")
NOT_STARTED = "it could not be started"  # in the reason of a worker whose constructor raised
ANSWER_S = 10.0  # a process that has not answered status() for so long is taken as gone


class PayloadLost(RuntimeError):
    """What a call needed, or gave, was in the object store of a node that is gone."""


def open_at_once(refs: list[ray.ObjectRef]) -> dict[ray.ObjectRef, Any]:
    """Values of calls that have ended, fetched in one request. Empty when one of them failed: value_of then tells
    which, and why."""
    try:
        return dict(zip(refs, ray.get(refs), strict=True)) if refs else {}
    except ray.exceptions.RayError:
        return {}


def value_of(ref: ray.ObjectRef, role: str, index: int, opened: dict[ray.ObjectRef, Any] | None = None) -> Any:
    """The value of a call on a worker, `opened` or still to be fetched.

    WorkerLost when its process is gone, PayloadLost when the data is; ValueError for a setting it refused; RuntimeError
    for what it raised.
    """
    if opened and ref in opened:
        return opened[ref]
    who = worker_name(role, index)
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        # RayActorError: the process that was to send an argument died before it had, in a stream between a header and
        # its payload
        if isinstance(
            cause, (ray.exceptions.ObjectLostError, ray.exceptions.OwnerDiedError, ray.exceptions.RayActorError)
        ):
            raise PayloadLost(f"{who}: {cause}") from error
        kind = ValueError if isinstance(cause, ValueError) else RuntimeError
        raise kind(f"{who}: {_said(cause)}") from error
    except ray.exceptions.RayActorError as error:  # died, or cannot be reached: to the run it is the same
        refused = re.findall(r"^ValueError: (.+)$", str(error), re.MULTILINE)  # raised where the worker was constructed
        if refused:
            raise ValueError(f"{who}: {refused[-1]}") from error
        raise WorkerLost(role, index, _in_short(error)) from error
    except ray.exceptions.ObjectLostError as error:
        raise PayloadLost(f"{who}: {error}") from error
    except ray.exceptions.OutOfMemoryError as error:
        raise WorkerLost(
            role, index, "its process died (Ray's memory monitor ended it: the node ran low on memory)"
        ) from error
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"{who}: {type(error).__name__}: {error}") from error


def _said(cause: Exception) -> str:
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


def status_of(handle: Any, seconds: float = ANSWER_S) -> WorkerStatus | None:
    """What a worker says of itself; None when it is gone or does not answer in time."""
    try:
        return ray.get(handle.status.remote(), timeout=seconds)
    except ray.exceptions.RayError:
        return None


class Waiting:
    """ray.wait, timed: how long the driver has waited for something to arrive."""

    seconds = 0.0

    def wait(self, refs: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        """As ray.wait."""
        started = time.monotonic()
        try:
            return ray.wait(refs, **options)
        finally:
            self.seconds += time.monotonic() - started


class Patience:
    """How long a wait may last without progress, and that it is said what is waited for."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self.moved()

    def moved(self) -> None:
        """Something has happened."""
        self._since = self._said = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since anything happened."""
        return time.monotonic() - self._since

    def say(self, what: str) -> bool:
        """Note what is waited for, every POLL_S. Whether it was said now."""
        if time.monotonic() - self._said < POLL_S:
            return False
        self._said = time.monotonic()
        self._note(f"still waiting for {what} ({self.idle_s:.0f} s)")
        return True


def learner_failure(ranks: dict[int, Any], error: Exception) -> Exception:
    """What a failed call of the learner means: StepLost when a rank is gone (the others then fail in their collectives)
    or hangs, else the error."""
    gone = [worker_name("learner", index) for index, handle in ranks.items() if status_of(handle) is None]
    if isinstance(error, WorkerLost):
        return StepLost(str(error))
    if gone:
        return StepLost(f"{', '.join(gone)}: gone, and so {error}")
    hangs = COLLECTIVE_TIMED_OUT.search(str(error)) is not None
    return (
        StepLost(f"a learner rank hangs, and so within half of cluster.progress_timeout_s {error}") if hangs else error
    )


def standing(status: WorkerStatus | None) -> str:
    """Where a worker stands, in words, for a log; None: it has not answered."""
    if status is None:
        return "its process does not answer"
    where = f"in phase {status.phase} for {status.phase_s:.0f} s, process {status.pid} on {status.node}"
    return (
        f"{where}; last log line: {status.last_line or 'none'}; its "
        f"threads:\n{status.stack or 'none is in this package'}"
    )

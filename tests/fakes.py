"""What stands for Ray, its workers and what they send, written once: `from tests.fakes import Method, Handle, ...`."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from infsample_rl.cluster.workers import Restarts, Workers
from infsample_rl.types import (
    Completion,
    MicroGroupHeader,
    RewardResult,
    RolloutWork,
    StreamEnd,
    WorkerPhases,
    WorkerStatus,
)
from tests.tiny_models import finished

DIED = ray.exceptions.RayActorError()  # what a call on a dead worker gives
NODE_GONE = ray.exceptions.ObjectLostError("ab", None, "")  # what a reference gives whose node is gone

STATUS = WorkerStatus(pid=7, node="here", phase="decode", phase_s=1.0, last_line="", stack="")


def raised(error: Exception) -> Exception:
    """What a call gives in which a worker raised this."""
    return ray.exceptions.RayTaskError("call", "", error)


class Ref:
    """A reference: what it holds, an exception is raised where it is opened, and whether that is there yet."""

    def __init__(self, value: Any = None, *, is_there: bool = True):
        self.value, self.is_there = value, is_there


class Items:
    """A stream of references, as a streaming generator of Ray."""

    def __init__(self, values: list[Any], *, is_there: bool = True):
        self._refs, self.is_there = [Ref(value) for value in values], is_there

    def __next__(self) -> Ref:
        if not self._refs:
            raise StopIteration
        return self._refs.pop(0)


class Method:
    """A method of an actor: takes down its arguments, and gives `answers`, the last of them for all calls that follow.

    An answer is a value, an exception, a Ref, a stream's Items, or a function of the arguments that returns such.
    """

    def __init__(self, *answers: Any):
        self.calls, self._answers, self._num_returns = list[tuple](), list(answers), 1

    def options(self, num_returns: int | str = 1, **_: Any) -> Method:
        self._num_returns = num_returns
        return self

    def remote(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        value = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if callable(value):
            value = value(*arguments)
        if isinstance(value, (Ref, Items)):
            return value
        if self._num_returns == "streaming":
            return Items(value)
        return Ref(value) if self._num_returns == 1 else [Ref(item) for item in value]


class Handle(SimpleNamespace):
    """A worker's handle with these methods; it has started and answers, unless told otherwise."""

    def __init__(self, **methods: Any):
        living = {"status": Method(STATUS), "progress": Method(0), "started": Ref()}
        super().__init__(**living | methods)

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class FakeRay:
    """Takes the place of ray.get, ray.wait and ray.kill."""

    def __init__(self, monkeypatch: Any):
        self.killed: list[Handle] = []
        for name, function in (("get", self._get), ("wait", self._wait), ("kill", self.killed.append)):
            monkeypatch.setattr(ray, name, function)

    def _get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [self._get(ref) for ref in refs]
        if not refs.is_there:
            raise ray.exceptions.GetTimeoutError
        if isinstance(refs.value, Exception):
            raise refs.value
        return refs.value

    def _wait(self, refs: list[Any], num_returns: int = 1, timeout: float = 0.0, **_: Any) -> tuple[list, list]:
        ready = [ref for ref in refs if ref.is_there][:num_returns]
        if not ready:
            time.sleep(min(timeout, 0.01))
        return ready, [ref for ref in refs if ref not in ready]


def make_workers(note: Any = print, spares: Any = (), **roles: list[Handle]) -> Workers:
    """Workers of these handles by role; those that are started later are the `spares`, in their order."""
    handles = {(role, index): handle for role, found in roles.items() for index, handle in enumerate(found)}
    later = iter(spares)

    def begin(role: str, index: int) -> tuple[Handle, Ref]:
        handle = handles.pop((role, index), None) or next(later)
        return handle, handle.started

    workers = Workers(begin, Restarts(8, note, lambda seconds: None, str))
    for role, found in roles.items():
        workers.start(role, len(found))
    return workers


def work(prompt_index: int, samples: list[int]) -> RolloutWork:
    """Samples of a prompt of one token."""
    return RolloutWork(prompt_index=prompt_index, prompt_ids=np.zeros(1, np.int32), sample_indices=samples)


def completion(prompt_index: int, sample_index: int, tokens: int = 3) -> Completion:
    """A sample of so many tokens, all of its index."""
    return finished(prompt_index, sample_index, [sample_index] * tokens, -0.5)


def header(prompt_index: int, samples: list[int], **more: Any) -> MicroGroupHeader:
    """Of a micro-group of such completions."""
    count = len(samples)
    known = {"lengths": [3] * count, "finish_reasons": ["stop"] * count, "policy_version": 0, "finished_at": 1.0}
    return MicroGroupHeader(prompt_index=prompt_index, sample_indices=samples, **known | more)


def rewarded(*rewards: float | None, **components: list[float | None]) -> RewardResult:
    """What a reward worker says of a micro-group."""
    return RewardResult(rewards=list(rewards), components=components, failures=[], started_at=0.5, finished_at=0.6)


def stream_end(worker: int = 0) -> StreamEnd:
    """The last item of a rollout worker's stream."""
    return StreamEnd(worker=worker, stats={}, phases=WorkerPhases("rollout", worker, "here", []))

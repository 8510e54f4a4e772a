"""Calls on workers of which all answers are needed: asked with a deadline, waited for in words, failures told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from infsample_rl.cluster.calls import (
    SLICE_S,
    Patience,
    PayloadLost,
    Waiting,
    learner_failure,
    open_at_once,
    standing,
    status_of,
    value_of,
)
from infsample_rl.cluster.failures import StepLost, WorkerLost, worker_name
from infsample_rl.cluster.interruption import Interruption
from infsample_rl.cluster.workers import Crew, Handle

Calls = dict[ray.ObjectRef, tuple[str, int]]  # result -> role and index of the worker
SHOWN = 8  # workers named in a line


class Asking:
    """Asks the workers of a crew."""

    def __init__(self, crew: Crew, note: Callable[[str], None], interruption: Interruption, waiting: Waiting) -> None:
        self._crew, self._note, self._interruption, self._waiting = crew, note, interruption, waiting

    def ask(
        self,
        role: str,
        what: str,
        call: Callable[[Handle], ray.ObjectRef],
        timeout_s: float,
        *,
        only: list[int] | None = None,
    ) -> list[Any]:
        """Answers of all workers of a role, or of those in `only`, in their order."""
        handles = self._crew.all(role)
        return self.gather({call(handles[index]): (role, index) for index in only or sorted(handles)}, what, timeout_s)

    def gather(self, calls: Calls, what: str, timeout_s: float) -> list[Any]:
        """All results, in order; says what is waited for.

        WorkerLost, for the learner StepLost, when a worker is gone or has not answered after `timeout_s`; Terminated
        after SIGTERM; what a worker raised, as ValueError or RuntimeError.
        """
        patience, pending, answers = Patience(self._note), list(calls), dict[ray.ObjectRef, Any]()
        while pending:
            self._interruption.check()
            ready, pending = self._waiting.wait(pending, num_returns=len(pending), timeout=SLICE_S)
            opened = open_at_once(ready)
            for ref in ready:
                answers[ref] = self._value(ref, *calls[ref], opened)
            if pending and patience.idle_s > timeout_s:
                self._give_up(what, [calls[ref] for ref in pending], timeout_s)
            if pending:
                names = [worker_name(*calls[ref]) for ref in pending[:SHOWN]]
                patience.say(f"{what}: {', '.join(names)}")
        return [answers[ref] for ref in calls]

    def _give_up(self, what: str, silent: list[tuple[str, int]], timeout_s: float) -> None:
        for role, index in silent:
            where = standing(status_of(self._crew.all(role)[index]))
            self._note(f"{what}: {worker_name(role, index)} has not answered within {timeout_s:g} s; {where}")
        role, index = silent[0]
        reason = f"{what}: no answer within {timeout_s:g} s"
        raise (
            StepLost(f"{worker_name(role, index)}: {reason}") if role == "learner" else WorkerLost(role, index, reason)
        )

    def _value(self, ref: ray.ObjectRef, role: str, index: int, opened: dict[ray.ObjectRef, Any]) -> Any:
        try:
            return value_of(ref, role, index, opened)
        except RuntimeError as error:
            if role == "learner":
                raise learner_failure(self._crew.all("learner"), error) from error
            if isinstance(error, WorkerLost):
                raise
            if gone := self.first_gone("learner"):  # which gives them what they load
                raise StepLost(f"{gone}, and so {error}") from error
            if isinstance(error, PayloadLost):
                raise
            raise self.first_gone(role) or error from error  # a link that one member has left fails on all

    def first_gone(self, role: str) -> WorkerLost | None:
        """The first worker of a role that has started and does not answer."""
        for index, handle in self._crew.all(role).items():
            if self._crew.has_started(role, index) and status_of(handle) is None:
                return WorkerLost(role, index, "its process died")
        return None

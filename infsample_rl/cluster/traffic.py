"""Everything in flight between the workers during a step, what of it has arrived, and what is sent again when a worker
is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

from infsample_rl.cluster.arrivals import (
    Arrival,
    MicroGroupArrival,
    MicroGroupLost,
    ReferenceArrival,
    RewardArrival,
    RowArrival,
)
from infsample_rl.cluster.calls import (
    ANSWER_S,
    SLICE_S,
    PayloadLost,
    Waiting,
    learner_failure,
    open_at_once,
    status_of,
    value_of,
)
from infsample_rl.cluster.failures import StepLost, WorkerLost
from infsample_rl.cluster.in_flight import Call
from infsample_rl.cluster.interruption import Interruption
from infsample_rl.cluster.messages import SealedOnce, open_micro_group, seal, unseal
from infsample_rl.cluster.streams import BringBack, Finished, RolloutStreams
from infsample_rl.cluster.watchdog import Watchdog
from infsample_rl.cluster.workers import Crew, Handle
from infsample_rl.config import Config
from infsample_rl.types import Completion, Prompt, RolloutWork, RowWork

# While workers decode, what has arrived waits a little for more, so that a look at all that is in flight and a call
# serve many: this share of the time since the first was waited for, at most so many seconds, and no longer than until
# nothing else is in flight.
GATHER_SHARE, GATHER_S = 0.01, 0.1
MOST_ASKED_AT_ONCE = {"reward": 16, "reference": 4}  # micro-groups in one call
MOST_ROWS_AT_ONCE = 8  # in one call of a learner rank: progress is seen when it ends


class Traffic:
    """Streams of rollout workers (`rollout`) and calls on the others."""

    def __init__(
        self, config: Config, crew: Crew, note: Callable[[str], None], interruption: Interruption, bring_back: BringBack
    ) -> None:
        self._config, self._crew, self._note, self._interruption = config, crew, note, interruption
        self.rollout = RolloutStreams(config, crew, note, bring_back)
        self.waiting = Waiting()
        self.num_arrived = 0  # micro-groups since the start
        self._calls: dict[ray.ObjectRef, Call] = {}
        self._micro_groups: dict[int, ray.ObjectRef] = {}
        self._work: dict[int, RolloutWork] = {}  # of micro-groups, by key
        self._references: dict[int, ray.ObjectRef] = {}
        self._sealed_prompts = SealedOnce()
        # micro-groups that no worker of a role has yet
        self._unasked: dict[str, list[tuple[int, Prompt]]] = {"reward": [], "reference": []}
        # by learner rank, and the micro-groups they are made of
        self._unsent_rows: dict[int, list[tuple[RowWork, list[int]]]] = {}
        self._next_key = 0

    # sending

    def score(self, key: int, prompt: Prompt) -> None:
        """Send a micro-group to a reward worker, together with the others that have arrived at the same time."""
        self._unasked["reward"].append((key, prompt))

    def reference_logprobs(self, key: int, prompt: Prompt) -> None:
        """Send a micro-group to a reference worker, together with the others that have arrived at the same time."""
        self._unasked["reference"].append((key, prompt))

    def _send_unasked(self) -> None:
        for role, unasked in self._unasked.items():
            handles, by_worker = self._crew.all(role), dict[int, list[tuple[int, Prompt]]]()
            for key, prompt in unasked:
                if key in self._micro_groups:  # else lost since
                    by_worker.setdefault(key % len(handles), []).append((key, prompt))
            unasked.clear()
            for index, items in by_worker.items():
                for first in range(0, len(items), MOST_ASKED_AT_ONCE[role]):
                    self._ask(role, index, items[first : first + MOST_ASKED_AT_ONCE[role]])

    def _ask(self, role: str, index: int, items: list[tuple[int, Prompt]]) -> None:
        handle, keys = self._crew.all(role)[index], [key for key, _ in items]
        arguments = [[self._sealed_prompts(prompt) for _, prompt in items], *(self._micro_groups[key] for key in keys)]
        if role == "reward":
            answer = handle.score.remote(*arguments)
        else:
            answer, *payloads = handle.logprobs.options(num_returns=1 + len(keys)).remote(*arguments)
            self._references |= zip(keys, payloads, strict=True)
        self._calls[answer] = Call(role, index, handle, keys, lambda: self._ask_again(role, index, items))

    def _ask_again(self, role: str, index: int, items: list[tuple[int, Prompt]]) -> None:
        """One by one, so that one that is gone takes no other with it."""
        for key, prompt in items:
            if key in self._micro_groups:
                self._ask(role, index, [(key, prompt)])

    def learn(self, rank: int, work: RowWork, keys: list[int]) -> None:
        """Send a learner rank its row of a wave, together with the others that are ready at the same time."""
        self._unsent_rows.setdefault(rank, []).append((work, keys))

    def _send_rows(self) -> None:
        unsent, self._unsent_rows = self._unsent_rows, {}
        for rank, rows in unsent.items():
            for first in range(0, len(rows), MOST_ROWS_AT_ONCE):
                self._send_to_learn(rank, rows[first : first + MOST_ROWS_AT_ONCE])

    def _send_to_learn(self, rank: int, rows: list[tuple[RowWork, list[int]]]) -> None:
        handle = self._crew.all("learner")[rank]
        method = handle.learn_rows
        if self._config.cluster.colocate:  # in a thread beside the stream
            method = method.options(concurrency_group="learner")
        keys = sorted({key for _, of_row in rows for key in of_row})
        payloads = [self._micro_groups[key] for key in keys] + [
            self._references[key] for key in keys if key in self._references
        ]
        self._calls[method.remote(seal([work for work, _ in rows]), *payloads)] = Call(
            "learner", rank, handle, [], _never
        )

    # what has arrived

    def arrivals(self, *, until_learner_is_idle: bool = False) -> Iterator[Arrival]:
        """What arrives, as it arrives, until nothing (or no learner row) is in flight. More may be sent meanwhile.

        Lost rollout, reward and reference workers are replaced and what they owed is sent again. StepLost when a
        learner rank is gone; Terminated after SIGTERM; RuntimeError when a worker fails, or too many are lost.
        """
        watchdog, began = Watchdog(self._config, self._note, self._crew.has_started), time.monotonic()
        while self._is_busy() and not (until_learner_is_idle and self._learner_is_idle()):
            self._interruption.check()
            self.rollout.deal_backlog()
            self._send_unasked()
            self._send_rows()
            ready = self._wait(began)
            opened = open_at_once([*self.rollout.advance(ready), *(ref for ref in ready if ref in self._calls)])
            for ref in ready:
                if item := self._calls.get(ref) or self.rollout.in_flight(ref):
                    watchdog.moved(item.role, item.index)
                yield from self._take(ref, opened)
            for (role, index), said in watchdog.silent(
                self.rollout.waited_for, self._calls.values(), self.rollout.returns
            ).items():
                self._give_up(role, index, said)

    def _is_busy(self) -> bool:
        return bool(self._calls or self._unsent_rows or any(self._unasked.values())) or not self.rollout.is_done

    def _learner_is_idle(self) -> bool:
        return not self._unsent_rows and all(call.role != "learner" for call in self._calls.values())

    def _wait(self, began: float) -> list[Any]:
        """All that is ready, or nothing after a while. `began`: time.monotonic() since when this is waited for."""
        waited = [*self.rollout.waited(), *self._calls]
        if not waited:
            time.sleep(SLICE_S)
            return []
        if not self.waiting.wait(waited, num_returns=1, timeout=SLICE_S, fetch_local=False)[0]:
            return []
        # A wait looks at all that is in flight, thousands of calls in a large run: everything that is there is taken at
        # once.
        gather_s = min(GATHER_S, GATHER_SHARE * (time.monotonic() - began)) if self.rollout.streams else 0
        return self.waiting.wait(waited, num_returns=len(waited), timeout=gather_s, fetch_local=False)[0]

    def _take(self, ref: Any, opened: dict[ray.ObjectRef, Any]) -> list[Arrival]:
        if ref in self._calls:
            return self._open_call(ref, self._calls.pop(ref), opened)
        finished = self.rollout.take(ref, opened)
        return [] if finished is None else [self._enter(finished)]

    def _enter(self, finished: Finished) -> MicroGroupArrival:
        key, self._next_key = self._next_key, self._next_key + 1
        self._micro_groups[key], self._work[key] = finished.payload, finished.work
        self.num_arrived += 1
        return MicroGroupArrival(key, finished.header)

    def _open_call(self, ref: ray.ObjectRef, call: Call, opened: dict[ray.ObjectRef, Any]) -> list[Arrival]:
        try:
            value = value_of(ref, call.role, call.index, opened)
        except PayloadLost as error:
            return self._lose_payload(call, error)
        except WorkerLost as lost:
            if call.role == "learner":
                raise self._learner_failure(lost) from lost
            # it lives: the micro-group it was given is that of a worker that died
            if status_of(call.handle) is not None:
                return self._lose_payload(call, lost)
            self._replace(lost, call.handle)
            call.again()
            return []
        except RuntimeError as error:
            if call.role == "learner":
                raise self._learner_failure(error) from error
            raise
        if call.role == "learner":
            return [RowArrival(call.index, report) for report in value]
        held = [(key, one) for key, one in zip(call.keys, unseal(value), strict=True) if key in self._micro_groups]
        return [(RewardArrival if call.role == "reward" else ReferenceArrival)(key, one) for key, one in held]

    def completions(self, key: int) -> list[Completion] | None:
        """Open a micro-group, for the samples that are shown to the user; None if it is gone."""
        if key not in self._micro_groups:
            return None
        try:
            return open_micro_group(ray.get(self._micro_groups[key], timeout=ANSWER_S))
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
            return None

    def forget(self, keys: list[int]) -> None:
        """Forget a step's micro-groups, so that the object store frees them."""
        self._sealed_prompts.clear()
        for key in keys:
            for book in (self._micro_groups, self._references, self._work):
                book.pop(key, None)

    # losses

    def _learner_failure(self, error: Exception) -> Exception:
        return learner_failure(self._crew.all("learner"), error)

    def _replace(self, lost: WorkerLost, handle: Handle) -> None:
        if self._crew.is_current(lost.role, lost.index, handle):
            self._crew.replace(lost)

    def _lose_payload(self, call: Call, error: Exception) -> list[Arrival]:
        if call.role == "learner":
            raise StepLost(str(error)) from error
        if len(call.keys) > 1:
            call.again()
            return []
        (key,) = call.keys
        work = self._work.get(key)
        if work is None:
            return []
        self._note(
            f"{len(work.sample_indices)} samples of prompt {work.prompt_index} are gone with what held them: drawn "
            "again"
        )
        self.rollout.draw_again(work, str(error))
        self.forget([key])
        return [MicroGroupLost(key)]

    def _give_up(self, role: str, index: int, said: str) -> None:
        """A worker has not moved for too long: take it as lost."""
        lost = WorkerLost(role, index, said)
        if role == "learner":
            raise StepLost(str(lost))
        if role == "rollout":
            self.rollout.give_up(lost)
        for ref, call in list(self._calls.items()):
            if (call.role, call.index) == (role, index):
                del self._calls[ref]
                self._replace(lost, call.handle)
                call.again()

    def abandon(self, *, drained: bool = True) -> None:
        """Drop the unfinished step: end the streams (`drained`: wait for them), forget everything in flight."""
        self.rollout.abandon(drained=drained)
        books = self._calls, self._micro_groups, self._work, self._references, self._unsent_rows, self._sealed_prompts
        for book in (*books, *self._unasked.values()):
            book.clear()

    def num_in_flight(self) -> dict[str, int]:
        """Calls on reward, reference and learner that have not been answered; may be asked from another thread."""
        roles = [call.role for call in list(self._calls.values())]
        return {role: roles.count(role) for role in ("reward", "reference", "learner")}

    def statistics(self) -> dict[str | tuple[str, str], float]:
        """What is in flight at this moment, and sums since the start, by metric name; may be asked from another
        thread."""
        return {("calls_in_flight", role): float(count) for role, count in self.num_in_flight().items()} | {
            "workers_decoding": len(self.rollout.streams),
            "micro_groups_held": len(self._micro_groups),
            "micro_groups_arrived": self.num_arrived,
            "samples_moved": self.rollout.num_moved,
        }


def _never() -> None:
    raise AssertionError("learner rows are not sent again: the step is lost with the rank")

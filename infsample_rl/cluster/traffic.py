"""Everything in flight between the workers in a step, what has arrived of it, and what is sent again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import ray

from infsample_rl.cluster.arrivals import (
    Arrival,
    MicroGroupLost,
    MicroGroups,
    PendingCall,
    ReferenceArrival,
    RewardArrival,
    RowArrival,
)
from infsample_rl.cluster.calls import Calls, PayloadLost, open_at_once, value_of
from infsample_rl.cluster.interruption import SLICE_S
from infsample_rl.cluster.messages import seal, unseal
from infsample_rl.cluster.observed import status_of
from infsample_rl.cluster.streams import RolloutStreams
from infsample_rl.cluster.watchdog import Watchdog
from infsample_rl.cluster.weight_delivery import WeightDelivery
from infsample_rl.cluster.workers import Handle, StepLost, WorkerLost
from infsample_rl.config import Config
from infsample_rl.types import Prompt, RowWork

# While workers decode, what has arrived waits a little for more, so that a look at all that is in flight and a call
# serve many: this share of the time since the first was waited for, at most so many seconds, and no longer than until
# nothing else is in flight.
GATHER_SHARE, GATHER_S = 0.01, 0.1
MOST_ASKED_AT_ONCE = {"reward": 16, "reference": 4}  # micro-groups in one call
MOST_ROWS_AT_ONCE = 8  # in one call of a learner rank: progress is seen when it ends
MOST_CALLS_OF_ROWS = 2  # of a rank at a time: one that it does, and one behind which a save at SIGTERM has to wait


class Traffic:
    """Streams of rollout workers, and calls on the others about the micro-groups that come out of them."""

    def __init__(
        self, config: Config, calls: Calls, weights: WeightDelivery, rollout: RolloutStreams, micro_groups: MicroGroups
    ) -> None:
        self._config, self._calls, self._weights = config, calls, weights
        self._rollout, self._micro_groups = rollout, micro_groups
        self._pending: dict[ray.ObjectRef, PendingCall] = {}
        # of this arrivals(), by id(), which is one prompt's for as long as it is kept here
        self._sealed_prompts: dict[int, tuple[Prompt, bytes]] = {}
        # micro-groups that no worker of a role has yet
        self._unasked: dict[str, list[tuple[int, Prompt]]] = {"reward": [], "reference": []}
        # by learner rank, and the micro-groups they are made of
        self._unsent_rows: dict[int, list[tuple[RowWork, list[int]]]] = {}

    # sending

    def score(self, key: int, prompt: Prompt) -> None:
        """Send a micro-group to a reward worker, together with the others that have arrived at the same time."""
        self._unasked["reward"].append((key, prompt))

    def reference_logprobs(self, key: int, prompt: Prompt) -> None:
        """Send a micro-group to a reference worker, together with the others that have arrived at the same time."""
        self._unasked["reference"].append((key, prompt))

    def _send_unasked(self) -> None:
        for role, unasked in self._unasked.items():
            handles, by_worker = self._calls.workers.all(role), dict[int, list[tuple[int, Prompt]]]()
            for key, prompt in unasked:
                if key in self._micro_groups.payloads:  # else lost since
                    by_worker.setdefault(key % len(handles), []).append((key, prompt))
            unasked.clear()
            for index, items in by_worker.items():
                for first in range(0, len(items), MOST_ASKED_AT_ONCE[role]):
                    self._ask(role, index, items[first : first + MOST_ASKED_AT_ONCE[role]])

    def _ask(self, role: str, index: int, items: list[tuple[int, Prompt]]) -> None:
        handle, keys = self._calls.workers.all(role)[index], [key for key, _ in items]
        payloads = [self._micro_groups.payloads[key] for key in keys]
        arguments = [[self._sealed(prompt) for _, prompt in items], *payloads]
        if role == "reward":
            answer = handle.score.remote(*arguments)
        else:
            answer, *logprobs = handle.logprobs.options(num_returns=1 + len(keys)).remote(*arguments)
            self._micro_groups.references |= zip(keys, logprobs, strict=True)
        self._pending[answer] = PendingCall(role, index, handle, items)

    def _sealed(self, prompt: Prompt) -> bytes:
        if id(prompt) not in self._sealed_prompts:
            self._sealed_prompts[id(prompt)] = prompt, seal(prompt)
        return self._sealed_prompts[id(prompt)][1]

    def _ask_again(self, call: PendingCall) -> None:
        """One by one, so that one that is gone takes no other with it."""
        for key, prompt in call.items:
            if key in self._micro_groups.payloads:
                self._ask(call.role, call.index, [(key, prompt)])

    def learn(self, rank: int, work: RowWork, keys: list[int]) -> None:
        """Send a learner rank its row of a wave, together with the others that are ready at the same time."""
        self._unsent_rows.setdefault(rank, []).append((work, keys))

    def _send_rows(self) -> None:
        """To all ranks alike, so that what they are asked between two calls comes between the same rows on each."""
        calls = Counter(call.index for call in self._pending.values() if call.role == "learner")
        while self._unsent_rows and max(calls.values(), default=0) < MOST_CALLS_OF_ROWS:
            for rank, rows in self._unsent_rows.items():
                self._send_to_learn(rank, rows[:MOST_ROWS_AT_ONCE])
                calls[rank] += 1
                del rows[:MOST_ROWS_AT_ONCE]
            self._unsent_rows = {rank: rows for rank, rows in self._unsent_rows.items() if rows}

    def _send_to_learn(self, rank: int, rows: list[tuple[RowWork, list[int]]]) -> None:
        handle = self._calls.workers.all("learner")[rank]
        method = handle.learn_rows
        if self._config.shares_process:  # in a thread beside the stream
            method = method.options(concurrency_group="learner")
        keys = sorted({key for _, of_row in rows for key in of_row})
        payloads = [self._micro_groups.payloads[key] for key in keys]
        payloads += [self._micro_groups.references[key] for key in keys if key in self._micro_groups.references]
        answer = method.remote(seal([work for work, _ in rows]), *payloads)
        self._pending[answer] = PendingCall("learner", rank, handle, [])

    # what has arrived

    def arrivals(self, *, until_learner_is_idle: bool = False) -> Iterator[Arrival]:
        """What arrives, as it arrives, until nothing (or no learner row) is in flight. More may be sent meanwhile.

        Lost rollout, reward and reference workers are replaced and what they owed is sent again. StepLost when a
        learner rank is gone; Terminated after SIGTERM; RuntimeError when a worker fails, or too many are lost.
        """
        watchdog, began = Watchdog(self._config, self._calls), time.monotonic()
        self._sealed_prompts.clear()
        while self._is_busy() and not (until_learner_is_idle and self._learner_is_idle()):
            self._calls.interruption.check()
            self._rollout.deal_backlog()
            self._send_unasked()
            self._send_rows()
            ready = self._wait(began)
            opened = open_at_once([*self._rollout.advance(ready), *(ref for ref in ready if ref in self._pending)])
            for ref in ready:
                if item := self._pending.get(ref) or self._rollout.in_flight(ref):
                    watchdog.moved(item.role, item.index)
                yield from self._take(ref, opened)
            pending, returns = self._pending.values(), self._weights.returns.values()
            for (role, index), said in watchdog.silent([*self._rollout.waited_for, *pending, *returns]).items():
                self._give_up(role, index, said)

    def _is_busy(self) -> bool:
        return bool(self._pending or self._unsent_rows or any(self._unasked.values())) or not self._rollout.is_done

    def _learner_is_idle(self) -> bool:
        return not self._unsent_rows and all(call.role != "learner" for call in self._pending.values())

    def _wait(self, began: float) -> list[Any]:
        """All that is ready, or nothing after a while. `began`: time.monotonic() since when this is waited for."""
        waited = [*self._rollout.waited(), *self._pending]
        if not waited:
            time.sleep(SLICE_S)
            return []
        if not self._calls.wait(waited, num_returns=1, timeout=SLICE_S, fetch_local=False)[0]:
            return []
        # A wait looks at all that is in flight, thousands of calls in a large run: everything that is there is taken at
        # once.
        gather_s = min(GATHER_S, GATHER_SHARE * (time.monotonic() - began)) if self._rollout.streams else 0
        return self._calls.wait(waited, num_returns=len(waited), timeout=gather_s, fetch_local=False)[0]

    def _take(self, ref: Any, opened: dict[ray.ObjectRef, Any]) -> list[Arrival]:
        if ref in self._pending:
            return self._open_call(ref, self._pending.pop(ref), opened)
        finished = self._rollout.take(ref, opened)
        return [] if finished is None else [self._micro_groups.enter(finished)]

    def _open_call(self, ref: ray.ObjectRef, call: PendingCall, opened: dict[ray.ObjectRef, Any]) -> list[Arrival]:
        try:
            value = value_of(ref, call.role, call.index, opened)
        except RuntimeError as error:
            return self._fail(call, error)
        if call.role == "learner":
            return [RowArrival(call.index, report) for report in value]
        kind, answers = RewardArrival if call.role == "reward" else ReferenceArrival, unseal(value)
        held = self._micro_groups.payloads
        return [kind(key, answer) for (key, _), answer in zip(call.items, answers, strict=True) if key in held]

    # losses

    def _fail(self, call: PendingCall, error: RuntimeError) -> list[Arrival]:
        if call.role == "learner":
            raise self._calls.learner_failure(error) from error
        if isinstance(error, WorkerLost) and status_of(call.handle) is None:
            self._replace(error, call.handle)
            self._ask_again(call)
            return []
        if isinstance(error, (PayloadLost, WorkerLost)):  # it lives: the micro-group is that of a worker that died
            return self._lose_payload(call, error)
        raise error

    def _replace(self, lost: WorkerLost, handle: Handle) -> None:
        if self._calls.workers.is_current(lost.role, lost.index, handle):
            self._calls.workers.replace(lost)

    def _lose_payload(self, call: PendingCall, error: Exception) -> list[Arrival]:
        if len(call.items) > 1:
            self._ask_again(call)
            return []
        ((key, _),) = call.items
        work = self._micro_groups.work.get(key)
        if work is None:
            return []
        self._calls.note(
            f"{len(work.sample_indices)} samples of prompt {work.prompt_index} are gone with what held them: drawn "
            "again"
        )
        self._rollout.draw_again(work, str(error))
        self._micro_groups.forget([key])
        return [MicroGroupLost(key)]

    def _give_up(self, role: str, index: int, said: str) -> None:
        """A worker has not moved for too long: take it as lost."""
        lost = WorkerLost(role, index, said)
        if role == "learner":
            raise StepLost(str(lost))
        if role == "rollout":
            self._rollout.give_up(lost)
        for ref, call in list(self._pending.items()):
            if (call.role, call.index) == (role, index):
                del self._pending[ref]
                self._replace(lost, call.handle)
                self._ask_again(call)

    def abandon(self, *, for_good: bool = False, keep: Collection[int] = ()) -> None:
        """Give the unfinished step up: end the streams, forget everything in flight and, but for `keep`, what has
        arrived. `for_good`: nothing is sampled any more, so that streams are waited for only where the learner's calls
        come behind them."""
        self._rollout.abandon(drained=self._config.shares_process or not for_good)
        self._micro_groups.forget([key for key in self._micro_groups.payloads if key not in keep])
        self._pending.clear()
        self._unsent_rows.clear()
        self._unasked = {"reward": [], "reference": []}

    def num_in_flight(self) -> dict[str, int]:
        """Calls on reward, reference and learner that have not been answered; may be asked from another thread."""
        roles = [call.role for call in list(self._pending.values())]
        return {role: roles.count(role) for role in ("reward", "reference", "learner")}

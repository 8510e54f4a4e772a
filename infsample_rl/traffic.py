"""Everything in flight between the workers during a step, what of it has arrived, and what is sent again when a worker is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from infsample_rl.arrivals import Arrival, MicroGroupArrival, MicroGroupLost, ReferenceArrival, RewardArrival, RowArrival
from infsample_rl.config import Config
from infsample_rl.crew import Crew, Handle
from infsample_rl.dealing import split
from infsample_rl.failures import StepLost, WorkerLost, worker_name
from infsample_rl.in_flight import Call, Return, Stream, by_prompt, drain, settle
from infsample_rl.interruption import Interruption
from infsample_rl.ray_calls import ANSWER_S, SLICE_S, PayloadLost, Waiting, learner_failure, status_of, value_of
from infsample_rl.types import Completion, LossTotals, MicroGroupHeader, Prompt, RolloutWork, SampleSpec
from infsample_rl.watchdog import Watchdog


class Traffic:
    """Streams of rollout workers and calls on the others.

    `bring_back(index)`: references of the weights, and of the call that loads them into a new rollout worker; None where they cannot be
    had before the next version.
    """

    def __init__(
        self,
        config: Config,
        crew: Crew,
        note: Callable[[str], None],
        interruption: Interruption,
        bring_back: Callable[[int], tuple[list[ray.ObjectRef], ray.ObjectRef] | None],
    ) -> None:
        self._config, self._crew, self._note, self._interruption, self._bring_back = config, crew, note, interruption, bring_back
        self.waiting = Waiting()
        self.num_arrived = 0  # micro-groups since the start
        self.num_moved = 0  # samples since the start that a worker gave back, not having started them, for an idle one
        self.ready: set[int] = set()  # rollout workers that hold the version that samples
        self.decoding: set[int] = set()  # of them, those dealt work since start_rollout
        self._batch: tuple[int, bool] = (0, False)  # step and evaluation of what is sampled
        self._backlog: list[RolloutWork] = []  # dealt to nobody
        self._streams: dict[Any, Stream] = {}  # by generator
        self._calls: dict[ray.ObjectRef, Call] = {}
        self._returns: dict[ray.ObjectRef, Return] = {}
        self._asked_back: dict[ray.ObjectRef, Stream] = {}
        self._micro_groups: dict[int, ray.ObjectRef] = {}
        self._work: dict[int, RolloutWork] = {}  # of micro-groups, by key
        self._references: dict[int, ray.ObjectRef] = {}
        self._next_key = self._turn = self._num_streams = 0

    def begin_version(self, holders: set[int]) -> None:
        """These rollout workers hold the version that samples from now on; others that are on their way come with the next."""
        self.ready = holders
        self._returns.clear()

    # sending

    def start_rollout(self, dealt: list[list[RolloutWork]], *, step: int, evaluation: bool) -> None:
        """Let the ready rollout workers decode a part each; micro-groups then come out of arrivals()."""
        self._batch, self.decoding = (step, evaluation), set()
        for index, work in zip(sorted(self.ready), dealt, strict=True):
            self._start_stream(index, work)

    def _start_stream(self, index: int, work: list[RolloutWork]) -> None:
        if not work:
            return
        handle = self._crew.all("rollout")[index]
        pending = 2 * self._config.rollout.max_undelivered  # a header and a payload each
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": pending}
        number, self._num_streams = self._num_streams, self._num_streams + 1
        self._streams[handle.stream.options(**options).remote(work, *self._batch, number)] = Stream(index, handle, number, by_prompt(work))
        self.decoding.add(index)

    def score(self, key: int, prompt: Prompt) -> None:
        """Send a micro-group to a reward worker."""
        index, handle = self._next_of("reward", key)
        self._calls[handle.score.remote(prompt, self._micro_groups[key])] = Call("reward", index, handle, key, lambda: self.score(key, prompt))

    def reference_logprobs(self, key: int, prompt: Prompt) -> None:
        """Send a micro-group to a reference worker."""
        index, handle = self._next_of("reference", key)
        floats, payload = handle.logprobs.options(num_returns=2).remote(prompt, self._micro_groups[key])
        self._calls[floats] = Call("reference", index, handle, key, lambda: self.reference_logprobs(key, prompt))
        self._references[key] = payload

    def _next_of(self, role: str, key: int) -> tuple[int, Handle]:
        handles = self._crew.all(role)
        return key % len(handles), handles[key % len(handles)]

    def row(
        self,
        rank: int,
        row: list[SampleSpec] | None,
        prompt_ids: dict[int, np.ndarray],
        keys: list[int],
        totals: LossTotals | None,
        row_id: int | None,
    ) -> None:
        """Send a learner rank its row of a wave (cluster.accumulate; `totals` None: cluster.remember)."""
        handle = self._crew.all("learner")[rank]
        method = handle.remember if totals is None else handle.accumulate
        if self._config.cluster.colocate:  # in a thread beside the stream
            method = method.options(concurrency_group="learner")
        payloads = [self._micro_groups[key] for key in keys] + [self._references[key] for key in keys if key in self._references]
        arguments = (row, prompt_ids, row_id) if totals is None else (row, prompt_ids, totals, row_id)
        self._calls[method.remote(*arguments, *payloads)] = Call("learner", rank, handle, -1, _never)

    # what has arrived

    def arrivals(self, *, until_learner_is_idle: bool = False) -> Iterator[Arrival]:
        """What arrives, as it arrives, until nothing (or no learner row) is in flight. More may be sent meanwhile.

        Lost rollout, reward and reference workers are replaced and what they owed is sent again. StepLost when a learner rank is gone;
        Terminated after SIGTERM; RuntimeError when a worker fails, or too many are lost.
        """
        watchdog = Watchdog(self._config, self._note)
        while self._is_busy() and not (until_learner_is_idle and self._learner_is_idle()):
            self._interruption.check()
            self._deal_backlog()
            ready = self._wait()
            if ready:
                watchdog.moved()
            elif said := watchdog.silence(list(self._streams.values()), list(self._calls.values()), list(self._returns.values())):
                self._give_up_on_all(said)
            for ref in ready:
                arrival = self._take(ref)
                if arrival is not None:
                    yield arrival

    def _is_busy(self) -> bool:
        return bool(self._streams or self._calls or self._backlog or self._asked_back)

    def _learner_is_idle(self) -> bool:
        return all(call.role != "learner" for call in self._calls.values())

    def _wait(self) -> list[Any]:
        """All that is ready, or nothing after a while."""
        streams, self._turn = list(self._streams), self._turn + 1
        first = self._turn % len(streams) if streams else 0  # ray.wait favours the first of the list: take turns
        waited = [*streams[first:], *streams[:first], *self._calls, *self._returns, *self._asked_back]
        if not waited:
            time.sleep(SLICE_S)
            return []
        ready, _ = self.waiting.wait(waited, num_returns=1, timeout=SLICE_S, fetch_local=False)
        if ready:  # a wait looks at all that is in flight, thousands of calls in a large run: everything that is there is taken at once
            ready, _ = self.waiting.wait(waited, num_returns=len(waited), timeout=0, fetch_local=False)
        return ready

    def _take(self, ref: Any) -> Arrival | None:
        if ref in self._streams:
            return self._open_stream(ref, self._streams[ref])
        if ref in self._calls:
            return self._open_call(ref, self._calls.pop(ref))
        if ref in self._returns:
            self._welcome(ref, self._returns.pop(ref))
        elif ref in self._asked_back:
            self._take_back(ref, self._asked_back.pop(ref))
        return None  # something else that was ready has dropped it

    def _open_stream(self, generator: Any, stream: Stream) -> MicroGroupArrival | None:
        try:
            item = next(generator)
        except StopIteration:
            try:
                if stream.header is not None:  # an error takes the place of a header
                    value_of(stream.header, "rollout", stream.index)
                value_of(generator.completed(), "rollout", stream.index)
            except WorkerLost as lost:
                self._lose_stream(generator, lost)
                return None
            del self._streams[generator]
            self._ask_for_work()
            return None
        if stream.header is None:
            stream.header = item
            return None
        try:
            header: MicroGroupHeader = value_of(stream.header, "rollout", stream.index)
        except WorkerLost as lost:
            self._lose_stream(generator, lost)
            return None
        stream.header = None
        key, self._next_key = self._next_key, self._next_key + 1
        self._micro_groups[key] = item
        self._work[key] = settle(stream.owed, header)
        self.num_arrived += 1
        return MicroGroupArrival(key, header)

    def _open_call(self, ref: ray.ObjectRef, call: Call) -> Arrival | None:
        try:
            value = value_of(ref, call.role, call.index)
        except PayloadLost as error:
            return self._lose_micro_group(call, error)
        except WorkerLost as lost:
            if call.role == "learner":
                raise self._learner_failure(lost) from lost
            if status_of(call.handle) is not None:  # it lives: the micro-group it was given is that of a worker that died
                return self._lose_micro_group(call, lost)
            self._replace(lost, call.handle)
            if call.key in self._micro_groups:
                call.again()
            return None
        except RuntimeError as error:
            if call.role == "learner":
                raise self._learner_failure(error) from error
            raise
        if call.role == "learner":
            return RowArrival(call.index, value)
        if call.key not in self._micro_groups:  # lost since
            return None
        return RewardArrival(call.key, value) if call.role == "reward" else ReferenceArrival(call.key, value)

    def completions(self, key: int) -> list[Completion] | None:
        """Open a micro-group, for the samples that are shown to the user; None if it is gone."""
        try:
            return ray.get(self._micro_groups[key], timeout=ANSWER_S)
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
            return None

    def forget(self, keys: list[int]) -> None:
        """Forget a step's micro-groups, so that the object store frees them."""
        for key in keys:
            for book in (self._micro_groups, self._references, self._work):
                book.pop(key, None)

    # losses

    def _learner_failure(self, error: Exception) -> Exception:
        return learner_failure(self._crew.all("learner"), error)

    def _replace(self, lost: WorkerLost, handle: Handle) -> None:
        if self._crew.is_current(lost.role, lost.index, handle):
            self._crew.replace(lost)

    def _lose_stream(self, generator: Any, lost: WorkerLost) -> None:
        stream = self._streams.pop(generator)
        stream.is_lost = True
        if self._config.rollout.schedule == "dynamic_slot" and not self._batch[1]:
            raise StepLost(f"{lost}; with rollout.schedule=dynamic_slot the first samples to finish count, so a part of them cannot be drawn again")
        self._backlog += stream.owed.values()
        self.lose_rollout(lost, stream.handle)

    def lose_rollout(self, lost: WorkerLost, handle: Handle) -> None:
        """Replace a rollout worker, and let it return as soon as it has the weights."""
        if not self._crew.is_current("rollout", lost.index, handle):
            return
        self.ready.discard(lost.index)
        self.decoding.discard(lost.index)
        if self._config.cluster.colocate:
            raise StepLost(f"{lost}, and with it a learner rank")
        handle = self._crew.replace(lost)
        found = self._bring_back(lost.index)
        if found is not None:
            published, loaded = found
            self._returns[loaded] = Return(lost.index, handle, published)
        elif not self.ready:
            raise StepLost(f"{lost}; no rollout worker is left, and the learner has gone on to the next version")

    def _welcome(self, ref: ray.ObjectRef, returned: Return) -> None:
        try:
            value_of(ref, "rollout", returned.index)
        except (WorkerLost, PayloadLost) as error:
            failure = self._learner_failure(RuntimeError(str(error)))  # the weights come from the learner: it may be that which is gone
            if isinstance(failure, StepLost):
                raise failure from error
            self.lose_rollout(WorkerLost("rollout", returned.index, str(error)), returned.handle)
            return
        self.ready.add(returned.index)
        self._note(f"{worker_name('rollout', returned.index)} is back")

    def _lose_micro_group(self, call: Call, error: Exception) -> MicroGroupLost | None:
        if call.role == "learner":
            raise StepLost(str(error)) from error
        work = self._work.get(call.key)
        if work is None:
            return None
        self._note(f"{len(work.sample_indices)} samples of prompt {work.prompt_index} are gone with what held them: drawn again")
        self._backlog.append(work)
        self.forget([call.key])
        return MicroGroupLost(call.key)

    def _give_up_on_all(self, said: str) -> None:
        """Nothing in flight has moved for too long: take all that it waits for as lost."""
        calls, returns = list(self._calls.items()), list(self._returns.items())
        if any(call.role == "learner" for _, call in calls):
            raise StepLost(f"the learner: {said}")
        for generator, stream in list(self._streams.items()):
            self._lose_stream(generator, WorkerLost("rollout", stream.index, said))
        for ref, back in returns:
            del self._returns[ref]
            self.lose_rollout(WorkerLost("rollout", back.index, said), back.handle)
        for ref, call in calls:
            del self._calls[ref]
            self._replace(WorkerLost(call.role, call.index, said), call.handle)
            call.again()

    def abandon(self) -> None:
        """Drop the unfinished step: end the streams, forget everything in flight."""
        for stream in self._streams.values():
            stream.handle.halt.remote(stream.number)
        for generator in self._streams:
            drain(generator)
        for book in (self._streams, self._calls, self._returns, self._asked_back, self._micro_groups, self._work, self._references, self._backlog):
            book.clear()

    def statistics(self) -> dict[str | tuple[str, str], float]:
        """What is in flight at this moment, and sums since the start, by metric name; may be asked from another thread."""
        roles = [call.role for call in list(self._calls.values())]
        return {("calls_in_flight", role): float(roles.count(role)) for role in ("reward", "reference", "learner")} | {
            "workers_decoding": len(self._streams),
            "micro_groups_held": len(self._micro_groups),
            "micro_groups_arrived": self.num_arrived,
            "samples_moved": self.num_moved,
        }

    # work for the idle

    def _idle(self) -> list[int]:
        busy = {stream.index for stream in self._streams.values()}
        return sorted(self.ready - busy)

    def _deal_backlog(self) -> None:
        """Give what nobody decodes to workers that have nothing to do."""
        idle = self._idle() if self._backlog else []
        if idle:
            dealt, self._backlog = split(by_prompt(self._backlog).values(), len(idle)), []
            for index, work in zip(idle, dealt, strict=True):
                self._start_stream(index, work)

    def _ask_for_work(self) -> None:
        """A worker has ended its part: ask the one that owes most for samples that it has not started."""
        if self._backlog or not self._idle() or self._config.cluster.colocate or self._asked_back:
            return
        busy = [stream for stream in self._streams.values() if not stream.has_nothing_to_give]
        if busy:
            most = max(busy, key=lambda stream: sum(len(work.sample_indices) for work in stream.owed.values()))
            self._asked_back[most.handle.give_back.remote()] = most

    def _take_back(self, ref: ray.ObjectRef, stream: Stream) -> None:
        try:
            given: dict[int, list[int]] = value_of(ref, "rollout", stream.index)
        except WorkerLost:
            return  # its stream says so too
        if stream.is_lost:
            return  # all it owed has been dealt again
        stream.has_nothing_to_give = not given
        for prompt_index, indices in given.items():
            owed = stream.owed.pop(prompt_index)
            self._backlog.append(replace(owed, sample_indices=indices))
            self.num_moved += len(indices)
            left = [index for index in owed.sample_indices if index not in set(indices)]
            if left:
                stream.owed[prompt_index] = replace(owed, sample_indices=left)
        if not given:
            self._ask_for_work()


def _never() -> None:
    raise AssertionError("learner rows are not sent again: the step is lost with the rank")

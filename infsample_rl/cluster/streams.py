"""What the rollout workers decode: work dealt, given back for idle ones, dealt again when a worker is lost."""

from __future__ import annotations

from itertools import count
from typing import Any

import ray

from infsample_rl.cluster.arrivals import Finished, Return, Stream
from infsample_rl.cluster.calls import Calls, PayloadLost, value_of
from infsample_rl.cluster.dealing import by_prompt, settle, split
from infsample_rl.cluster.messages import seal, unseal
from infsample_rl.cluster.weight_delivery import WeightDelivery
from infsample_rl.cluster.workers import Handle, StepLost, WorkerLost, worker_name
from infsample_rl.config import Config
from infsample_rl.types import MicroGroupHeader, RolloutWork, StreamEnd, StreamOrder, WorkerPhases

# micro-groups that wait in a worker before it pauses; twice as many of less than 64 KiB
MAX_UNDELIVERED = 8
DRAIN_S = 30.0  # how long a halted stream may take to end


class RolloutStreams:
    """The rollout workers' streams of micro-groups, of those that hold the weights (`weights.holders`)."""

    def __init__(self, config: Config, calls: Calls, weights: WeightDelivery) -> None:
        self._config, self._calls, self._weights = config, calls, weights
        self.num_moved = 0  # samples since the start that a worker gave back, not having started them, for an idle one
        self.decoding: set[int] = set()  # rollout workers dealt work of this step or evaluation
        self.ends: list[StreamEnd] = []  # of streams since start(); a worker that was dealt more later has several
        self._batch: tuple[int, bool] = (0, False)  # step and evaluation of what is sampled
        self._backlog: list[RolloutWork] = []  # dealt to nobody
        self._streams: dict[Any, Stream] = {}  # by generator
        self._asked_back: dict[ray.ObjectRef, Stream] = {}
        self._phases: list[WorkerPhases] = []  # that ended streams have told of, not taken yet
        self._numbers = count()  # of streams

    def start(self, dealt: list[list[RolloutWork]], *, step: int, evaluation: bool = False) -> None:
        """Let every worker that holds the weights decode its part; micro-groups then come out of traffic.arrivals()."""
        if self._batch != (step, evaluation):  # else it is a further round of the same step
            self.decoding = set()
        self._batch, self.ends = (step, evaluation), []
        for index, work in zip(sorted(self._weights.holders), dealt, strict=True):
            self._start_stream(index, work)

    def _start_stream(self, index: int, work: list[RolloutWork]) -> None:
        if not work:
            return
        handle, rollout = self._calls.workers.all("rollout")[index], self._config.rollout
        options: dict[str, Any] = {"num_returns": "streaming"}
        micro_groups = sum(-(-len(item.sample_indices) // rollout.micro_group) for item in work)
        # else it cannot be reached, and telling the worker of each item taken is most of what it costs
        if micro_groups > MAX_UNDELIVERED:
            # a header and a payload each, where they are apart
            options["_generator_backpressure_num_objects"] = 2 * MAX_UNDELIVERED
        number = next(self._numbers)
        generator = handle.stream.options(**options).remote(seal(StreamOrder(work, *self._batch, number)))
        self._streams[generator] = Stream(index, handle, number, by_prompt(work))
        self.decoding.add(index)

    # what is in flight

    @property
    def streams(self) -> list[Stream]:
        """Those that have not ended."""
        return list(self._streams.values())

    @property
    def num_owed(self) -> int:
        """Samples that were dealt and have not arrived; may be asked from another thread."""
        owed = [*self._backlog, *(work for stream in self.streams for work in list(stream.owed.values()))]
        return sum(len(work.sample_indices) for work in owed)

    @property
    def waited_for(self) -> list[Stream]:
        """Streams of the workers that owe an answer: that have not ended, or were asked for work before they did."""
        return list(dict.fromkeys([*self._streams.values(), *self._asked_back.values()]))

    def in_flight(self, ref: Any) -> Stream | Return | None:
        """What a reference is of; None if it has been dropped."""
        return self._streams.get(ref) or self._weights.returns.get(ref) or self._asked_back.get(ref)

    @property
    def is_done(self) -> bool:
        """Whether all that was dealt has arrived, and a worker is there for what comes next, if one is on its way."""
        lacks_worker = bool(self._weights.returns) and not self._weights.holders
        return not (self._streams or self._backlog or self._asked_back or lacks_worker)

    def waited(self) -> list[Any]:
        """What may become ready."""
        return [*self._streams, *self._weights.returns, *self._asked_back]

    def advance(self, ready: list[Any]) -> list[ray.ObjectRef]:
        """Take the next item of each stream that is ready; references of those whose values take() needs."""
        wanted = []
        for generator in ready:
            stream = self._streams.pop(generator, None)
            if stream is not None:
                self._streams[generator] = stream  # ray.wait favours the first: they take turns
                stream.item = next(generator, None)
                wanted += [stream.item] if stream.item is not None and stream.header is None else []
        return wanted

    def take(self, ref: Any, opened: dict[ray.ObjectRef, Any]) -> Finished | None:
        """A micro-group, if what is ready (a stream after advance()) completes one. `opened`: values fetched before."""
        if ref in self._streams:
            try:
                return self._take_item(ref, self._streams[ref], opened)
            except WorkerLost as lost:
                self._lose_stream(ref, lost)
        elif ref in self._weights.returns:
            self._welcome(ref, self._weights.returns.pop(ref))
        elif ref in self._asked_back:
            self._take_back(ref, self._asked_back.pop(ref))
        return None  # something else that was ready has dropped it

    def _take_item(self, generator: Any, stream: Stream, opened: dict[ray.ObjectRef, Any]) -> Finished | None:
        """A micro-group with its header, or the header and then the micro-group, which stays closed; at last the end.
        An error takes any place."""
        item, header = stream.item, stream.header
        if item is not None and header is not None:
            stream.header = None
            return self._finish(stream, header, item)
        found = value_of(generator.completed() if item is None else item, "rollout", stream.index, opened)
        if isinstance(found, bytes):
            return self._finish(stream, unseal(found), item)
        if isinstance(found, MicroGroupHeader):
            stream.header = found
            return None
        if isinstance(found, StreamEnd):
            self.ends.append(found)
            self._phases.append(found.phases)
        del self._streams[generator]
        self._draw_what_is_owed(stream)
        self._ask_for_work()
        return None

    def _finish(self, stream: Stream, header: MicroGroupHeader, item: ray.ObjectRef) -> Finished:
        stream.has_nothing_to_give = header.num_waiting < 2  # of one there is no half
        return Finished(header, item, settle(stream.owed, header.prompt_index, header.sample_indices))

    def take_phases(self) -> list[WorkerPhases]:
        """What workers did until their streams ended, since the last call."""
        phases, self._phases = self._phases, []
        return phases

    # losses

    def draw_again(self, work: RolloutWork, why: str) -> None:
        """Deal samples that had arrived once more; StepLost where a part of a prompt cannot be drawn again."""
        self._check_parts(why)
        self._backlog.append(work)

    @property
    def _takes_the_first(self) -> bool:
        """Whether the first samples to finish count, whatever their indices: then what is owed names none of them."""
        return self._config.rollout.schedule == "dynamic_slot" and not self._batch[1]

    def _check_parts(self, why: str) -> None:
        if self._takes_the_first:
            raise StepLost(
                f"{why}; with rollout.schedule=dynamic_slot the first samples to finish count, so a part of them "
                "cannot be drawn again"
            )

    def _draw_what_is_owed(self, stream: Stream) -> None:
        """Deal again what an ended stream neither sent nor is asked for: given back, and the answer was lost."""
        if not self._takes_the_first and stream not in self._asked_back.values():
            self._backlog += stream.owed.values()
            stream.owed.clear()

    def _lose_stream(self, generator: Any, lost: WorkerLost) -> None:
        stream = self._streams.pop(generator)
        stream.is_lost = True
        self._check_parts(str(lost))
        self._backlog += stream.owed.values()
        self.lose(lost, stream.handle)

    def replace(self, lost: WorkerLost, handle: Handle) -> Handle | None:
        """Start a rollout worker, as yet without weights, in place of one that is gone; None if that is done."""
        if not self._calls.workers.is_current("rollout", lost.index, handle):
            return None
        self._weights.holders.discard(lost.index)
        self.decoding.discard(lost.index)
        if self._config.shares_process:
            raise StepLost(f"{lost}, and with it a learner rank")
        return self._calls.workers.replace(lost)

    def lose(self, lost: WorkerLost, handle: Handle) -> None:
        """Replace a rollout worker, and let it return as soon as it has the weights."""
        replacement = self.replace(lost, handle)
        is_on_its_way = replacement is not None and self._weights.bring_back(lost.index, replacement)
        if replacement is not None and not is_on_its_way and not self._weights.holders:
            raise StepLost(f"{lost}; no rollout worker is left, and the learner has gone on to the next version")

    def _welcome(self, ref: ray.ObjectRef, returned: Return) -> None:
        try:
            value_of(ref, "rollout", returned.index)
        except (WorkerLost, PayloadLost) as error:
            # the weights come from the learner: it may be that which is gone
            failure = self._calls.learner_failure(RuntimeError(str(error)))
            if isinstance(failure, StepLost):
                raise failure from error
            self.lose(WorkerLost("rollout", returned.index, str(error)), returned.handle)
            return
        self._weights.holders.add(returned.index)
        self._calls.note(f"{worker_name('rollout', returned.index)} is back")
        self._ask_for_work()

    def give_up(self, lost: WorkerLost) -> None:
        """A worker that decodes, gives work back or returns does not move: take it as lost."""
        for ref, back in list(self._weights.returns.items()):
            if back.index == lost.index:
                del self._weights.returns[ref]
                self.lose(lost, back.handle)
        for generator, stream in list(self._streams.items()):
            if stream.index == lost.index:
                self._lose_stream(generator, lost)
        for ref, stream in list(self._asked_back.items()):
            if stream.index == lost.index:
                del self._asked_back[ref]
                if not stream.is_lost:
                    self._draw_what_is_owed(stream)
                    self.lose(lost, stream.handle)

    def abandon(self, *, drained: bool = True) -> None:
        """End all streams and forget what they owe; `drained`: wait for each to end, as its worker cannot be asked for
        anything else before."""
        for stream in self._streams.values():
            stream.handle.halt.remote(stream.number)
        for generator in self._streams if drained else ():
            _drain(generator)
        for book in (self._streams, self._weights.returns, self._asked_back, self._backlog):
            book.clear()

    # work for the idle

    def _idle(self) -> list[int]:
        # Who is asked to give work back means the stream of then: a new one would take the question for its own.
        busy = {stream.index for stream in (*self._streams.values(), *self._asked_back.values())}
        return sorted(self._weights.holders - busy)

    def deal_backlog(self) -> None:
        """Give what nobody decodes to workers that have nothing to do."""
        idle = self._idle() if self._backlog else []
        if idle:
            dealt, self._backlog = split(by_prompt(self._backlog).values(), len(idle)), []
            for index, work in zip(idle, dealt, strict=True):
                self._start_stream(index, work)

    def _ask_for_work(self) -> None:
        """A worker has nothing to do: ask the one that owes most for samples that it has not started."""
        if self._backlog or not self._idle() or self._config.shares_process or self._asked_back:
            return
        busy = [stream for stream in self._streams.values() if not stream.has_nothing_to_give]
        if busy:
            most = max(busy, key=lambda stream: sum(len(work.sample_indices) for work in stream.owed.values()))
            self._asked_back[most.handle.give_back.remote()] = most

    def _take_back(self, ref: ray.ObjectRef, stream: Stream) -> None:
        try:
            given: dict[int, list[int]] = value_of(ref, "rollout", stream.index)
        except WorkerLost:
            given = {}  # its stream says so too, unless it has ended
        if stream.is_lost:
            return  # all it owed has been dealt again
        stream.has_nothing_to_give = not given
        for prompt_index, indices in given.items():
            self._backlog.append(settle(stream.owed, prompt_index, indices))
            self.num_moved += len(indices)
        if stream not in self._streams.values():
            self._draw_what_is_owed(stream)
        if not given:
            self._ask_for_work()


def _drain(generator: Any) -> None:
    """Take what a halted stream still yields, so that its worker gets to its end."""
    while True:
        ready, _ = ray.wait([generator], timeout=DRAIN_S)
        if not ready:
            return  # its worker is silent: found out when it is called next
        try:
            next(generator)
        except (StopIteration, ray.exceptions.RayError):
            return

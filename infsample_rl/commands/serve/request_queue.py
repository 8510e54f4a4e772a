"""The engine of a server: requests wait in line, and those with equal sampling parameters decode together."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from infsample_rl.commands.serve.parameters import WITHOUT_SEED, SampleRequest
from infsample_rl.rollout.engine.rollout_engine import RolloutEngine
from infsample_rl.types import Completion


class QueueFull(Exception):
    """As many requests wait as may."""


class QueueClosed(Exception):
    """The engine answers nobody any more."""


@dataclass(eq=False)
class Waiting:
    """A request in line, or at the engine."""

    request: SampleRequest
    completions: Future[list[Completion]] = field(default_factory=Future)
    is_abandoned: bool = False  # nobody wants its answer any more

    def __post_init__(self) -> None:
        """A client that goes away cannot cancel it: the engine answers it like its companions."""
        self.completions.set_running_or_notify_cancel()


class RequestQueue:
    """Requests, and the thread that has the engine."""

    def __init__(self, engine: RolloutEngine, seed: int, *, most_waiting: int) -> None:
        """`seed`: of the noise, with that of a request."""
        self._engine, self._seed, self._most_waiting = engine, seed, most_waiting
        self._line: deque[Waiting] = deque()
        self._changed, self._is_closed = threading.Condition(), False
        self._numbers = itertools.count(WITHOUT_SEED)
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: SampleRequest) -> Waiting:
        """Let a request wait. QueueFull where too many do."""
        with self._changed:
            if self._is_closed:
                raise QueueClosed
            if sum(not waiting.is_abandoned for waiting in self._line) >= self._most_waiting:
                raise QueueFull
            waiting = Waiting(request)
            self._line.append(waiting)
            self._changed.notify()
        return waiting

    def close(self) -> None:
        """Whoever waits is told that it is over; returns when the engine has stopped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        for waiting in self._line:
            waiting.completions.set_exception(QueueClosed())

    def _serve(self) -> None:
        while batch := self._take():
            self._answer(batch)

    def _answer(self, batch: list[Waiting]) -> None:
        """Whatever goes wrong is told to whose fault it is alone, and the next requests are served."""
        try:
            self._decode(batch)
        except Exception as error:
            left = [waiting for waiting in batch if not waiting.completions.done()]
            if len(batch) == 1 or isinstance(error, QueueClosed):
                for waiting in left:
                    waiting.completions.set_exception(error)
                return
            for waiting in left:
                self._answer([waiting])

    def _take(self) -> list[Waiting]:
        """The first in line, and the others that may decode beside it; waits for one. None: it is over."""
        with self._changed:
            while True:
                line = [waiting for waiting in self._line if not waiting.is_abandoned]
                if self._is_closed or line:
                    break
                self._line.clear()
                self._changed.wait()
            batch, seeds = list[Waiting](), set[int]()
            for waiting in [] if self._is_closed else line:
                request = waiting.request
                if request.config == line[0].request.config and request.seed not in seeds:
                    batch.append(waiting)
                    seeds |= set() if request.seed is None else {request.seed}
            self._line = deque(waiting for waiting in line if waiting not in batch)
            return batch

    def _decode(self, batch: list[Waiting]) -> None:
        """The noise of a request is of its seed: no company changes what it gets."""
        self._engine.sample_by(batch[0].request.config)
        numbered = {
            next(self._numbers) if (seed := waiting.request.seed) is None else seed: waiting for waiting in batch
        }
        requests = [waiting.request for waiting in batch]
        found: dict[int, list[Completion]] = {number: [] for number in numbered}
        stream = self._engine.stream(
            [request.prompt_ids for request in requests],
            self._seed,
            prompt_indices=list(numbered),
            sample_indices=[list(range(request.count)) for request in requests],
            evaluation=True,
            is_halted=lambda: self._is_closed or all(waiting.is_abandoned for waiting in batch),
        )
        for micro_group in stream:
            if micro_group:
                number = micro_group[0].prompt_index
                found[number] += micro_group
                if len(found[number]) == numbered[number].request.count:
                    ordered = sorted(found[number], key=lambda completion: completion.sample_index)
                    numbered[number].completions.set_result(ordered)
        if self._is_closed:
            raise QueueClosed

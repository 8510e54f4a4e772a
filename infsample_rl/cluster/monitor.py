"""What is seen of a run's processes from outside: where it stands, and what its workers do."""

from __future__ import annotations

import time
from typing import NamedTuple

from infsample_rl.cluster.calls import Calls, Requests
from infsample_rl.cluster.streams import RolloutStreams
from infsample_rl.cluster.traffic import Traffic
from infsample_rl.cluster.weight_delivery import WeightDelivery
from infsample_rl.config import Config
from infsample_rl.types import ClusterNow, RolloutNow, WorkerPhases

WORKERS_SHOWN = 8  # rollout workers that a screen has room for
ANSWER_KEPT_S = 10.0  # a worker that says nothing for so long is not shown


class ClusterCounts(NamedTuple):
    """Sums since the start, at one moment."""

    at: float  # time.time()
    waited_s: float  # in which the driver waited for something to arrive
    rollout_workers: int  # that can be dealt work now
    samples_moved: int  # that a rollout worker gave back, not having started them, for an idle one
    restarts: int


class Monitor:
    """Sees the parts of a cluster, changes none."""

    def __init__(
        self, config: Config, calls: Calls, weights: WeightDelivery, rollout: RolloutStreams, traffic: Traffic
    ) -> None:
        self._config, self._calls, self._weights = config, calls, weights
        self._rollout, self._traffic = rollout, traffic
        self._phases = Requests(lambda worker: worker.phases.remote())
        self._rows = Requests(lambda worker: worker.now.remote())
        self._rows_said: dict[int, tuple[float, RolloutNow]] = {}  # by worker, when and what

    def counts(self) -> ClusterCounts:
        """Where the run stands now."""
        return ClusterCounts(
            time.time(),
            self._calls.waited_s,
            len(self._weights.holders),
            self._rollout.num_moved,
            self._calls.workers.restarts.total,
        )

    def ask_phases(self, *, rollout: bool = False) -> None:
        """Ask workers for their phases(). `rollout`: also those that decode, who tell theirs when they end."""
        telling = set() if rollout else self._rollout.decoding
        roles = ("learner", "reward", "reference")
        self._phases.ask(
            [
                handle
                for role in (roles if self._config.shares_process else ("rollout", *roles))
                for index, handle in self._calls.workers.all(role).items()
                if role != "rollout" or index not in telling
            ]
        )

    def phases(self, *, wait_s: float = 0.0) -> list[WorkerPhases]:
        """What workers told at the end of their streams, and what ask_phases() brings within `wait_s` seconds."""
        return [*self._rollout.take_phases(), *self._phases.take(wait_s).values()]

    def now(self) -> ClusterNow:
        """What is in flight, and the rows as the first rollout workers said last. For one thread, any; never waits."""
        at = time.monotonic()
        self._rows_said |= {answer.worker: (at, answer) for answer in self._rows.take().values()}
        self._rows.ask(list(self._calls.workers.all("rollout").values())[:WORKERS_SHOWN])
        rows = [said for _, (since, said) in sorted(self._rows_said.items()) if at - since < ANSWER_KEPT_S]
        return ClusterNow(rows, self._rollout.num_owed, self._traffic.num_in_flight())

"""What is seen of a run's processes from outside: where it stands, what its workers do, metrics of the driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray

from infsample_rl.cluster.calls import Calls, open_at_once
from infsample_rl.cluster.micro_groups import MicroGroups
from infsample_rl.cluster.streams import RolloutStreams
from infsample_rl.cluster.telemetry import MetricsExporter, Statistics, metrics_addresses
from infsample_rl.cluster.traffic import Traffic
from infsample_rl.cluster.weight_delivery import WeightDelivery
from infsample_rl.config import Config
from infsample_rl.types import ClusterNow, MaybeNone, RolloutNow, WorkerPhases

WORKERS_SHOWN = 8  # rollout workers that a screen has room for
ANSWER_KEPT_S = 10.0  # a worker that says nothing for so long is not shown


class ClusterCounts(NamedTuple):
    """Sums since the start, at one moment."""

    at: float  # time.time()
    waited_s: float  # in which the driver waited for something to arrive
    rollout_workers: int  # that can be dealt work now
    micro_groups: int  # that have arrived
    samples_moved: int  # that a rollout worker gave back, not having started them, for an idle one
    restarts: int


class Requests:
    """Asks workers something without waiting for them. `question`: of a worker, the reference of its answer."""

    def __init__(self, question: Callable[[Any], ray.ObjectRef]) -> None:
        self._question = question
        self._asked: dict[ray.ObjectRef, Any] = {}  # answer to come -> worker

    def ask(self, workers: list[Any]) -> None:
        """Ask every worker that has answered the question before."""
        waiting = set(self._asked.values())
        self._asked |= {self._question(worker): worker for worker in workers if worker not in waiting}

    def take(self, wait_s: float = 0.0) -> list[Any]:
        """Answers that are there within `wait_s` seconds; a worker that died has none."""
        if not self._asked:
            return []
        ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=wait_s)
        opened, answers = open_at_once(ready), []
        for ref in ready:
            del self._asked[ref]
            try:
                answers.append(opened[ref] if opened else ray.get(ref))
            except ray.exceptions.RayError:
                continue  # said where its other results are opened
        return answers


class Monitor:
    """Sees the parts of a cluster, changes none."""

    def __init__(
        self,
        config: Config,
        calls: Calls,
        weights: WeightDelivery,
        rollout: RolloutStreams,
        micro_groups: MicroGroups,
        traffic: Traffic,
    ) -> None:
        self._config, self._calls, self._weights = config, calls, weights
        self._rollout, self._micro_groups, self._traffic = rollout, micro_groups, traffic
        self._phases = Requests(lambda worker: worker.phases.remote())
        self._rows = Requests(lambda worker: worker.now.remote())
        self._rows_said: dict[int, tuple[float, RolloutNow]] = {}  # by worker, when and what
        self._started_at = time.monotonic()
        self.metrics: MetricsExporter | MaybeNone = None  # once started

    def start(self) -> None:
        """Begin to export the driver's metrics, and say where they are."""
        self.metrics = MetricsExporter(self._statistics, run=self._config.run.name, role="driver", worker=0)
        self._calls.note("metrics: " + ", ".join(metrics_addresses()))

    def counts(self) -> ClusterCounts:
        """Where the run stands now."""
        return ClusterCounts(
            time.time(),
            self._calls.waiting.seconds,
            len(self._weights.holders),
            self._micro_groups.num_arrived,
            self._rollout.num_moved,
            self._calls.workers.restarts.total,
        )

    def ask_phases(self, *, rollout: bool = False) -> None:
        """Ask workers for their phases; they come out of phases(). `rollout`: also rollout workers that decode, who
        tell theirs when they end."""
        telling = set() if rollout else self._rollout.decoding
        roles = ("learner", "reward", "reference")
        self._phases.ask(
            [
                handle
                for role in (roles if self._config.cluster.colocate else ("rollout", *roles))
                for index, handle in self._calls.workers.all(role).items()
                if role != "rollout" or index not in telling
            ]
        )

    def phases(self, *, wait_s: float = 0.0) -> list[WorkerPhases]:
        """What workers have told at the end of their streams, and what those that were asked have answered within
        `wait_s` seconds."""
        return self._rollout.take_phases() + self._phases.take(wait_s)

    def now(self) -> ClusterNow:
        """What is in flight, and the rows as the first rollout workers said last; asks them again and waits for nobody.
        For one thread, any."""
        at = time.monotonic()
        self._rows_said |= {answer.worker: (at, answer) for answer in self._rows.take()}
        self._rows.ask(list(self._calls.workers.all("rollout").values())[:WORKERS_SHOWN])
        rows = [said for _, (since, said) in sorted(self._rows_said.items()) if at - since < ANSWER_KEPT_S]
        return ClusterNow(rows, self._rollout.num_owed, self._traffic.num_in_flight())

    def _statistics(self) -> Statistics:
        """By metric name; asked from the exporter's thread."""
        pending, restarts = self._traffic.num_in_flight(), dict(self._calls.workers.restarts.by_part)
        return {
            "driver_busy_seconds": time.monotonic() - self._started_at - self._calls.waiting.seconds,
            "workers_decoding": len(self._rollout.streams),
            "micro_groups_held": len(self._micro_groups.payloads),
            "micro_groups_arrived": self._micro_groups.num_arrived,
            "samples_moved": self._rollout.num_moved,
            **{("calls_in_flight", role): float(count) for role, count in pending.items()},
            **{("restarts", part): float(count) for part, count in restarts.items()},
        }

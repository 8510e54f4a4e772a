"""The workers of fake_workers.py as Ray actors, several in one process where there are more than a machine can have
processes.

The wrappers are those of infsample_rl/cluster/actors.py; only what they wrap is another. A process with several workers
runs their calls in threads; its phases are then told by whichever worker is asked first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import ray

from benchmarks.fake_workers import FakeLearnerWorker, FakeReferenceWorker, FakeRewardWorker, FakeRolloutWorker, Pace
from infsample_rl.cluster.actors import LearnerCalls, ReferenceCalls, RewardCalls, RolloutCalls
from infsample_rl.cluster.worker_secrets import Secrets
from infsample_rl.config import Config


class FakeRolloutCalls(RolloutCalls):
    """As RolloutCalls."""

    def __init__(self, pace: Pace, secrets: Secrets, config: Config, index: int):
        self.rollout = FakeRolloutWorker(config, index, pace)
        self.observe(config, "rollout", index, self.rollout.statistics)


class FakeRewardCalls(RewardCalls):
    """As RewardCalls."""

    def __init__(self, pace: Pace, secrets: Secrets, config: Config, index: int):
        self.worker = FakeRewardWorker(config)
        self.observe(config, "reward", index, self.worker.statistics)


class FakeReferenceCalls(ReferenceCalls):
    """As ReferenceCalls."""

    def __init__(self, pace: Pace, secrets: Secrets, config: Config, index: int):
        self.worker = FakeReferenceWorker(config)
        self.observe(config, "reference", index, dict)


class FakeLearnerCalls(LearnerCalls):
    """As LearnerCalls."""

    def __init__(self, pace: Pace, secrets: Secrets, config: Config, rank: int, world_size: int, total_steps: int):
        self.learner = FakeLearnerWorker(config, rank, world_size, total_steps, pace)
        self.observe(config, "learner", rank, self.learner.statistics)


CALLS = {
    "rollout": FakeRolloutCalls,
    "reward": FakeRewardCalls,
    "reference": FakeReferenceCalls,
    "learner": FakeLearnerCalls,
}


def fake_actors(pace: Pace, *, workers_per_process: int) -> dict[str, Any]:
    """For Cluster(actors=...): fake workers of every role but colocated ones; rollout workers and learner ranks share
    processes."""
    shared = {"rollout": workers_per_process, "learner": workers_per_process}
    return {role: FakeActors(role, pace, shared.get(role, 1)) for role in CALLS}


@ray.remote(concurrency_groups={"building": 1})
class Host:
    """Several workers of one role."""

    def __init__(self, role: str, pace: Pace):
        self._build, self._pace, self._workers = CALLS[role], pace, dict[int, Any]()
        self._changed = threading.Condition()  # calls run in threads, in any order

    @ray.method(concurrency_group="building")  # calls that wait for their worker may take every other thread
    def add(self, place: int, *arguments: Any) -> None:
        """Build a worker."""
        with self._changed:
            self._workers[place] = self._build(self._pace, *arguments)
            self._changed.notify_all()

    def _worker(self, place: int) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: place in self._workers)
            return self._workers[place]

    def call(self, which: str, *arguments: Any) -> Any:
        """A call of one of them, by place and name: "3 score"."""
        place, name = which.split()
        return getattr(self._worker(int(place)), name)(*arguments)

    def stream(self, which: str, *arguments: Any) -> Iterator[Any]:
        """A call that yields."""
        yield from self.call(which, *arguments)


class FakeActors:
    """What cluster.py takes for an actor class."""

    def __init__(self, role: str, pace: Pace, per_process: int):
        self._role, self._pace, self._per_process = role, pace, per_process
        self._built = 0
        self._host: Any = None

    def options(self, **resources: Any) -> FakeActors:
        """Reserved is nothing: nothing is computed."""
        return self

    def remote(self, *arguments: Any) -> FakeHandle:
        """Another worker, in the process of the last one if there is room."""
        place = self._built % self._per_process
        if place == 0:  # two calls of each worker may run at once: a stream, and a question
            self._host = Host.options(num_cpus=0, max_concurrency=2 * self._per_process).remote(self._role, self._pace)
        self._built += 1
        self._host.add.remote(place, *arguments)
        return FakeHandle(self._host, place)


class FakeHandle:
    """What cluster.py takes for an actor handle: worker.method.options(...).remote(...)."""

    def __init__(self, host: Any, place: int):
        self._host, self._place = host, place

    def __getattr__(self, name: str) -> FakeMethod:
        return FakeMethod(getattr(self._host, "stream" if name == "stream" else "call"), self._place, name)


class FakeMethod:
    """A method of one of a process's workers."""

    def __init__(self, method: Any, place: int, name: str):
        self._method, self._place, self._name = method, place, name

    def options(self, **options: Any) -> FakeMethod:
        """As of a Ray actor's method."""
        return FakeMethod(self._method.options(**options), self._place, self._name)

    def remote(self, *arguments: Any) -> Any:
        """As of a Ray actor's method."""
        return self._method.remote(f"{self._place} {self._name}", *arguments)

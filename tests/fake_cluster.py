"""Stand-ins that several tests share: the parts of a run without processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from infsample_rl.cluster.arrivals import Arrival, MicroGroupArrival, RewardArrival, RowArrival
from infsample_rl.cluster.interruption import Interruption
from infsample_rl.cluster.monitor import ClusterCounts
from infsample_rl.cluster.workers import Restarts, StepLost
from infsample_rl.config import Config
from infsample_rl.types import (
    ClusterNow,
    Completion,
    LossTotals,
    Prompt,
    PublishedProbe,
    RewardResult,
    RolloutWork,
    RowWork,
    WeightSyncReport,
)
from tests.fakes import header
from tests.tiny_models import finished


class FakeCluster:
    """A Cluster without processes: every sample has as many tokens as its index plus 2, its index as its reward.

    `calls` are the names of the methods that the driver called, in their order. `on[NAME]` is called when NAME is, with
    the cluster: it may raise, or send SIGTERM.
    """

    def __init__(
        self, config: Config, *, total_steps: int, note: Callable[[str], None], interruption: Interruption
    ) -> None:
        self.calls: list[str] = []
        self.on: dict[str, Callable[[FakeCluster], None]] = {}
        self.version = 0
        self.broken = ""  # why every reward fails from now on
        self.traffic = SimpleNamespace(
            arrivals=self._arrivals, score=self._score, learn=self._learn, abandon=self._abandon
        )
        self.rollout = SimpleNamespace(start=self._start_rollout, ends=[])
        self.learner = SimpleNamespace(step=self._optimizer_step, save=self._save, facts={})
        self.weights = SimpleNamespace(publish=self._publish, release=lambda: self._called("release"), holders={0})
        self.lengths = SimpleNamespace(ask=lambda: None, take=lambda: [])
        self.micro_groups = SimpleNamespace(
            completions=lambda key: self._micro_groups.get(key), forget=self._forget, bring=self._bring
        )
        self.monitor = SimpleNamespace(
            counts=lambda: ClusterCounts(time.time(), 0.0, 1, 0, self.restarts.total),
            ask_phases=lambda *, rollout=False: None,
            phases=lambda *, wait_s=0.0: [],
            now=lambda: ClusterNow([], 0, {}),
        )
        self.restarts = Restarts(config.cluster.max_restarts, note, lambda seconds: None, str)
        self.interruption = interruption
        self._micro_groups: dict[int, list[Completion]] = {}
        self._in_flight: deque[Arrival] = deque()

    def sigterm(self, seconds_ago: float = 0.0) -> None:
        """The run is told to end."""
        self.interruption.requested_at = time.monotonic() - seconds_ago

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.on:
            self.on[name](self)

    def reach(self) -> None:
        self._called("reach")

    def start(self, checkpoint: str | None) -> None:
        self._called("start")

    def stop(self) -> None:
        self._called("stop")

    def check_nodes(self) -> None:
        self._called("check_nodes")

    def return_to(self, checkpoint: str | None, reason: str) -> None:
        self._in_flight.clear()
        self.restarts.begin("the learner", reason)
        self._called("return_to")

    def _abandon(self, *, for_good: bool = False, keep: Collection[int] = ()) -> None:
        self._in_flight.clear()
        self._forget([key for key in self._micro_groups if key not in keep])
        self._called("abandon_step")

    def _publish(self, version: int, probe: PublishedProbe | None) -> WeightSyncReport:
        self._called("publish_weights")
        self.interruption.check()
        self.version = version
        return WeightSyncReport(version=version, num_bytes=8, seconds=0.1)

    def _start_rollout(self, dealt: list[list[RolloutWork]], *, step: int, evaluation: bool = False) -> None:
        self._called("evaluate" if evaluation else "start_rollout")
        for work in (work for part in dealt for work in part):
            completions = [self._completion(work.prompt_index, index) for index in work.sample_indices]
            self._in_flight.append(self._enter(completions))

    def _bring(self, completions: list[Completion], prompt: Prompt) -> MicroGroupArrival:
        self._called("bring")
        return self._enter(completions)

    def _enter(self, completions: list[Completion]) -> MicroGroupArrival:
        key, first = len(self.calls) * 1000 + len(self._micro_groups), completions[0]
        self._micro_groups[key] = completions
        lengths = [len(completion.token_ids) for completion in completions]
        told = {"lengths": lengths, "policy_version": first.policy_version, "finished_at": time.time()}
        samples = [completion.sample_index for completion in completions]
        return MicroGroupArrival(key, header(first.prompt_index, samples, **told))

    def _completion(self, prompt_index: int, index: int) -> Completion:
        return finished(prompt_index, index, [5] * (index + 2), 0.0, policy_version=self.version)

    def _score(self, key: int, prompt: Prompt) -> None:
        rewards = [None if self.broken else float(completion.sample_index) for completion in self._micro_groups[key]]
        failures, now = [f"gsm8k: {self.broken}"] * bool(self.broken), time.time()
        result = RewardResult(rewards=rewards, components={}, failures=failures, started_at=now, finished_at=now)
        self._in_flight.append(RewardArrival(key, result))

    def _learn(self, rank: int, work: RowWork, keys: list[int]) -> None:
        self._in_flight.append(RowArrival(rank, {"started_at": time.time(), "ended_at": time.time()}))

    def _arrivals(self, *, until_learner_is_idle: bool = False) -> Iterator[Arrival]:
        self._called("arrivals_of_rows" if until_learner_is_idle else "arrivals")
        self.interruption.check()
        while any(isinstance(arrival, RowArrival) or not until_learner_is_idle for arrival in self._in_flight):
            yield self._in_flight.popleft()
            self.interruption.check()

    def _optimizer_step(self, totals: LossTotals, *, is_last: bool) -> dict[str, float | None]:
        self._called("optimizer_step")
        return {"learner/loss": 0.5, "learner/skipped_updates": 0.0, "learner/lr": 1e-3}

    def _save(self, folder: str) -> None:
        self._called("save")
        (Path(folder) / "model.safetensors").write_text(f"weights {self.version}")

    def _forget(self, keys: list[int]) -> None:
        for key in keys:
            self._micro_groups.pop(key, None)


def at_call(number: int, act: Callable[[FakeCluster], Any]) -> Callable[[FakeCluster], None]:
    """A value of FakeCluster.on that acts at the `number`-th call alone, counted from 1."""
    calls = iter(range(1, 1_000_000))

    def called(cluster: FakeCluster) -> None:
        if next(calls) == number:
            act(cluster)

    return called


def lose_step(cluster: FakeCluster) -> None:
    """A learner rank is gone."""
    raise StepLost("learner rank 0: its process died")

"""Every worker as a Ray actor. Workers are plain classes that know nothing of Ray, and are imported where they run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ray

from infsample_rl import lasting_imports
from infsample_rl.cluster.messages import Payload, open_micro_group, seal, seal_micro_groups, unseal
from infsample_rl.cluster.observed import Observed, with_control, with_groups
from infsample_rl.cluster.reference_actors import ReferenceCalls
from infsample_rl.cluster.worker_secrets import Secrets
from infsample_rl.config import Config
from infsample_rl.observe.phases import phase
from infsample_rl.rollout.length_prediction.messages import LengthReport, PublishedLengths
from infsample_rl.types import (
    Completion,
    LossTotals,
    MicroGroupHeader,
    ReferenceResult,
    RolloutNow,
    RowWork,
    StreamEnd,
    StreamOrder,
    WeightManifest,
    WeightSyncReport,
)

if TYPE_CHECKING:  # a reward worker needs no torch for it
    from infsample_rl.model.weight_sync.store import StoreAddress

DECODE_STEPS_PER_TURN = 8  # running steps between two learner rows, in a process that does both

Items = Iterator[MicroGroupHeader | list[Completion]]
Published = tuple[WeightManifest, list[ray.ObjectRef]]  # with flat buckets


class RolloutCalls(Observed):
    """A rollout worker."""

    def __init__(self, secrets: Secrets, config: Config, index: int):
        self.begin(secrets)
        with lasting_imports():
            from infsample_rl.cluster.environments import environments_of
            from infsample_rl.plan.learner_memory import resting_bytes
            from infsample_rl.rollout.worker import RolloutWorker

        reserved = resting_bytes(config) if config.takes_turns and config.rollout.takes_free_memory else 0
        self.rollout = RolloutWorker(config, index, reserved_bytes=reserved, environments=environments_of(config))
        self.observe("rollout", index)

    def stream(self, order: bytes) -> Iterator[bytes | MicroGroupHeader | list[Completion] | StreamEnd]:
        """Of a sealed StreamOrder: micro-groups as seal_micro_groups() sends them, until halt(number), and the end."""
        asked: StreamOrder = unseal(order)
        yield from seal_micro_groups(self._items(asked))
        phases = self.phases()  # type: ignore[operator]  # ray.method() leaves it a method, whatever its hints say
        yield StreamEnd(worker=self._index, stats=self.rollout.stats(), phases=phases)

    def _items(self, asked: StreamOrder) -> Items:
        return self.rollout.stream(asked.work, step=asked.step, evaluation=asked.evaluation, number=asked.number)

    def load_weights(self, published: Published, probe: PublishedLengths | None) -> WeightSyncReport:
        """Copy published weights in, one bucket at a time, and the length probe where the run has one."""
        manifest, buckets = published
        return self.rollout.load_weights(manifest, (ray.get(bucket) for bucket in buckets), probe)

    def rest(self) -> None:
        """Give the learner the device, until weights come."""
        self.rollout.rest()

    def close(self) -> None:
        """End what the engine has started, before Ray ends this process without asking."""
        self.rollout.close()

    def join_weight_link(self, meeting: StoreAddress, member: int, members: int) -> None:
        """The line to learner rank 0; every member must be asked."""
        self.rollout.join_weight_link(meeting, member, members)

    def receive_weights(self, version: int, probe: PublishedLengths | None) -> WeightSyncReport:
        """Take what learner rank 0 sends at the same time."""
        return self.rollout.receive_weights(version, probe)

    def report_lengths(self) -> LengthReport:
        """What the length probe has seen since the last time."""
        return self.rollout.learn()

    @ray.method(concurrency_group="control")
    def progress(self) -> int:
        """Running steps and environments' replies since the start."""
        return self.rollout.progress()

    @ray.method(concurrency_group="control")
    def now(self) -> RolloutNow:
        """The rows that decode and how full the KV pool is."""
        return self.rollout.now()

    @ray.method(concurrency_group="control")
    def halt(self, number: int) -> None:
        """End the stream of this number, and those before, also one that has not begun."""
        self.rollout.halt(number)

    @ray.method(concurrency_group="control")
    def give_back(self) -> dict[int, list[int]]:
        """Half of the samples that have not started, for another worker: sample indices by prompt_index."""
        return self.rollout.give_back()


class RewardCalls(Observed):
    """A reward worker; returns floats only."""

    def __init__(self, secrets: Secrets, config: Config, index: int):
        self.begin(secrets)
        with lasting_imports():
            from infsample_rl.reward.worker import RewardWorker

        self.worker = RewardWorker(config)
        self.observe("reward", index)

    @ray.method(concurrency_group="control")
    def progress(self) -> int:
        """Function calls and micro-groups since the start."""
        return self.worker.progress()

    def score(self, prompts: list[bytes], *payloads: Payload) -> bytes:
        """Rewards of micro-groups, one of each sealed Prompt: a sealed list[RewardResult]."""
        asked = zip(prompts, payloads, strict=True)
        return seal(self.worker.score([(unseal(prompt), open_micro_group(payload)) for prompt, payload in asked]))


class LearnerCalls(Observed):
    """One learner rank."""

    def __init__(self, secrets: Secrets, config: Config, rank: int, world_size: int, total_steps: int):
        self.begin(secrets)
        with lasting_imports():
            from infsample_rl.learner.worker import LearnerWorker

        self.learner = LearnerWorker(config, rank, world_size, total_steps)
        self.observe("learner", rank)

    def host_store(self) -> StoreAddress:
        """Where the other ranks meet rank 0."""
        return self.learner.host_store(ray.util.get_node_ip_address())

    def setup(self, checkpoint: str | None, meeting: StoreAddress) -> dict[str, Any]:
        """Join the process group, load and shard the policy."""
        return self.learner.setup(checkpoint, meeting)

    def learn_rows(self, rows: bytes, *payloads: Any) -> list[dict[str, float]]:
        """Forward and backward of a sealed list[RowWork], or log-probabilities before the step's first update."""
        asked: list[RowWork] = unseal(rows)
        references = [payload for payload in payloads if isinstance(payload, ReferenceResult)]
        opened = [open_micro_group(payload) for payload in payloads if not isinstance(payload, ReferenceResult)]
        return [self._learn_row(row, opened, references) for row in asked]

    def _learn_row(
        self, work: RowWork, micro_groups: list[list[Completion]], references: list[ReferenceResult]
    ) -> dict[str, float]:
        from infsample_rl.learner.row_plan import assemble

        started, report = time.time(), {}
        samples = None if work.row is None else assemble(work.row, work.prompt_ids, micro_groups, references)
        if work.totals is None:
            self.learner.remember(samples, work.row_id)
        else:
            report = self.learner.accumulate(samples, work.totals, work.row_id)
        self._done += 1
        return report | {"started_at": started, "ended_at": time.time()}

    def step(self, totals: LossTotals, is_last: bool) -> dict[str, float | None]:
        """Clip, step the optimizer, report."""
        return self.learner.step(totals, is_last=is_last)

    @phase("sync")
    def publish(self, version: int) -> Published:
        """Weights from rank 0, put into the object store a bucket at a time; every rank must be asked."""
        manifest, buckets = self.learner.publisher.export(version)
        published = manifest, [ray.put(bucket) for bucket in buckets]
        self.learner.make_room()
        return published

    def host_weight_link(self) -> StoreAddress:
        """Where the rollout workers meet rank 0."""
        return self.learner.publisher.host_link(ray.util.get_node_ip_address())

    def join_weight_link(self, members: int) -> None:
        """Rank 0's line to the rollout workers; every member must be asked."""
        self.learner.publisher.join_link(members)

    def send_weights(self, version: int) -> WeightSyncReport | None:
        """Weights to rollout workers that receive at the same time; every rank must be asked."""
        return self.learner.publisher.send(version)

    def save(self, folder: str) -> None:
        """Write the checkpoint; every rank must be asked."""
        self.learner.save(folder)
        self.learner.make_room()


# Of the two calls named join_weight_link it asks neither: its engine gets the weights in its own process.
class ColocatedCalls(RolloutCalls, LearnerCalls):  # type: ignore[misc]
    """A rollout worker and a learner rank that take turns: so many running steps, a learner row, and so on."""

    def __init__(self, secrets: Secrets, config: Config, rank: int, world_size: int, total_steps: int):
        self.begin(secrets)
        with lasting_imports():
            from infsample_rl.cluster.colocated import ColocatedWorker, TurnLock

        self.both = ColocatedWorker(config, rank, world_size, total_steps)
        self.learner, self.turn = self.both.learner, TurnLock()
        self.observe("colocated", rank)

    def setup(self, checkpoint: str | None, meeting: StoreAddress) -> dict[str, Any]:
        """Join the process group, load and shard the policy, build the engine."""
        found = self.both.setup(checkpoint, meeting)
        self.rollout = self.both.rollout
        return found

    @ray.method(concurrency_group="control")
    def progress(self) -> int:
        """Running steps, environments' replies and rows since the start."""
        return self.rollout.progress() + self._done

    def _items(self, asked: StreamOrder) -> Items:
        """Learner rows run in the pauses."""
        items = self.rollout.stream(**asked._asdict(), pause_every=DECODE_STEPS_PER_TURN)
        while True:
            with self.turn:
                item = next(items, None)
            if item is None:
                return
            if item:
                yield item

    def _learn_row(self, *arguments: Any) -> dict[str, float]:
        """As LearnerCalls._learn_row, between running steps."""
        with self.turn:
            return super()._learn_row(*arguments)

    def publish_here(self, version: int, probe: PublishedLengths | None) -> WeightSyncReport:
        """Let the engine sample with the learner's weights. Every rank must be asked."""
        return self.both.publish(version, probe)


ACTORS = {
    "rollout": with_control(RolloutCalls),
    "reward": with_control(RewardCalls),
    "reference": with_control(ReferenceCalls),
    "learner": with_control(LearnerCalls),
    # Learner calls of a process that also samples run beside its stream, in their order.
    "colocated": with_groups(concurrency_groups={"control": 2, "learner": 1})(ColocatedCalls),
}

"""Every worker as a Ray actor: opens the references it is handed, exports what the worker returns. Started by cluster.py.

Workers are plain classes that know nothing of Ray; they are imported where they run, so the driver loads none of them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray

from infsample_rl.config import Config
from infsample_rl.types import (
    Completion,
    LossTotals,
    MicroGroupHeader,
    ProbeReport,
    Prompt,
    PublishedProbe,
    ReferenceResult,
    RewardResult,
    RolloutWork,
    SampleSpec,
    WeightManifest,
)


@ray.remote(concurrency_groups={"control": 1})
class RolloutActor:
    """A rollout worker; progress() answers while stream() runs."""

    def __init__(self, config: Config, index: int):
        from infsample_rl.rollout.worker import RolloutWorker

        self.worker = RolloutWorker(config, index)

    def stream(self, work: list[RolloutWork], step: int, evaluation: bool) -> Iterator[MicroGroupHeader | list[Completion]]:
        """Header, micro-group, header, micro-group, ..."""
        yield from self.worker.stream(work, step=step, evaluation=evaluation)

    def load_weights(self, manifest: WeightManifest, buckets: list[ray.ObjectRef], probe: PublishedProbe | None) -> int:
        """Copy published weights in, and the length probe where the run has one; returns their version."""
        return self.worker.load_weights(manifest, ray.get(buckets), probe)

    def learn(self) -> ProbeReport:
        """What the length probe has seen since the last time."""
        return self.worker.learn()

    def stats(self) -> dict[str, float]:
        """Figures of the last stream."""
        return self.worker.stats()

    @ray.method(concurrency_group="control")
    def progress(self) -> int:
        """Running steps since the start: grows while the worker is alive and decoding."""
        return self.worker.progress()


@ray.remote
class RewardActor:
    """A reward worker; returns floats only."""

    def __init__(self, config: Config):
        from infsample_rl.reward.worker import RewardWorker

        self.worker = RewardWorker(config)

    def score(self, prompt: Prompt, completions: list[Completion]) -> RewardResult:
        """Rewards of one micro-group."""
        return self.worker.score(prompt, completions)

    def ready(self) -> bool:
        """Answers once the worker has started."""
        return True


@ray.remote
class ReferenceActor:
    """The frozen policy."""

    def __init__(self, config: Config):
        from infsample_rl.reference.worker import ReferenceWorker

        self.worker = ReferenceWorker(config)

    def logprobs(self, prompt: Prompt, completions: list[Completion]) -> tuple[list[float], ReferenceResult]:
        """The floats the driver reads, and the log-probabilities it does not open."""
        result = self.worker.logprobs(prompt, completions)
        return result.kl_sums, result

    def ready(self) -> bool:
        """Answers once the model is loaded."""
        return True


@ray.remote
class LearnerActor:
    """One learner rank."""

    def __init__(self, config: Config, rank: int, world_size: int, total_steps: int):
        from infsample_rl.learner.worker import LearnerWorker

        self.worker = LearnerWorker(config, rank, world_size, total_steps)

    def address(self) -> tuple[str, int]:
        """Host and a free port for the process group, asked of rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def setup(self, host: str, port: int, checkpoint: str | None) -> dict[str, Any]:
        """Join the process group, load and shard the policy."""
        return self.worker.setup(host, port, checkpoint)

    def accumulate(self, row: list[SampleSpec] | None, prompt_ids: dict[int, np.ndarray], totals: LossTotals, *payloads: Any) -> dict[str, float]:
        """One wave: forward and backward of one packed row, of weight zero when this rank has none."""
        from infsample_rl.learner.row_plan import assemble

        micro_groups = [payload for payload in payloads if isinstance(payload, list)]
        references = [payload for payload in payloads if isinstance(payload, ReferenceResult)]
        samples = None if row is None else assemble(row, prompt_ids, micro_groups, references)
        return self.worker.accumulate(samples, totals)

    def step(self, totals: LossTotals) -> dict[str, float]:
        """Clip, step the optimizer, report."""
        return self.worker.step(totals)

    def publish(self, version: int) -> tuple[WeightManifest, list[ray.ObjectRef]] | None:
        """Weights as references to flat buckets, from rank 0; every rank must be asked."""
        exported = self.worker.export_weights(version)
        if exported is None:
            return None
        manifest, buckets = exported
        return manifest, [ray.put(bucket) for bucket in buckets]

    def save(self, folder: str) -> None:
        """Write the checkpoint; every rank must be asked."""
        self.worker.save(folder)

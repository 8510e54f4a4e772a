"""Workers that only pretend: they speak the real workers' interface and send records of true size, but decode and train
nothing.

What is left of a step is the system itself, the driver, Ray and the object store, which benchmarks.scale measures.
Plain classes, no torch and no Ray; tests/benchmarks/test_bench_scale.py makes the same calls on these and on the real
ones.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from infsample_rl.config import Config
from infsample_rl.observe.phases import phase
from infsample_rl.types import (
    Completion,
    LossTotals,
    MicroGroupHeader,
    ProbeReport,
    ProbeStatistics,
    Prompt,
    PublishedProbe,
    ReferenceReport,
    ReferenceResult,
    RewardResult,
    RolloutWork,
    TrainingSample,
    WeightManifest,
    WeightSyncReport,
)

WEIGHT_BYTES = 2_400_000  # of one version: kk_tiny's policy
PROBE_FEATURES = 66


class Pace(NamedTuple):
    """How long the pretended work takes. Example: Pace(decode_s=10.0, row_s=0.0)"""

    decode_s: float  # a worker's part of a step, micro-groups evenly over it
    row_s: float  # forward and backward of a learner row


class FakeRolloutWorker:
    """Sends every sample at full length, micro-group after micro-group."""

    def __init__(self, config: Config, worker_index: int, pace: Pace) -> None:
        self.config, self.worker_index, self._pace = config, worker_index, pace
        self._version = self._tokens = self._steps = 0
        self._halted = -1

    def stream(
        self, work: list[RolloutWork], *, step: int, evaluation: bool = False, number: int = 0
    ) -> Iterator[MicroGroupHeader | list[Completion]]:
        """As RolloutWorker.stream."""
        size = self.config.rollout.micro_group
        parts = [
            (item.prompt_index, item.sample_indices[first : first + size])
            for item in work
            for first in range(0, len(item.sample_indices), size)
        ]
        started = time.monotonic()
        for place, (prompt_index, indices) in enumerate(parts, 1):
            if number <= self._halted:
                return
            with phase("decode"):
                time.sleep(max(0.0, started + self._pace.decode_s * place / len(parts) - time.monotonic()))
                micro_group = [self._completion(prompt_index, index) for index in indices]
            self._steps += self.config.rollout.max_new_tokens
            yield MicroGroupHeader(
                prompt_index=prompt_index,
                sample_indices=list(indices),
                lengths=[len(completion.token_ids) for completion in micro_group],
                finish_reasons=[completion.finish_reason for completion in micro_group],
                policy_version=self._version,
                finished_at=time.time(),
            )
            yield micro_group

    def _completion(self, prompt_index: int, sample_index: int) -> Completion:
        tokens = self.config.rollout.max_new_tokens
        self._tokens += tokens
        return Completion(
            prompt_index=prompt_index,
            sample_index=sample_index,
            token_ids=np.full(tokens, sample_index + 10, np.int32),
            logprobs=np.full(tokens, -0.5, np.float32),
            sampling_logprobs=None,
            finish_reason="length",
            policy_version=self._version,
        )

    @phase("sync")
    def load_weights(
        self,
        manifest: WeightManifest,
        buckets: Iterable[np.ndarray],
        probe: PublishedProbe | None = None,
        *,
        sums: dict[str, int] | None = None,
    ) -> WeightSyncReport:
        """As RolloutWorker.load_weights; the buckets are read."""
        started = time.monotonic()
        read = sum(len(bytes(bucket)) for bucket in buckets)
        self._version = manifest.version
        return WeightSyncReport(
            version=manifest.version, num_bytes=read, seconds=time.monotonic() - started, checksum=None
        )

    def learn(self) -> ProbeReport:
        """As RolloutWorker.learn."""
        return ProbeReport(statistics=ProbeStatistics.zeros(PROBE_FEATURES), steps_with=0, steps_without=0)

    def halt(self, number: int) -> None:
        """As RolloutWorker.halt."""
        self._halted = max(self._halted, number)

    def give_back(self) -> dict[int, list[int]]:
        """As RolloutWorker.give_back: all samples decode."""
        return {}

    def progress(self) -> int:
        """As RolloutWorker.progress."""
        return self._steps

    def statistics(self) -> dict[str, float]:
        """As RolloutWorker.statistics."""
        names = ("kv_pages", "kv_pages_used", "rows", "preemptions")
        return dict.fromkeys(names, 0.0) | {"running_steps": self._steps, "sampled_tokens": self._tokens}

    def stats(self) -> dict[str, float]:
        """As RolloutWorker.stats."""
        memory = ("peak_memory_bytes", "peak_kv_bytes", "kv_pool_bytes", "recomputed_tokens", "parked_tokens")
        return dict.fromkeys(("row_utilisation", "predict_seconds", "preemptions", *memory), 0.0) | {
            "running_steps": float(self._steps)
        }


class FakeRewardWorker:
    """Random rewards."""

    _scored = 0

    def __init__(self, config: Config) -> None:
        self._random = random.Random(config.run.seed)

    @phase("reward")
    def score(self, prompt: Prompt, completions: list[Completion]) -> RewardResult:
        """As RewardWorker.score."""
        started = time.time()
        rewards = [float(self._random.random() < 0.5) for _ in completions]
        self._scored += 1
        return RewardResult(
            rewards=rewards, components={"fake": rewards}, failures=[], started_at=started, finished_at=time.time()
        )

    def progress(self) -> int:
        """As RewardWorker.progress."""
        return self._scored

    def statistics(self) -> dict[str, float]:
        """As RewardWorker.statistics."""
        return {"reward_timeouts": 0, "reward_deaths": 0}


class FakeReferenceWorker:
    """The reference is the policy."""

    def __init__(self, config: Config) -> None:
        pass

    @phase("reference")
    def logprobs(self, prompt: Prompt, completions: list[Completion]) -> ReferenceResult:
        """As ReferenceWorker.logprobs."""
        report = ReferenceReport(kl_sums=[0.0] * len(completions), peak_memory_bytes=0)
        return ReferenceResult(logprobs=[completion.logprobs.copy() for completion in completions], report=report)


class FakePublisher:
    """Weights that are zero."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def export(self, version: int) -> tuple[WeightManifest, Iterator[np.ndarray], dict[str, int]]:
        """As WeightPublisher.export."""
        manifest = WeightManifest(
            version=version, entries=[("weights", "uint8", (WEIGHT_BYTES,), 0, 0)], num_bytes=WEIGHT_BYTES
        )
        return manifest, iter([np.zeros(WEIGHT_BYTES, np.uint8)] if self._rank == 0 else []), {}


class FakeLearnerWorker:
    """Reads every row it is sent, and learns nothing from it."""

    def __init__(self, config: Config, rank: int, world_size: int, total_steps: int, pace: Pace) -> None:
        self.rank, self._pace = rank, pace
        self.publisher = FakePublisher(rank)
        self._rows = self._tokens = self._updates = 0

    def host_store(self) -> int:
        """As LearnerWorker.host_store; nobody listens there."""
        return 0

    def setup(self, master_address: str, master_port: int, checkpoint: str | None) -> dict[str, str | int]:
        """As LearnerWorker.setup."""
        return {
            "backend": "FakeLearnerWorker",
            "device": "none",
            "ranks": 1,
            "parameters": 0,
            "threads": 0,
            "updates": 0,
        }

    def accumulate(
        self, samples: list[TrainingSample] | None, totals: LossTotals, row_id: int | None = None
    ) -> dict[str, int]:
        """As LearnerWorker.accumulate."""
        if not samples:
            return {"samples": 0, "row_tokens": 0}
        with phase("forward"):
            time.sleep(self._pace.row_s / 2)
        with phase("backward"):
            time.sleep(self._pace.row_s / 2)
            tokens = sum(int(np.count_nonzero(sample.response_ids)) for sample in samples)
        self._rows, self._tokens = self._rows + 1, self._tokens + tokens
        return {"samples": len(samples), "row_tokens": tokens}

    def remember(self, samples: list[TrainingSample] | None, row_id: int) -> None:
        """As LearnerWorker.remember."""

    @phase("optimizer")
    def step(self, totals: LossTotals, *, is_last: bool = True) -> dict[str, float]:
        """As LearnerWorker.step."""
        self._updates += 1
        names = ("loss", "grad_norm", "lr", "skipped_updates", "kl", "entropy", "clip_fraction", "importance_mean")
        differences = ("logprob_diff_mean", "logprob_diff_max", "logprob_diff_k3", "engine_ess")
        return {f"learner/{name}": 0.0 for name in (*names, *differences)} | {"memory/learner_peak_bytes": 0.0}

    def save(self, folder: str) -> None:
        """As LearnerWorker.save: the file that a checkpoint is known by."""
        if self.rank == 0:
            (Path(folder) / "model.safetensors").write_bytes(b"")

    def statistics(self) -> dict[str, float]:
        """As LearnerWorker.statistics."""
        return {"learner_rows": self._rows, "learner_row_tokens": self._tokens, "learner_updates": self._updates}

"""Rollout worker and learner rank in one process, taking turns on its device. Plain classes; actors.py wraps them for
Ray.

At one rank that nothing shards or adapts, engine and learner are two modules over the same parameters: an update is
published by doing nothing. Otherwise the engine has a model of its own, into which the learner's parameters are copied,
gathered one at a time.
"""

from __future__ import annotations

import copy
import threading

from transformers import PreTrainedModel

from infsample_rl.cluster.environments import environments_of
from infsample_rl.config import Config
from infsample_rl.learner.unsharded_backend import UnshardedBackend
from infsample_rl.learner.worker import LearnerWorker
from infsample_rl.model.weight_sync.store import StoreAddress
from infsample_rl.model.weight_sync.sync import check_shared, load_local
from infsample_rl.observe.phases import phase
from infsample_rl.plan.learner_memory import learner_lines
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.rollout.length_prediction.messages import PublishedLengths
from infsample_rl.rollout.worker import RolloutWorker
from infsample_rl.types import MaybeNone, WeightSyncReport


class ColocatedWorker:
    """A learner rank and the rollout worker beside it: `learner`, and after setup() `rollout`."""

    def __init__(self, config: Config, rank: int, world_size: int, total_steps: int) -> None:
        self.config, self.rank = config, rank
        self.learner = LearnerWorker(config, rank, world_size, total_steps)

    def setup(self, checkpoint: str | None, meeting: StoreAddress | MaybeNone = None) -> dict[str, str | int]:
        """Set up the learner, then the engine on its weights. Returns what was set up, for the log."""
        found = self.learner.setup(checkpoint, meeting)
        self.shares_weights = isinstance(self.learner.backend, UnshardedBackend) and self.config.learner.lora_rank == 0
        model = share_parameters(self.learner.policy.lm) if self.shares_weights else None
        reserved, environments = self._learner_growth(), environments_of(self.config)
        self.rollout = RolloutWorker(self.config, self.rank, model, reserved_bytes=reserved, environments=environments)
        return found | {
            "engine": "shares the learner's weights" if self.shares_weights else "has its own copy of the weights"
        }

    def _learner_growth(self) -> int:
        """Bytes that the learner's fullest row takes by the plan above what it holds now: a pool that takes what is
        free leaves them."""
        if not self.config.rollout.takes_free_memory:
            return 0
        lines, _ = learner_lines(self.config, ModelOutline.of(self.config, len(self.learner.tokenizer)))
        return max(0, sum(lines.values()) - self.learner.memory.held_bytes())

    @phase("sync")
    def publish(self, version: int, probe: PublishedLengths | None = None) -> WeightSyncReport:
        """Let the engine sample with the learner's weights as policy `version`. A collective; not while it samples."""
        engine = self.rollout.engine.parameters
        if self.shares_weights:
            report = check_shared(engine, self.learner.policy.lm, version)
        else:
            report = load_local(engine, self.learner.published_parameters(), version)
        self.rollout.begin_version(version, probe)
        return report


def share_parameters(model: PreTrainedModel) -> PreTrainedModel:
    """A second module over the same parameters, with a config, attention and checkpointing of its own."""
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    twin.gradient_checkpointing_disable()
    twin.set_attn_implementation("sdpa")
    return twin.eval()


class TurnLock:
    """A lock that is had in the order it was asked for, so that decoding cannot keep a learner row out."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._next, self._serving = 0, 0

    def __enter__(self) -> None:
        with self._condition:
            ticket, self._next = self._next, self._next + 1
            self._condition.wait_for(lambda: self._serving == ticket)

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._serving += 1
            self._condition.notify_all()

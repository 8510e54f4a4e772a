"""What the parts of a run share: its settings, its inputs, its workers, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infsample_rl.cluster.cluster import Cluster
from infsample_rl.cluster.dealing import ExpectedLengths
from infsample_rl.cluster.interruption import Interruption
from infsample_rl.config import Config
from infsample_rl.controller.openings import Openings
from infsample_rl.data.prompts import PromptStream
from infsample_rl.observe.run_log import RunLogger
from infsample_rl.rollout.length_prediction.run_bert import RunBert
from infsample_rl.rollout.length_prediction.run_probe import RunProbe
from infsample_rl.types import Prompt, WeightSyncReport


@dataclass(kw_only=True, slots=True)
class RunState:
    """A run between two steps."""

    config: Config
    run_dir: Path
    total_steps: int
    cluster: Cluster
    log: RunLogger
    interruption: Interruption
    prompts: PromptStream
    openings: Openings
    probe: RunProbe | RunBert | None
    expected_lengths: ExpectedLengths
    step: int  # updates done = version of the weights that sample now
    failed_steps: int = 0  # in a row, without a single reward

    def is_due(self, every: int) -> bool:
        """Whether this step is the last one, or one of `every` so many; 0: the last one only."""
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)

    def next_prompts(self, count: int | None = None, first_index: int = 0) -> list[Prompt]:
        """As PromptStream.next_batch, each with the beginning of its episode."""
        position, check = self.prompts.position, self.interruption.check
        return self.openings.open(self.prompts.next_batch(count, first_index), position=position, check=check)

    def publish_weights(self) -> WeightSyncReport:
        """Bring every engine to the learner's weights and to what predicts lengths."""
        return self.cluster.weights.publish(self.step, None if self.probe is None else self.probe.published())

    def to_save(self, data_state: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint keeps of it; `data_state`: position in the data behind this step."""
        return {"step": self.step, "data": data_state, "expected_lengths": self.expected_lengths.state()}

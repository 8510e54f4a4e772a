"""What rollout workers and the driver tell each other of lengths, beside the probe's records in types.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from infsample_rl.types import ProbeReport, PublishedProbe


class SampledLengths(NamedTuple):
    """Samples of one prompt that have ended in one worker, for a run's bert predictor to train on."""

    prompt_index: int
    prompt_ids: list[int]
    samples: list[tuple[int, list[int], int, bool]]  # sample index, first k tokens, length, whether it was cut


class TrainedBert(NamedTuple):
    """A bert predictor that a run has trained."""

    vocabulary: np.ndarray  # [V] int32: the token ids that it knows, ascending
    weights: dict[str, np.ndarray]  # by the parameter's name, float32


@dataclass(frozen=True, kw_only=True)
class PublishedBert:
    """What the driver tells every rollout worker of the run's bert predictor, beside the weights."""

    trained: TrainedBert | None  # None: it has not been trained yet, all lengths count as equal

    @property
    def is_used(self) -> bool:
        """Whether predictions order the samples."""
        return self.trained is not None


PublishedLengths: TypeAlias = PublishedProbe | PublishedBert
LengthReport: TypeAlias = ProbeReport | list[SampledLengths]

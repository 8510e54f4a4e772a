"""What comes back to the driver while a step runs, as cluster.py hands it over."""

from __future__ import annotations

from dataclasses import dataclass

from infsample_rl.types import MicroGroupHeader, ReferenceReport, RewardResult


@dataclass(frozen=True, slots=True)
class MicroGroupArrival:
    """A micro-group has ended decoding."""

    key: int
    header: MicroGroupHeader


@dataclass(frozen=True, slots=True)
class RewardArrival:
    """A micro-group has been scored."""

    key: int
    result: RewardResult


@dataclass(frozen=True, slots=True)
class ReferenceArrival:
    """A micro-group has its reference log-probabilities."""

    key: int
    report: ReferenceReport


@dataclass(frozen=True, slots=True)
class RowArrival:
    """A learner rank has done its row of a wave."""

    rank: int
    report: dict[str, float]


@dataclass(frozen=True, slots=True)
class MicroGroupLost:
    """A micro-group that had arrived is gone, with the node that held it; its samples are drawn again and arrive under
    other keys."""

    key: int


Arrival = MicroGroupArrival | MicroGroupLost | RewardArrival | ReferenceArrival | RowArrival

"""What is in flight while a step runs, and what comes back of it to the driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import ray

from infsample_rl.cluster.workers import Handle
from infsample_rl.types import MaybeNone, MicroGroupHeader, ReferenceReport, RewardResult, RolloutWork


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
    """A micro-group that had arrived is gone with its node; its samples are drawn again and arrive under other keys."""

    key: int


Arrival = MicroGroupArrival | MicroGroupLost | RewardArrival | ReferenceArrival | RowArrival


@dataclass(slots=True, eq=False)
class Stream:
    """What one rollout worker decodes: work that has not arrived is owed."""

    role: ClassVar[str] = "rollout"
    index: int
    handle: Handle
    number: int  # of all streams of the run
    owed: dict[int, RolloutWork]  # by prompt_index
    item: ray.ObjectRef | MaybeNone = None  # taken and not looked at yet; None: there is no further one
    header: MicroGroupHeader | None = None  # whose micro-group is still to come
    is_lost: bool = False
    has_nothing_to_give: bool = False  # all its samples but one have started
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call on a reward, reference or learner worker about some micro-groups, and how to send it once more."""

    role: str
    index: int
    handle: Handle
    keys: list[int]
    again: Callable[[], None]
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class Return:
    """A rollout worker in place of a lost one, on its way to the weights, which the references keep."""

    role: ClassVar[str] = "rollout"
    index: int
    handle: Handle
    published: list[ray.ObjectRef]
    since: float = field(default_factory=time.monotonic)

"""What is in flight while a step runs, and what has come back: the driver knows keys, the object store has the rest."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import ray

from infsample_rl.cluster.dealing import work_of
from infsample_rl.cluster.messages import open_micro_group
from infsample_rl.cluster.observed import ANSWER_S
from infsample_rl.cluster.workers import Handle
from infsample_rl.types import (
    Completion,
    MaybeNone,
    MicroGroupHeader,
    Prompt,
    ReferenceReport,
    RewardResult,
    RolloutWork,
)


class MicroGroupArrival(NamedTuple):
    """A micro-group has ended decoding."""

    key: int
    header: MicroGroupHeader


class RewardArrival(NamedTuple):
    """A micro-group has been scored."""

    key: int
    result: RewardResult


class ReferenceArrival(NamedTuple):
    """A micro-group has its reference log-probabilities."""

    key: int
    report: ReferenceReport


class RowArrival(NamedTuple):
    """A learner rank has done its row of a wave."""

    rank: int
    report: dict[str, float]


class MicroGroupLost(NamedTuple):
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
    """A call on a reward, reference or learner worker."""

    role: str
    index: int
    handle: Handle
    items: list[tuple[int, Prompt]]  # micro-groups by key; none of the learner, which is not asked again
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class Return:
    """A rollout worker in place of a lost one, on its way to the weights, which the references keep."""

    role: ClassVar[str] = "rollout"
    index: int
    handle: Handle
    published: list[ray.ObjectRef]
    since: float = field(default_factory=time.monotonic)


class Finished(NamedTuple):
    """A micro-group that has arrived: what the driver reads of it, where it is, and the work it settles."""

    header: MicroGroupHeader
    payload: ray.ObjectRef  # messages.open_micro_group opens what it holds
    work: RolloutWork


class MicroGroups:
    """By key: payloads, the work they settled, and their reference log-probabilities where there are some."""

    def __init__(self) -> None:
        self.num_arrived = 0  # since the start, and the next one's key
        self.payloads: dict[int, ray.ObjectRef] = {}
        self.work: dict[int, RolloutWork] = {}
        self.references: dict[int, ray.ObjectRef] = {}

    def enter(self, finished: Finished) -> MicroGroupArrival:
        """Keep one under a new key."""
        key, self.num_arrived = self.num_arrived, self.num_arrived + 1
        self.payloads[key], self.work[key] = finished.payload, finished.work
        return MicroGroupArrival(key, finished.header)

    def bring(self, completions: list[Completion], prompt: Prompt) -> MicroGroupArrival:
        """Keep one that an earlier process of the run has sampled."""
        header = MicroGroupHeader.of(completions, time.time())
        return self.enter(Finished(header, ray.put(completions), work_of(prompt, header.sample_indices)))

    def completions(self, key: int) -> list[Completion] | None:
        """Open one, for the samples that are shown to the user; None if it is gone with its node."""
        if key not in self.payloads:
            return None
        try:
            return open_micro_group(ray.get(self.payloads[key], timeout=ANSWER_S))
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
            return None

    def forget(self, keys: list[int]) -> None:
        """Forget some, so that the object store frees them."""
        for book in (self.payloads, self.work, self.references):
            for key in keys:
                book.pop(key, None)

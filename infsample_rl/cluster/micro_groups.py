"""The micro-groups that have arrived: the driver knows their keys, the object store holds what is in them."""

from __future__ import annotations

from typing import NamedTuple

import ray

from infsample_rl.cluster.arrivals import MicroGroupArrival
from infsample_rl.cluster.calls import ANSWER_S
from infsample_rl.cluster.messages import open_micro_group
from infsample_rl.types import Completion, MicroGroupHeader, RolloutWork


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

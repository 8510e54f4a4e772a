"""What is in flight during a step: streams of rollout workers, calls on the others, new workers on their way to the
weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import ray

from infsample_rl.cluster.workers import Handle
from infsample_rl.types import MicroGroupHeader, RolloutWork

DRAIN_S = 30.0  # how long a halted stream may take to end


@dataclass(slots=True, eq=False)
class Stream:
    """What one rollout worker decodes: work that has not arrived is owed."""

    role: ClassVar[str] = "rollout"
    index: int
    handle: Handle
    number: int  # of all streams of the run
    owed: dict[int, RolloutWork]  # by prompt_index
    item: ray.ObjectRef | None = None  # taken and not looked at yet; None: there is no further one
    header: MicroGroupHeader | None = None  # whose micro-group is still to come
    is_lost: bool = False
    has_nothing_to_give: bool = False  # all its samples but one have started
    since: float = field(default_factory=time.monotonic)  # time.monotonic() when it was asked


@dataclass(slots=True, eq=False)
class Call:
    """A call on a reward, reference or learner worker, and how to send it once more."""

    role: str
    index: int
    handle: Handle
    keys: list[int]  # of the micro-groups
    again: Callable[[], None]
    since: float = field(default_factory=time.monotonic)  # time.monotonic() when it was asked


@dataclass(slots=True, eq=False)
class Return:
    """A rollout worker in place of a lost one, on its way to the weights. The references keep them in the object
    store."""

    role: ClassVar[str] = "rollout"
    index: int
    handle: Handle
    published: list[ray.ObjectRef]
    since: float = field(default_factory=time.monotonic)  # time.monotonic() when it was asked


def by_prompt(work: list[RolloutWork]) -> dict[int, RolloutWork]:
    """One piece of work for every prompt, samples in order."""
    merged: dict[int, RolloutWork] = {}
    for item in sorted(work, key=lambda item: item.prompt_index):
        before = merged[item.prompt_index].sample_indices if item.prompt_index in merged else []
        merged[item.prompt_index] = replace(item, sample_indices=sorted([*before, *item.sample_indices]))
    return merged


def settle(owed: dict[int, RolloutWork], header: MicroGroupHeader) -> RolloutWork:
    """Take the samples of a micro-group out of what is owed; they as work."""
    work = owed.pop(header.prompt_index)
    arrived = set(header.sample_indices)
    left = [index for index in work.sample_indices if index not in arrived]
    if left:
        owed[header.prompt_index] = RolloutWork(
            prompt_index=work.prompt_index, prompt_ids=work.prompt_ids, sample_indices=left
        )
    return RolloutWork(
        prompt_index=work.prompt_index, prompt_ids=work.prompt_ids, sample_indices=list(header.sample_indices)
    )


def drain(generator: Any) -> None:
    """Take what a halted stream still yields, so that its worker gets to its end."""
    while True:
        ready, _ = ray.wait([generator], timeout=DRAIN_S)
        if not ready:
            return  # its worker is silent: found out when it is called next
        try:
            next(generator)
        except (StopIteration, ray.exceptions.RayError):
            return

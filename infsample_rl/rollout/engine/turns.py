"""What a decode loop asks of whoever answers the turns of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from infsample_rl.rollout.schedule.prompt_group import Sample
from infsample_rl.types import Episode


class Answer(NamedTuple):
    """What comes of a turn: tokens to go on with, or the end."""

    sample: Sample
    observed: Sequence[int]  # ids, the beginning of the next turn among them
    episode: Episode | None  # None: the sample goes on


class Turns(Protocol):
    """Answers turns, many at a time, while others decode."""

    def end(self, sample: Sample, reason: str) -> None:
        """A sample's turn has ended by `reason`, its finish_reason: it is to be answered. With "length" it cannot go
        on."""

    def take(self, *, wait_s: float) -> list[Answer]:
        """What has been answered since the last time, in the order of samples; waits so long for the first."""

    def close(self) -> None:
        """The call is over: what has not been answered is not wanted."""

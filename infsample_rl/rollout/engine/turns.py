"""Turns of a loop's samples: what the loop asks of whoever answers them, and how samples leave and come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from infsample_rl.rollout.schedule.prompt_group import Sample
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from infsample_rl.types import Episode

WAIT_S = 0.2  # for an environment, before a stream looks whether it was halted


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
        """What has been answered since the last time; waits so long for the first."""

    def close(self) -> None:
        """The call is over: what has not been answered is not wanted."""


class TurnTaking:
    """Lets the samples of a call leave their rows while their turns are answered, and come back."""

    def __init__(
        self, turns: Turns, planner: StepPlanner, *, truncates: bool, ended: Callable[[list[Sample]], None]
    ) -> None:
        """`truncates`: a token has a second log-probability, of the truncated distribution. `ended`: told of samples
        that have ended."""
        self._turns, self._planner, self._truncates, self._ended = turns, planner, truncates, ended
        self.is_idle = False  # all samples that are left are away

    def send_away(self, samples: list[Sample]) -> None:
        """Rows whose turns have ended by their finish_reason."""
        for sample in samples:
            self._planner.send_away(sample)
            self._turns.end(sample, sample.finish_reason)

    def take(self) -> bool:
        """Go on with samples that were away, or end them, as they are answered; whether any was. Waits for one where
        nothing else is left to do."""
        planner = self._planner
        answers = self._turns.take(wait_s=WAIT_S if self.is_idle else 0.0)
        for sample, observed, episode in answers:
            room = planner.max_new_tokens - len(sample.tokens)
            if episode is None and len(observed) < room:
                sample.tokens.extend(observed)
                sample.logprobs.extend([math.nan] * len(observed))
                sample.sampling_logprobs.extend([math.nan] * (len(observed) if self._truncates else 0))
                sample.finish_reason = ""
                planner.take_back(sample, len(observed))
            elif episode is None:  # no token could be sampled behind it
                sample.finish_reason = "length"
                self._turns.end(sample, "length")
            else:
                sample.episode = episode
                if episode.is_straggler:
                    sample.finish_reason = "length"
                self._ended([sample])
                planner.end_away(sample)
        return bool(answers)

    def close(self) -> None:
        """The call is over."""
        self._turns.close()

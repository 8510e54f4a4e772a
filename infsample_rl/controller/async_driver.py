"""The same workers, one step off policy: the next step's samples are drawn while the learner trains on this step's.

A step's samples come from the weights one update back (run.max_staleness=1); truncated importance weights correct for
it (objective.importance, token_tis by default). Weights are published when no worker samples, so every sample has one
version.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from infsample_rl.cluster.interruption import Terminated
from infsample_rl.controller.driver import Completions, Driver
from infsample_rl.controller.groups import StepGroups
from infsample_rl.controller.step_metrics import Metrics, RolloutStats
from infsample_rl.controller.waves import Waves
from infsample_rl.observe.phases import phase


class Sampled(NamedTuple):
    """A step's samples, scored, that the learner has not seen."""

    groups: StepGroups
    rounds: list[RolloutStats]


class AsyncDriver(Driver):
    """Runs a prepared start to its last step, sampling one step ahead of the update."""

    _ready: Sampled | None = None  # the step to train next; none before the first
    _data_state: dict[str, Any] | None = None  # position in the data after the step that is trained

    def train_step(self) -> tuple[Metrics, Completions]:
        """Train the samples that are there while the next step's are drawn; then publish."""
        started = time.time()
        groups, rounds = self._ready or self._sample_alone()
        self._data_state = self.prompts.state()  # a resumed run draws the next step's prompts again
        following = self._new_groups() if self.step + 1 < self.total_steps else None
        if following is not None:
            self._start_rollout(following.prompts, self.config.rollout.group_size, batch=self.step + 1)
        waves = Waves(self.config, self.cluster.traffic)
        for group in groups.trained():
            waves.add(group)
        update = self._update(groups, waves, following)
        try:
            self._ready = None if following is None else self._finish_sampling(following)
        except Terminated:  # the update is whole: only what was being drawn for the next is lost
            self.cluster.traffic.abandon()
            self._ready = following = None
        if self.probe is not None:
            self.cluster.lengths.ask()
        metrics, completions = self._end_step(groups, rounds, update, started=started, following=following)
        return metrics | {"rollout/staleness": float(self.step - 1 - groups.step)}, completions

    def _sample_alone(self) -> Sampled:
        """The first step's samples: nothing is there to be trained meanwhile."""
        groups = self._new_groups()
        self._start_rollout(groups.prompts, self.config.rollout.group_size, batch=self.step)
        return self._finish_sampling(groups)

    @phase("sample")
    def _finish_sampling(self, groups: StepGroups) -> Sampled:
        for arrival in self.cluster.traffic.arrivals():
            self._enter(arrival, groups)
        groups.take_complete()
        return Sampled(groups, [self.cluster.rollout.ends])

    def _state(self) -> dict[str, Any]:
        return super()._state() | ({"data": self._data_state} if self._data_state else {})

    def _rewind(self, checkpoint: Path | None, state: dict[str, Any]) -> None:
        self._ready = self._data_state = None
        super()._rewind(checkpoint, state)

"""A step off policy: the next step's samples are drawn while the learner trains on this step's, by the same workers.

A step's samples come from the weights one update back (run.max_staleness=1); truncated importance weights correct for
it (objective.importance, token_tis by default). Weights are published when no worker samples, so every sample has one
version.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

from infsample_rl.cluster.interruption import Terminated
from infsample_rl.controller.ahead import read_ahead
from infsample_rl.controller.groups import StepGroups
from infsample_rl.controller.reward_failures import end_if_all_fail
from infsample_rl.controller.run_state import RunState
from infsample_rl.controller.saving import CheckpointSaver
from infsample_rl.controller.step import StepResult, TrainingStep, enter_samples, start_rollout
from infsample_rl.controller.step_metrics import RoundEnds
from infsample_rl.controller.step_records import StepRecorder
from infsample_rl.controller.waves import Waves
from infsample_rl.observe.phases import phase


class Sampled(NamedTuple):
    """A step's samples, scored, that the learner has not seen."""

    groups: StepGroups
    rounds: list[RoundEnds]  # none where a checkpoint has kept them


class AsyncTrainingStep:
    """Takes one step after the other, sampling one ahead of the update."""

    def __init__(self, run: RunState, saver: CheckpointSaver, recorder: StepRecorder) -> None:
        self._run, self._saver, self._parts = run, saver, TrainingStep(run, saver, recorder)
        self._ready: Sampled | None = None  # what the next step trains; nothing before the first

    def train_step(self) -> StepResult:
        """Train the samples that are there while the next step's are drawn; then publish."""
        run, parts, started = self._run, self._parts, time.time()
        groups, rounds = self._ready or self._first()
        end_if_all_fail(run, self._saver, groups)
        stale = run.step - groups.step
        data_state = run.prompts.state()  # a resumed run takes the next step's prompts again
        following = self._start_sampling(batch=run.step + 1) if run.step + 1 < run.total_steps else None
        waves = Waves(run.config, run.cluster.traffic)
        for group in groups.trained():
            waves.add(group)
        update = parts.update(waves, following or groups)
        try:
            with self._saver.held_while_a_save_has_time(share=0.5):  # the rest is for publishing
                self._ready = None if following is None else self._finish_sampling(following)
        except Terminated:  # the update is whole: only what was being drawn for the next is lost
            run.cluster.traffic.abandon(keep=groups.micro_groups)
            self._ready, update = None, update._replace(sampled=groups)
        parts.start_learning_lengths()
        metrics, completions = parts.finish(groups, rounds, update, started=started)
        ahead = None if self._ready is None else self._ready.groups
        return StepResult(metrics | {"rollout/staleness": float(stale)}, completions, data_state, ahead)

    def _first(self) -> Sampled:
        """Samples to begin with: those that the checkpoint keeps, else new ones of the weights of now."""
        run, kept = self._run, read_ahead(self._saver.checkpoint)
        samples = Counter(completion.prompt_index for completions in kept for completion in completions)
        size = run.config.rollout.group_size
        if samples != dict.fromkeys(range(run.config.data.prompts_per_step), size):
            if kept:
                run.log.note(
                    "the settings ask for other samples than those that the checkpoint keeps for the next step"
                )
            return self._finish_sampling(self._start_sampling(batch=run.step))
        groups = self._parts.new_groups(kept[0][0].policy_version)
        for completions in kept:
            prompt = groups.prompts[completions[0].prompt_index]
            enter_samples(run, run.cluster.micro_groups.bring(completions, prompt), groups)
        return self._finish_sampling(groups)._replace(rounds=[])

    def _start_sampling(self, *, batch: int) -> StepGroups:
        groups = self._parts.new_groups()
        start_rollout(self._run, groups.prompts, self._run.config.rollout.group_size, batch=batch)
        return groups

    @phase("sample")
    def _finish_sampling(self, groups: StepGroups) -> Sampled:
        for arrival in self._run.cluster.traffic.arrivals():
            enter_samples(self._run, arrival, groups)
        groups.take_complete()
        return Sampled(groups, [self._run.cluster.rollout.ends])

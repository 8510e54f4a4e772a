"""One GRPO step: sample, score, advantages, update, publish. The controller reads headers and floats; tokens go from
worker to worker unopened."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from infsample_rl.cluster.arrivals import (
    Arrival,
    MicroGroupArrival,
    MicroGroupLost,
    ReferenceArrival,
    RewardArrival,
    RowArrival,
)
from infsample_rl.cluster.dealing import deal
from infsample_rl.controller.groups import StepGroups
from infsample_rl.controller.reward_failures import end_if_all_fail, show_first, show_number
from infsample_rl.controller.run_state import RunState
from infsample_rl.controller.saving import CheckpointSaver
from infsample_rl.controller.step_metrics import Metrics, RoundEnds, UpdateReport, step_metrics
from infsample_rl.controller.step_records import StepRecorder
from infsample_rl.controller.waves import Waves
from infsample_rl.observe.phases import phase
from infsample_rl.types import Prompt


class StepResult(NamedTuple):
    """What a finished step leaves behind."""

    metrics: Metrics
    completions: list[dict[str, Any]]  # those that are shown
    data_state: dict[str, Any]  # position in the data, from which the next step draws its prompts
    ahead: StepGroups | None = None  # what is sampled of the next step already


class TrainingStep:
    """Takes one step after the other, each on samples of the weights it updates."""

    def __init__(self, run: RunState, saver: CheckpointSaver, recorder: StepRecorder) -> None:
        self._run, self._saver, self._recorder = run, saver, recorder

    def train_step(self) -> StepResult:
        """Sample every group, score it, learn from complete groups while others decode, update, publish."""
        started = time.time()
        groups, waves = self.new_groups(), Waves(self._run.config, self._run.cluster.traffic)
        rounds = self._sample(groups, waves)
        update = self.update(waves, groups, rows_done=self.start_learning_lengths)
        metrics, completions = self.finish(groups, rounds, update, started=started)
        return StepResult(metrics, completions, self._run.prompts.state())

    def new_groups(self, version: int | None = None) -> StepGroups:
        """The groups of the next prompts, empty; `version` of the weights that sample them, by default those of now."""
        run = self._run
        version = run.step if version is None else version
        prompts, size = run.next_prompts(), run.config.rollout.group_size
        with_reference = run.config.objective.needs_reference and run.config.reference.placement == "workers"
        return StepGroups(prompts, run.config, group_size=size, step=version, with_reference=with_reference)

    @phase("sample")
    def _sample(self, groups: StepGroups, waves: Waves) -> list[RoundEnds]:
        """Sample and score the groups and hand complete ones to the learner; what ended each round of sampling.

        With objective.dynamic_sampling groups without signal are replaced by new prompts, as many as are missing, in a
        bounded number of rounds (DAPO, arXiv 2503.14476, section 3.2). A round decodes to its end: stopping it early
        would favour short responses.
        """
        run = self._run
        objective, wanted = run.config.objective, run.config.data.prompts_per_step
        prompts, rounds = groups.prompts, list[RoundEnds]()
        while prompts:
            start_rollout(run, prompts, run.config.rollout.group_size, batch=run.step)
            is_last = not objective.dynamic_sampling or len(rounds) + 1 == objective.dynamic_sampling_rounds
            for arrival in run.cluster.traffic.arrivals():
                self._enter(arrival, groups, waves)
                for group in groups.take_complete():
                    if groups.trains(group):
                        waves.add(group)
                if groups.all_complete() and (is_last or len(groups.trained()) == wanted):
                    waves.finish()
            rounds.append(run.cluster.rollout.ends)
            missing = 0 if is_last else wanted - len(groups.trained())
            prompts = run.next_prompts(missing, len(groups.groups))
            groups.extend(prompts)
        if len(groups.trained()) < wanted:
            found = f"{len(groups.trained())} of {wanted} groups have a signal"
            run.log.warn_seldom(f"step {run.step + 1}: {found} after {len(rounds)} rounds of sampling")
        end_if_all_fail(run, self._saver, groups)
        return rounds

    @phase("update")
    def update(
        self, waves: Waves, sampled: StepGroups, *, rows_done: Callable[[], None] = lambda: None
    ) -> UpdateReport:
        """Step the optimizer as often as the objective asks, each time once all rows of the update are in.

        `sampled`: groups whose samples still arrive. `rows_done` is called before the first optimizer step.
        """
        run = self._run
        if run.config.takes_turns:
            run.cluster.weights.release()
        backward_done = time.time()
        metrics: list[dict[str, float | None]] = []
        # after the first optimizer step the others are waited for, as long as a save would still have time
        with ExitStack() as begun:
            for totals, is_last in waves.updates():
                for arrival in run.cluster.traffic.arrivals(until_learner_is_idle=True):
                    self._enter(arrival, sampled, waves)
                backward_done = time.time()
                if not metrics:
                    rows_done()
                self._saver.unsavable = "the learner has begun the next update"
                with run.interruption.held(run.config.run.grace_s):
                    metrics.append(run.cluster.learner.step(totals, is_last=is_last))
                if len(metrics) == 1:
                    begun.enter_context(self._saver.held_while_a_save_has_time())
        return UpdateReport(metrics, waves.row_times, sampled, backward_done, time.time())

    def finish(
        self, groups: StepGroups, rounds: list[RoundEnds], update: UpdateReport, *, started: float
    ) -> tuple[Metrics, list[dict[str, Any]]]:
        """Publish the new weights; the step's metrics and some of its completions. `started`: time.time()."""
        run = self._run
        run.step += 1
        with self._saver.held_while_a_save_has_time():
            predictor = self._learn_lengths()
            synced = run.publish_weights()
        show_number(run, groups)
        metrics = predictor | step_metrics(groups, rounds, update, started=started)
        metrics |= {"weight_sync/bytes": synced.num_bytes, "timing/weight_sync": synced.seconds}
        completions = self._recorder.record(groups, metrics)
        run.expected_lengths.observe(groups.lengths_by_row())
        run.cluster.micro_groups.forget(groups.micro_groups)
        return metrics, completions

    def start_learning_lengths(self) -> None:
        """Let rollout workers, which now are idle, report what the run's length probe saw."""
        if self._run.probe is not None:
            self._run.cluster.lengths.ask()

    @phase("learn")
    def _learn_lengths(self) -> Metrics:
        """Bring the length probe up to the step's samples; its metrics, of the step that has ended."""
        probe = self._run.probe
        if probe is None:
            return {}
        reports: Any = self._run.cluster.lengths.take()  # of the kind that this probe takes
        used, started = float(probe.published().is_used), time.time()
        switched = probe.enter(reports)
        if switched:
            self._run.log.note(f"after step {self._run.step}: {switched}")
        return {
            "predictor/used": used,
            "predictor/steps_saved": probe.steps_saved,
            "predictor/fit_seconds": time.time() - started,
        }

    def _enter(self, arrival: Arrival, groups: StepGroups, waves: Waves) -> None:
        if isinstance(arrival, RowArrival):
            waves.row_times.append((arrival.rank, arrival.report["started_at"], arrival.report["ended_at"]))
        else:
            enter_samples(self._run, arrival, groups)


def start_rollout(run: RunState, prompts: list[Prompt], samples: int, *, batch: int, evaluation: bool = False) -> None:
    """Deal `samples` of every prompt. `batch`: number of the step they will train, which their noise is made from."""
    whole_prompts = run.config.rollout.schedule == "dynamic_slot" and not evaluation
    # a held-out row has the number of another that is trained on
    expected = [1.0 if evaluation else run.expected_lengths(prompt) for prompt in prompts]
    dealt = deal(prompts, samples, len(run.cluster.weights.holders), whole_prompts=whole_prompts, expected=expected)
    run.cluster.rollout.start(dealt, step=batch, evaluation=evaluation)


def enter_samples(run: RunState, arrival: Arrival, groups: StepGroups) -> None:
    """Put what has arrived into the book of its groups; a micro-group goes on to reward and reference at once."""
    match arrival:
        case MicroGroupArrival(key, header):
            prompt = groups.add_micro_group(key, header).prompt
            run.cluster.traffic.score(key, prompt)
            if groups.with_reference:
                run.cluster.traffic.reference_logprobs(key, prompt)
        case MicroGroupLost(key):
            groups.forget(key)
        case RewardArrival(key, result):
            show_first(run, groups, result.failures)
            groups.add_rewards(key, result)
        case ReferenceArrival(key, report):
            groups.add_reference(key, report)

"""The single controller: prompts, rollout, rewards, advantages, update, weights; one step is `train_step`.

The driver is the only one that knows all workers. It reads headers and floats; tokens go from worker to worker unopened.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from infsample_rl import keeping
from infsample_rl.arrivals import Arrival, MicroGroupArrival, ReferenceArrival, RewardArrival, RowArrival
from infsample_rl.cluster import Cluster
from infsample_rl.config import Config
from infsample_rl.groups import StepGroups, deal
from infsample_rl.metrics import RunLogger
from infsample_rl.startup import Start
from infsample_rl.step_metrics import (
    Metrics,
    RolloutStats,
    completion_records,
    evaluation_metrics,
    rollout_metrics,
    sample_metrics,
    timing_metrics,
    update_metrics,
)
from infsample_rl.summary import write_summary
from infsample_rl.types import Prompt
from infsample_rl.waves import Waves

FAILURES_SHOWN = 3  # failed reward calls of a step that are shown at once; the others are counted

Completions = list[dict[str, Any]]


class UpdateReport(NamedTuple):
    """What the learner said of a step's updates, when its last row was done, and when the last update was."""

    metrics: list[dict[str, float]]
    backward_done: float
    ended: float


class Driver:
    """Runs a prepared start (prompts, tokenizer, where to resume) to its last step."""

    def __init__(self, config: Config, start: Start):
        self.config = config
        self.run_dir = Path(config.run.dir or ".")
        self.prompts = start.prompts
        self.eval_prompts = start.eval_prompts
        self.tokenizer = start.tokenizer
        self.total_steps = start.total_steps
        self.checkpoint = start.checkpoint
        self.probe = start.probe
        self._lock = start.lock  # of the run folder, for as long as this process lives
        self.step = start.step  # updates done = version of the weights that sample now
        self.log = RunLogger(config, self.run_dir, total_steps=start.total_steps, start_step=start.step)
        self.log.print_table(f"{config.run.name}: what was derived", start.table)
        for warning in start.warnings:
            self.log.warn(warning)
        self.log.note("first prompt: " + repr(start.prompts.first_rendered))
        self.cluster = Cluster(config, total_steps=start.total_steps, note=self.log.note)

    def run(self) -> None:
        """Train to the last step, evaluating and saving on the way; end with a summary."""
        started = time.monotonic()
        failed = True
        try:
            self.cluster.start(str(self.checkpoint) if self.checkpoint else None)
            self.cluster.publish_weights(self.step, self.probe and self.probe.published())
            self.log.start_progress()
            if self.step == 0 and self.eval_prompts:
                self.log.log_step(0, self.evaluate(), [])
            while self.step < self.total_steps:
                metrics, completions = self.train_step()
                if self._is_due(self.config.run.eval_every) and self.eval_prompts:
                    metrics |= self.evaluate()
                self.log.log_step(self.step, metrics, completions)
                if self._is_due(self.config.run.checkpoint_every):
                    self.save()
            failed = False
        finally:
            self.log.close(failed=failed)
            self.cluster.stop()
        print(write_summary(self.config, self.run_dir, checkpoint=self.checkpoint, seconds=time.monotonic() - started), flush=True)

    def train_step(self) -> tuple[Metrics, Completions]:
        """One GRPO step: sample every group, score it, learn from complete groups while others decode, update, publish."""
        started = time.time()
        groups, waves = self._new_groups(), Waves(self.config, self.cluster)
        rounds = self._sample(groups, waves)
        return self._end_step(groups, rounds, self._update(groups, waves), started=started)

    def _new_groups(self) -> StepGroups:
        prompts, size = self.prompts.next_batch(), self.config.rollout.group_size
        return StepGroups(prompts, self.config, group_size=size, step=self.step, with_reference=bool(self.cluster.reference))

    def _sample(self, groups: StepGroups, waves: Waves) -> list[RolloutStats]:
        """Sample and score the step's groups, handing complete ones to the learner; rollout statistics of every round of sampling.

        With objective.dynamic_sampling groups without signal are replaced by new prompts, as many as are missing, in a bounded number of
        rounds (DAPO, arXiv 2503.14476, section 3.2). A round decodes to its end: stopping it early would favour short responses.
        """
        objective, wanted = self.config.objective, self.config.data.prompts_per_step
        prompts, rounds = groups.prompts, []
        while prompts:
            self._start_rollout(prompts, self.config.rollout.group_size, batch=self.step)
            is_last = not objective.dynamic_sampling or len(rounds) + 1 == objective.dynamic_sampling_rounds
            for arrival in self.cluster.arrivals():
                self._enter(arrival, groups)
                for group in groups.take_complete():
                    if groups.trains(group):
                        waves.add(group)
                if groups.all_complete() and (is_last or len(groups.trained()) == wanted):
                    waves.finish()
            rounds.append(self.cluster.rollout_stats())
            missing = 0 if is_last else wanted - len(groups.trained())
            prompts = self.prompts.next_batch(missing, len(groups.groups))
            groups.extend(prompts)
        if len(groups.trained()) < wanted:
            self.log.warn(f"step {self.step + 1}: {len(groups.trained())} of {wanted} groups have a signal after {len(rounds)} rounds of sampling")
        return rounds

    def _update(self, groups: StepGroups, waves: Waves, following: StepGroups | None = None) -> UpdateReport:
        """Step the optimizer as often as the objective asks, once all rows of an update are in; `following`: groups that are sampled meanwhile."""
        if self.step - groups.step > self.config.run.max_staleness:
            allowed = self.config.run.max_staleness
            raise RuntimeError(f"samples of weights version {groups.step} are to train version {self.step}: run.max_staleness={allowed}")
        report, backward_done = [], time.time()
        for totals, is_last in waves.updates():
            for arrival in self.cluster.arrivals(until_learner_is_idle=True):
                self._enter(arrival, following or groups, rows_of=groups)
            backward_done = time.time()
            if self.probe is not None and not report and following is None:
                self.cluster.start_learning_lengths()
            report.append(self.cluster.optimizer_step(totals, is_last=is_last))
        return UpdateReport(report, backward_done, time.time())

    def _end_step(
        self, groups: StepGroups, rounds: list[RolloutStats], update: UpdateReport, *, started: float, following: StepGroups | None = None
    ) -> tuple[Metrics, Completions]:
        """Publish the new weights; the step's metrics and some of its completions. `following`: groups that were sampled meanwhile."""
        self.step += 1
        predictor = self._learn_lengths()
        synced = self.cluster.publish_weights(self.step, self.probe and self.probe.published())
        self._count_failures(groups)
        metrics = sample_metrics(groups) | update_metrics(update.metrics) | rollout_metrics(rounds) | predictor
        metrics |= timing_metrics(groups, following or groups, started=started, backward_done=update.backward_done, updated=update.ended)
        metrics |= {"weight_sync/bytes": synced.num_bytes, "timing/weight_sync": synced.seconds}
        completions = completion_records(
            groups,
            self.cluster.completions,
            self.tokenizer,
            step=self.step,
            limit=self.config.logging.completions_per_step,
            stop_strings=self.config.rollout.stop_strings,
        )
        self.cluster.forget(groups.micro_groups)
        return metrics, completions

    def evaluate(self) -> dict[str, float | None]:
        """Sample and score the held-out problems with the current weights."""
        started, samples = time.time(), self.config.run.eval_samples
        groups = StepGroups(self.eval_prompts, self.config, group_size=samples, step=self.step, with_reference=False)
        self._start_rollout(self.eval_prompts, samples, batch=self.step, evaluation=True)
        for arrival in self.cluster.arrivals():
            self._enter(arrival, groups)
        self._count_failures(groups)
        self.cluster.forget(groups.micro_groups)
        return evaluation_metrics(groups, samples) | {"timing/eval": time.time() - started}

    def save(self) -> None:
        """Keep everything a resumed run needs."""
        started = time.time()
        state = self._state()

        def save_parts(folder: str) -> None:
            self.cluster.save(folder)
            if self.probe is not None:
                self.probe.save(Path(folder))

        self.checkpoint = keeping.write_checkpoint(self.run_dir, state, save_parts, keep=self.config.run.keep_checkpoints)
        self.log.note(f"checkpoint {self.checkpoint} written in {time.time() - started:.1f} s")

    def _state(self) -> dict[str, Any]:
        return {"step": self.step, "data": self.prompts.state()}

    def _learn_lengths(self) -> dict[str, float | None]:
        """Bring the length probe up to the step's samples, for the next one; its metrics, of the step that has ended."""
        if self.probe is None:
            return {}
        metrics = {"rollout/predictor_used": float(self.probe.published().is_used)}
        switched = self.probe.enter(self.cluster.probe_reports())
        if switched:
            self.log.note(f"after step {self.step}: {switched}")
        return metrics | {"rollout/replay_steps_saved": self.probe.steps_saved}

    def _start_rollout(self, prompts: list[Prompt], samples: int, *, batch: int, evaluation: bool = False) -> None:
        """`batch`: number of the step that these samples will train, which their noise is made from."""
        whole_prompts = self.config.rollout.schedule == "dynamic_slot" and not evaluation
        dealt = deal(prompts, samples, len(self.cluster.rollout), whole_prompts=whole_prompts)
        self.cluster.start_rollout(dealt, step=batch, evaluation=evaluation)

    def _enter(self, arrival: Arrival, groups: StepGroups, rows_of: StepGroups | None = None) -> None:
        """Put what has arrived into the step's book (learner rows into that of `rows_of`); a micro-group goes on to reward and reference at once."""
        match arrival:
            case RowArrival(rank, report):
                (rows_of or groups).row_times.append((rank, report["started_at"], report["ended_at"]))
            case MicroGroupArrival(key, header):
                if header.policy_version != groups.step:
                    raise RuntimeError(f"a micro-group was sampled by weights version {header.policy_version}, not by version {groups.step}")
                prompt = groups.add_micro_group(key, header).prompt
                self.cluster.score(key, prompt)
                if groups.with_reference:
                    self.cluster.reference_logprobs(key, prompt)
            case RewardArrival(key, result):
                for failure in result.failures[: max(0, FAILURES_SHOWN - len(groups.failures))]:
                    self.log.warn(failure)
                groups.add_rewards(key, result)
            case ReferenceArrival(key, kl_sums):
                groups.add_reference(key, kl_sums)

    def _count_failures(self, groups: StepGroups) -> None:
        if len(groups.failures) > FAILURES_SHOWN:
            self.log.warn(f"... and {len(groups.failures) - FAILURES_SHOWN} more failed reward calls after step {self.step}")

    def _is_due(self, every: int) -> bool:
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)

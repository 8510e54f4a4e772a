"""The single controller: prompts, rollout, rewards, advantages, update, weights; one step is `train_step`.

The driver is the only one that knows all workers. It reads headers and floats; tokens go from worker to worker
unopened.
"""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from infsample_rl.cluster.arrivals import (
    Arrival,
    MicroGroupArrival,
    MicroGroupLost,
    ReferenceArrival,
    RewardArrival,
    RowArrival,
)
from infsample_rl.cluster.cluster import Cluster
from infsample_rl.cluster.dealing import ExpectedLengths, deal
from infsample_rl.cluster.failures import StepLost
from infsample_rl.cluster.interruption import Interruption, Terminated
from infsample_rl.config import Config
from infsample_rl.controller import checkpoints
from infsample_rl.controller.groups import StepGroups
from infsample_rl.controller.observing import add_phases, observe_step
from infsample_rl.controller.recording import StepRecorder
from infsample_rl.controller.startup import Start, take_over
from infsample_rl.controller.step_metrics import (
    Metrics,
    RolloutStats,
    evaluation_metrics,
    forecast_metrics,
    rollout_metrics,
    sample_metrics,
    timing_metrics,
    update_metrics,
)
from infsample_rl.controller.waves import Waves
from infsample_rl.observe.phases import phase
from infsample_rl.observe.run_log import RunLogger
from infsample_rl.observe.summary import write_summary
from infsample_rl.observe.timeline import Timeline
from infsample_rl.types import Prompt, WeightSyncReport

LAST_PHASES_S = 5.0  # how long a run that ends waits for its workers' last phases
TRACE_STEPS = 20  # steps that trace.json keeps, the newest last
FAILURES_SHOWN = 3  # failed reward calls of a step that are shown at once; the others are counted

Completions = list[dict[str, Any]]


class UpdateReport(NamedTuple):
    """What the learner said of a step's updates, when its last row was done, and when the last update was."""

    metrics: list[dict[str, float | None]]
    backward_done: float
    ended: float


class Driver:
    """Runs a prepared start (prompts, tokenizer, where to resume) to its last step."""

    def __init__(self, config: Config, start: Start):
        self.config = config
        self.run_dir = Path(config.run.dir or ".")
        self.prompts = start.prompts
        self.eval_prompts = start.eval_prompts
        self.total_steps = start.total_steps
        self.checkpoint = start.checkpoint
        self.probe = start.probe
        self._lock = start.lock  # of the run folder, for as long as this process lives
        # updates done = version of the weights that sample now; the most so far
        self.step = self._furthest = start.step
        self._expected = ExpectedLengths(start.expected_lengths)
        self._origin = (start.checkpoint, self._state())  # where the run goes back to before its first checkpoint
        self._finished_state = self._state()  # of the last finished step
        self._unsavable = ""  # why the learner could not save the last finished step now
        self._saved_step = start.step if start.checkpoint else None  # of self.checkpoint, whatever becomes of its files
        self._save_seconds = 0.0  # of the last checkpoint
        self.log = RunLogger(config, self.run_dir, total_steps=start.total_steps, start_step=start.step)
        self.recorder = StepRecorder(config, self.run_dir, start.tokenizer, self.log, total_steps=start.total_steps)
        self.log.print_table(f"{config.run.name}: what was derived", start.table)
        for warning in start.warnings:
            self.log.warn(warning)
        self.log.note("first prompt: " + repr(start.prompts.first_rendered))
        self.interruption = Interruption()
        self.cluster = Cluster(
            config, total_steps=start.total_steps, note=self.log.note, interruption=self.interruption
        )
        path = self.run_dir / "trace.json"
        self.timeline = Timeline(path, keep_steps=TRACE_STEPS, start_step=start.step, say=self.log.keep)

    def run(self) -> None:
        """Train to the last step, evaluating and saving on the way; end with a summary. After SIGTERM keep what is
        finished.

        RuntimeError when Ray itself is gone, after the same; for what else ends a run, too.
        """
        started = time.monotonic()
        failed = True
        try:
            self.cluster.start(str(self.checkpoint) if self.checkpoint else None)
            take_over(self.config, self.run_dir, self.step)
            if self.step:
                self.log.rewind(self.step)
            try:
                self._publish()
            except StepLost as lost:
                self._return_to_checkpoint(str(lost))
            # what is there now stays: a collection need not look at libraries and settings again, a tenth of a second
            # each time
            gc.freeze()
            gc.set_threshold(20_000)  # a step makes tens of thousands of records and no cycle
            self.log.start_progress(self.cluster.monitor.now)
            while not self._is_finished():
                try:
                    self._go_on()
                except StepLost as lost:
                    self._return_to_checkpoint(str(lost))
            self.cluster.monitor.ask_phases(rollout=True)
            add_phases(self.cluster, self.timeline, wait_s=LAST_PHASES_S)
            failed = False
        except Terminated:
            self._keep_what_is_finished()
            if self.interruption.failure is not None:
                raise RuntimeError(
                    f"{self.interruption.failure}; once Ray is there again, run.resume=auto and the same settings go on"
                ) from None
            failed = False
        finally:
            with ExitStack() as ends:  # each of them, whatever another raises; the last first
                ends.callback(self.cluster.stop)
                ends.callback(lambda: self.log.close(failed=failed))
                ends.callback(self.timeline.close)
            # Ray has put back what there was before it; a second SIGTERM changes nothing now
            self.interruption.install()
        print(
            write_summary(self.config, self.run_dir, checkpoint=self.checkpoint, seconds=time.monotonic() - started),
            flush=True,
        )

    def _is_finished(self) -> bool:
        return self.step >= self.total_steps and self._saved_step == self.step and not self._owes_evaluation()

    def _owes_evaluation(self) -> bool:
        """Whether SIGTERM ended the evaluation of the step that was done last."""
        if not self.eval_prompts or not self._is_due(self.config.run.eval_every):
            return False
        record = self.log.record_of(self.step)
        return record is not None and "eval/accuracy" not in record

    def _go_on(self) -> None:
        """Train from the step that is there to the last."""
        if self.step == 0 and self.eval_prompts:
            self.log.log_step(0, self.evaluate(), [])
        elif self._owes_evaluation():
            self.log.add_to_step(self.step, self.evaluate())
        while self.step < self.total_steps:
            self.cluster.resize()
            before = self.cluster.monitor.counts()
            metrics, completions = self.train_step()
            metrics |= observe_step(self.cluster, self.timeline, self.step, before)
            self._finished_state, self._unsavable = self._state(), ""
            if self.step > self._furthest:  # else it was done again, and whatever ended it may come again
                self._furthest = self.step
                self.cluster.restarts.step_finished()
            try:
                if self._is_due(self.config.run.eval_every) and self.eval_prompts:
                    metrics |= self.evaluate()
            finally:  # SIGTERM may end the evaluation, not the step
                self.log.log_step(self.step, metrics, completions)
            if self._is_due(self.config.run.checkpoint_every):
                self.save()

    def _publish(self) -> WeightSyncReport:
        return self.cluster.weights.publish(self.step, self.probe and self.probe.published())

    def _return_to_checkpoint(self, reason: str) -> None:
        """Do the steps since the last checkpoint again, from the state it has. Again and again, as long as restarts are
        left."""
        self._unsavable = "the learner is being brought back"
        while True:
            checkpoint, state = self._origin
            newest, damages = checkpoints.newest_whole(self.run_dir)
            for damage in damages:
                self.log.warn(damage)
            if newest is not None and checkpoints.step_of(newest) > state["step"]:
                checkpoint, state = newest, checkpoints.read_state(newest)
            # of the run that was resumed, and no longer among those that are kept
            if checkpoint is not None and not checkpoint.is_dir():
                raise RuntimeError(
                    f"{reason}; and no checkpoint of run.dir={self.run_dir} is whole: {checkpoint}, where it began, "
                    "has been dropped"
                )
            self.log.warn(
                f"{reason}: going back to {checkpoint or 'the start'}; steps {state['step'] + 1} to {self.step + 1} "
                "are done again"
            )
            try:
                self.cluster.return_to(str(checkpoint) if checkpoint else None, reason)
                self._rewind(checkpoint, state)
                self._publish()
                return
            except StepLost as lost:
                reason = str(lost)

    def _rewind(self, checkpoint: Path | None, state: dict[str, Any]) -> None:
        """Take the state of `checkpoint`, None: of the start."""
        self.step, self.checkpoint, self._saved_step = state["step"], checkpoint, state["step"] if checkpoint else None
        checkpoints.set_aside_after(self.run_dir, self.step)
        self.prompts.restore(state["data"])
        self._expected = ExpectedLengths(state.get("expected_lengths"))
        if self.probe is not None:
            self.probe.reset(checkpoint)
        self._finished_state, self._unsavable = self._state(), ""
        self.log.rewind(self.step)

    def train_step(self) -> tuple[Metrics, Completions]:
        """One GRPO step: sample every group, score it, learn from complete groups while others decode, update,
        publish."""
        started = time.time()
        groups, waves = self._new_groups(), Waves(self.config, self.cluster.traffic)
        rounds = self._sample(groups, waves)
        return self._end_step(groups, rounds, self._update(groups, waves), started=started)

    def _new_groups(self) -> StepGroups:
        prompts, size = self.prompts.next_batch(), self.config.rollout.group_size
        with_reference = self.config.objective.needs_reference and self.config.reference.placement == "workers"
        return StepGroups(prompts, self.config, group_size=size, step=self.step, with_reference=with_reference)

    @phase("sample")
    def _sample(self, groups: StepGroups, waves: Waves) -> list[RolloutStats]:
        """Sample and score the step's groups, handing complete ones to the learner; rollout statistics of every round
        of sampling.

        With objective.dynamic_sampling groups without signal are replaced by new prompts, as many as are missing, in a
        bounded number of rounds (DAPO, arXiv 2503.14476, section 3.2). A round decodes to its end: stopping it early
        would favour short responses.
        """
        objective, wanted = self.config.objective, self.config.data.prompts_per_step
        prompts, rounds = groups.prompts, []
        while prompts:
            self._start_rollout(prompts, self.config.rollout.group_size, batch=self.step)
            is_last = not objective.dynamic_sampling or len(rounds) + 1 == objective.dynamic_sampling_rounds
            for arrival in self.cluster.traffic.arrivals():
                self._enter(arrival, groups)
                for group in groups.take_complete():
                    if groups.trains(group):
                        waves.add(group)
                if groups.all_complete() and (is_last or len(groups.trained()) == wanted):
                    waves.finish()
            rounds.append(self.cluster.rollout.ends)
            missing = 0 if is_last else wanted - len(groups.trained())
            prompts = self.prompts.next_batch(missing, len(groups.groups))
            groups.extend(prompts)
        if len(groups.trained()) < wanted:
            found = f"{len(groups.trained())} of {wanted} groups have a signal"
            self.log.warn_seldom(f"step {self.step + 1}: {found} after {len(rounds)} rounds of sampling")
        return rounds

    @phase("update")
    def _update(self, groups: StepGroups, waves: Waves, following: StepGroups | None = None) -> UpdateReport:
        """Step the optimizer as often as the objective asks, once all rows of an update are in; `following`: groups
        that are sampled meanwhile."""
        if self.step - groups.step > self.config.run.max_staleness:
            allowed = self.config.run.max_staleness
            raise RuntimeError(
                f"samples of weights version {groups.step} are to train version {self.step}: "
                f"run.max_staleness={allowed}"
            )
        report, backward_done = [], time.time()
        # after the first optimizer step the others are waited for, as long as a save would still have time
        with ExitStack() as begun:
            for totals, is_last in waves.updates():
                for arrival in self.cluster.traffic.arrivals(until_learner_is_idle=True):
                    self._enter(arrival, following or groups, rows_of=groups)
                backward_done = time.time()
                if self.probe is not None and not report and following is None:
                    self.cluster.lengths.ask()
                self._unsavable = "the learner has begun the next update"
                with self.interruption.held(self.config.run.grace_s):
                    report.append(self.cluster.learner.step(totals, is_last=is_last))
                if len(report) == 1:
                    begun.enter_context(self.interruption.held(self.config.run.grace_s - self._save_seconds))
        return UpdateReport(report, backward_done, time.time())

    def _end_step(
        self,
        groups: StepGroups,
        rounds: list[RolloutStats],
        update: UpdateReport,
        *,
        started: float,
        following: StepGroups | None = None,
    ) -> tuple[Metrics, Completions]:
        """Publish the new weights; the step's metrics and some of its completions. `following`: groups that were
        sampled meanwhile."""
        self.step += 1
        # as long as a save would still have time
        with self.interruption.held(self.config.run.grace_s - self._save_seconds):
            predictor = self._learn_lengths()
            synced = self._publish()
        self.cluster.monitor.metrics.observe("weight_sync_seconds", synced.seconds)
        self._count_failures(groups)
        metrics = (
            sample_metrics(groups)
            | forecast_metrics(groups)
            | update_metrics(update.metrics)
            | rollout_metrics(rounds)
            | predictor
        )
        metrics |= timing_metrics(
            groups, following or groups, started=started, backward_done=update.backward_done, updated=update.ended
        )
        metrics |= {"weight_sync/bytes": synced.num_bytes, "timing/weight_sync": synced.seconds}
        completions = self.recorder.keep(groups, self.cluster.micro_groups.completions, metrics, step=self.step)
        self._expected.observe(groups.lengths_by_row())
        self.cluster.micro_groups.forget(groups.micro_groups)
        return metrics, completions

    @phase("evaluate")
    def evaluate(self) -> dict[str, float | None]:
        """Sample and score the held-out problems with the current weights."""
        started, samples = time.time(), self.config.run.eval_samples
        groups = StepGroups(self.eval_prompts, self.config, group_size=samples, step=self.step, with_reference=False)
        self._start_rollout(self.eval_prompts, samples, batch=self.step, evaluation=True)
        for arrival in self.cluster.traffic.arrivals():
            self._enter(arrival, groups)
        self._count_failures(groups)
        self.cluster.micro_groups.forget(groups.micro_groups)
        return evaluation_metrics(groups, samples) | {"timing/eval": time.time() - started}

    @phase("save")
    def save(self) -> None:
        """Keep everything a resumed run needs, as of the last finished step.

        When it cannot be written (a full disk) the checkpoint before stays; only at the end of the run that is an
        error.
        """
        started = time.time()

        def save_parts(folder: str) -> None:
            self.cluster.learner.save(folder)
            if self.probe is not None:
                self.probe.save(Path(folder))

        try:
            with self.interruption.held(self.config.run.grace_s):  # it is what SIGTERM would want
                self.checkpoint = checkpoints.write_checkpoint(self.run_dir, self._finished_state, save_parts)
        except StepLost:
            raise
        except (OSError, RuntimeError) as error:
            if self.step == self.total_steps:
                raise
            self.log.warn(
                f"the checkpoint of step {self.step} could not be written ({error}); {self.checkpoint or 'none'} is "
                "the last good one"
            )
            return
        self._saved_step = self._finished_state["step"]
        for kept in checkpoints.drop_old(self.run_dir, self.config.run.keep_checkpoints):
            self.log.warn_seldom(kept)
        self._save_seconds = time.time() - started
        self.log.note(f"checkpoint {self.checkpoint} written in {self._save_seconds:.1f} s")
        self.log.write_report()

    def _keep_what_is_finished(self) -> None:
        """Before the end: drop the unfinished step, and save the last finished one if there is time for it."""
        saved, left, reason = (
            self._saved_step,
            self.interruption.seconds_left(self.config.run.grace_s),
            self.interruption.reason,
        )
        finished = self._finished_state["step"]
        if finished == (saved or 0):
            self.log.note(f"{reason}: stopped after step {finished}; nothing but the unfinished step is lost")
            return
        if self._unsavable:
            why = self._unsavable
        elif self._save_seconds > left:
            why = f"saving takes {self._save_seconds:.1f} s, run.grace_s leaves {max(0.0, left):.1f}"
        else:
            why = "it could not be saved"
            try:
                with self.interruption.held(self.config.run.grace_s):
                    self.cluster.traffic.abandon(for_good=True)
                    self.step = finished
                    self.save()
            except (StepLost, OSError, RuntimeError) as error:
                why = str(error)
            except Terminated:
                why = f"the save did not end within run.grace_s={self.config.run.grace_s:g}"
            if self._saved_step == finished:
                self.log.note(f"{reason}: stopped after step {finished}; nothing but the unfinished step is lost")
                return
        self.log.warn(
            f"{reason}: {why}: steps {(saved or 0) + 1} to {finished} are lost; {self.checkpoint or 'no checkpoint'} "
            "is kept"
        )

    def _state(self) -> dict[str, Any]:
        return {"step": self.step, "data": self.prompts.state(), "expected_lengths": self._expected.state()}

    @phase("learn")
    def _learn_lengths(self) -> dict[str, float | None]:
        """Bring the length probe up to the step's samples, for the next one; its metrics, of the step that has
        ended."""
        if self.probe is None:
            return {}
        metrics = {"predictor/used": float(self.probe.published().is_used)}
        reports, started = self.cluster.lengths.take(), time.time()
        switched = self.probe.enter(reports)
        if switched:
            self.log.note(f"after step {self.step}: {switched}")
        return metrics | {
            "predictor/steps_saved": self.probe.steps_saved,
            "predictor/fit_seconds": time.time() - started,
        }

    def _start_rollout(self, prompts: list[Prompt], samples: int, *, batch: int, evaluation: bool = False) -> None:
        """`batch`: number of the step that these samples will train, which their noise is made from."""
        whole_prompts = self.config.rollout.schedule == "dynamic_slot" and not evaluation
        expected = [self._expected(prompt) for prompt in prompts]
        workers = len(self.cluster.weights.holders)
        dealt = deal(prompts, samples, workers, whole_prompts=whole_prompts, expected=expected)
        self.cluster.rollout.start(dealt, step=batch, evaluation=evaluation)

    def _enter(self, arrival: Arrival, groups: StepGroups, rows_of: StepGroups | None = None) -> None:
        """Put what has arrived into the step's book (learner rows into that of `rows_of`); a micro-group goes on to
        reward and reference at once."""
        match arrival:
            case RowArrival(rank, report):
                (rows_of or groups).row_times.append((rank, report["started_at"], report["ended_at"]))
            case MicroGroupArrival(key, header):
                if header.policy_version != groups.step:
                    raise RuntimeError(
                        f"a micro-group was sampled by weights version {header.policy_version}, not by version "
                        f"{groups.step}"
                    )
                prompt = groups.add_micro_group(key, header).prompt
                self.cluster.traffic.score(key, prompt)
                if groups.with_reference:
                    self.cluster.traffic.reference_logprobs(key, prompt)
            case MicroGroupLost(key):
                groups.forget(key)
            case RewardArrival(key, result):
                for failure in result.failures[: max(0, FAILURES_SHOWN - len(groups.failures))]:
                    self.log.warn_seldom(failure)
                groups.add_rewards(key, result)
            case ReferenceArrival(key, report):
                groups.add_reference(key, report)

    def _count_failures(self, groups: StepGroups) -> None:
        if len(groups.failures) > FAILURES_SHOWN:
            self.log.warn_seldom(
                f"... and {len(groups.failures) - FAILURES_SHOWN} more failed reward calls after step {self.step}"
            )

    def _is_due(self, every: int) -> bool:
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)

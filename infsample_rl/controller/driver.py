"""The single controller: takes a prepared run from its start to its last step. What happens within a step: step.py."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from infsample_rl.cluster.cluster import Cluster
from infsample_rl.cluster.dealing import ExpectedLengths
from infsample_rl.cluster.interruption import Interruption, Terminated
from infsample_rl.cluster.monitor import ClusterCounts
from infsample_rl.cluster.workers import StepLost
from infsample_rl.config import Config
from infsample_rl.controller.async_step import AsyncTrainingStep
from infsample_rl.controller.checks import Start, claim_run_folder, open_run_folder
from infsample_rl.controller.evaluation import Evaluation
from infsample_rl.controller.recovery import Recovery
from infsample_rl.controller.run_state import RunState
from infsample_rl.controller.saving import CheckpointSaver
from infsample_rl.controller.start_table import in_short
from infsample_rl.controller.step import TrainingStep
from infsample_rl.controller.step_metrics import Metrics
from infsample_rl.controller.step_records import StepRecorder
from infsample_rl.observe.phases import report_phases
from infsample_rl.observe.run_log import RunLogger
from infsample_rl.observe.screen import Screen, aligned
from infsample_rl.observe.summary import summary
from infsample_rl.observe.timeline import Timeline
from infsample_rl.rollout.environment.turn_records import forget_turns

LAST_PHASES_S = 5.0  # how long a run that ends waits for its workers' last phases


class Driver:
    """Runs a prepared start (prompts, tokenizer, where to resume) to its last step."""

    def __init__(self, config: Config, start: Start, *, make_cluster: Callable[..., Cluster] = Cluster) -> None:
        """Reach the cluster, then open the run folder and its log. `make_cluster`: Cluster, or what takes its
        arguments.

        Where the cluster cannot be had or does not hold the run: ValueError or RuntimeError, and Terminated after
        SIGTERM; nothing has been written then.
        """
        run_dir, total_steps, interruption = Path(config.run.dir or "."), start.total_steps, Interruption()
        steps = {"total_steps": total_steps, "start_step": start.step}
        screen = Screen(config, **steps)
        screen.keep(aligned(f"{config.run.name}: what was derived", start.table))
        screen.print(aligned(f"{config.run.name} (in full: run.log)", in_short(start.table)))
        cluster = make_cluster(config, total_steps=total_steps, note=screen.line, interruption=interruption)
        _reach(cluster, interruption)
        open_run_folder(run_dir, start)
        self._lock = start.lock  # held for as long as this process lives
        log = RunLogger(config, run_dir, screen=screen, **steps)
        for warning in start.warnings:
            log.warn(warning)
        log.note("first prompt: " + repr(start.prompts.first_rendered))
        self.run_state = RunState(
            config=config,
            run_dir=run_dir,
            total_steps=total_steps,
            cluster=cluster,
            log=log,
            interruption=interruption,
            prompts=start.prompts,
            openings=start.openings,
            probe=start.probe,
            expected_lengths=ExpectedLengths(start.expected_lengths),
            step=start.step,
        )
        self.saver = CheckpointSaver(self.run_state, start.checkpoint)
        self.recovery = Recovery(self.run_state, self.saver)
        self.evaluation = Evaluation(self.run_state, start.eval_prompts)
        self._recorder = StepRecorder(self.run_state, start.tokenizer)
        self._timeline = Timeline(run_dir / "trace.json", start_step=start.step)

    def run(self) -> None:
        """Train to the last step, evaluating and saving on the way; end with a summary. After SIGTERM save what is
        finished.

        RuntimeError when Ray itself is gone, after the same; for what else ends a run, too.
        """
        run, started, failed = self.run_state, time.monotonic(), True
        try:
            self._start()
            while not self._is_finished():
                try:
                    self._go_on()
                except StepLost as lost:
                    self.recovery.return_to_checkpoint(str(lost))
            run.cluster.monitor.ask_phases(rollout=True)
            self._draw_phases(wait_s=LAST_PHASES_S)
            forget_turns(run.run_dir)
            failed = False
        except Terminated:
            self.saver.save_before_the_end()
            _raise_what_is_gone(run.interruption)
            failed = False
        finally:
            with ExitStack() as ends:  # each of them, whatever another raises; the last first
                ends.callback(run.cluster.stop)
                ends.callback(lambda: run.log.close(failed=failed))
                ends.callback(self._timeline.close)
                ends.callback(run.openings.close)
            # Ray has put back what there was before it; a second SIGTERM changes nothing now
            run.interruption.install()
        seconds = time.monotonic() - started
        print(summary(run.config, run.run_dir, checkpoint=self.saver.checkpoint, seconds=seconds), flush=True)

    def _start(self) -> None:
        """Start all workers, with the weights that sample first."""
        run, checkpoint = self.run_state, self.saver.checkpoint
        run.cluster.start(str(checkpoint) if checkpoint else None)
        run.log.keep("learner: " + ", ".join(f"{name} {value}" for name, value in run.cluster.learner.facts.items()))
        claim_run_folder(run.config, run.run_dir, run.step)
        if run.step:
            run.log.rewind(run.step)
        try:
            run.publish_weights()
        except StepLost as lost:
            self.recovery.return_to_checkpoint(str(lost))
        # what is there now stays: a collection need not look at libraries and settings again, a tenth of a second
        # each time
        gc.freeze()
        gc.set_threshold(20_000)  # a step makes tens of thousands of records and no cycle
        run.log.start_progress(run.cluster.monitor.now)

    def _is_finished(self) -> bool:
        run = self.run_state
        return run.step >= run.total_steps and self.saver.saved_step == run.step and not self.evaluation.is_owed()

    def _go_on(self) -> None:
        """Train from the step that is there to the last."""
        run = self.run_state
        make_step = AsyncTrainingStep if run.config.run.max_staleness > 0 else TrainingStep
        step = make_step(run, self.saver, self._recorder)  # a new one: what a lost step had sampled is gone
        self.evaluation.catch_up()
        while run.step < run.total_steps:
            run.cluster.check_nodes()
            before = run.cluster.monitor.counts()
            metrics, completions, data_state, ahead = step.train_step()
            metrics |= self._observe_step(before)
            self.saver.step_finished(data_state, ahead)
            self.recovery.step_finished()
            run.log.log_step(run.step, metrics, completions)
            if run.is_due(run.config.run.checkpoint_every):
                self.saver.save()
            elif not run.config.run.checkpoint_every:
                forget_turns(run.run_dir, run.step)  # a run that goes back begins anew
            self.evaluation.catch_up()  # behind the save, which whatever ends an evaluation must not cost

    def _observe_step(self, before: ClusterCounts) -> Metrics:
        """Enter the step that has just ended into metrics and timeline, and ask the workers what they did in it.
        `before`: when it began."""
        cluster, now = self.run_state.cluster, self.run_state.cluster.monitor.counts()
        self._draw_phases()
        self._timeline.end_step(self.run_state.step, before.at, now.at)
        cluster.monitor.ask_phases()
        return {
            # what the driver did beside waiting
            "timing/driver": max(0.0, now.at - before.at - (now.waited_s - before.waited_s)),
            "cluster/rollout_workers": before.rollout_workers,
            "cluster/samples_moved": now.samples_moved - before.samples_moved,
            "cluster/restarts": now.restarts,
        }

    def _draw_phases(self, *, wait_s: float = 0.0) -> None:
        """The driver's own phases, and those that the workers have told of within `wait_s` seconds."""
        own = report_phases("driver", 0, platform.node())
        self._timeline.add([own, *self.run_state.cluster.monitor.phases(wait_s=wait_s)])


def _reach(cluster: Cluster, interruption: Interruption) -> None:
    """Reach the cluster; what Ray has started ends where that fails."""
    try:
        cluster.reach()
    except BaseException as failure:
        cluster.stop()
        if isinstance(failure, Terminated):
            _raise_what_is_gone(interruption)
        raise


def _raise_what_is_gone(interruption: Interruption) -> None:
    """RuntimeError where not SIGTERM ended the run."""
    if interruption.failure is not None:
        raise RuntimeError(
            f"{interruption.failure}; once Ray is there again, run.resume=auto and the same settings go on"
        ) from None

"""Checkpoints of a run: one when it is due, and one of what is finished when the run has to end."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from infsample_rl.cluster.interruption import Terminated
from infsample_rl.cluster.workers import StepLost
from infsample_rl.controller import checkpoints
from infsample_rl.controller.ahead import fetch_all, write_ahead
from infsample_rl.controller.groups import StepGroups
from infsample_rl.controller.run_state import RunState
from infsample_rl.observe.phases import phase
from infsample_rl.rollout.environment.turn_records import forget_turns
from infsample_rl.types import Completion


class CheckpointSaver:
    """Saves the last finished step."""

    def __init__(self, run: RunState, checkpoint: Path | None) -> None:
        self._run = run
        self._seconds = 0.0  # that the last save took
        self._kept_ahead: list[list[Completion]] | None = None  # fetched before all that arrived is forgotten
        self.go_on_from(checkpoint)

    def go_on_from(self, checkpoint: Path | None) -> None:
        """The run stands where `checkpoint` was written; None: at its start."""
        self.checkpoint = checkpoint
        # of the checkpoint, whatever becomes of its files
        self.saved_step = None if checkpoint is None else self._run.step
        self.step_finished(self._run.prompts.state())

    def step_finished(self, data_state: dict[str, Any], ahead: StepGroups | None = None) -> None:
        """From now on this step is what is saved; `data_state`: position in the data behind it, `ahead`: samples that
        the next step has already."""
        self.finished = self._run.to_save(data_state)
        self._ahead = [] if ahead is None else ahead.micro_groups
        self.unsavable = ""  # why the learner could not save the finished step now

    def held_while_a_save_has_time(self, share: float = 1.0) -> AbstractContextManager[None]:
        """SIGTERM waits for what is done herein, as long as a save would still have time, or for a share of that."""
        return self._run.interruption.held(share * (self._run.config.run.grace_s - self._seconds))

    @phase("save")
    def save(self) -> None:
        """Keep everything a resumed run needs.

        When it cannot be written (a full disk) the checkpoint before stays; only at the end of the run that is an
        error.
        """
        run, started = self._run, time.monotonic()
        try:
            with run.interruption.held(run.config.run.grace_s):  # it is what SIGTERM would want
                self.checkpoint = checkpoints.write_checkpoint(run.run_dir, self.finished, self._save_parts)
        except StepLost:
            raise
        except (OSError, RuntimeError) as error:
            if run.step == run.total_steps:
                raise
            run.log.warn(
                f"the checkpoint of step {run.step} could not be written ({error}); {self.checkpoint or 'none'} is "
                "the last good one"
            )
            return
        self.saved_step = self.finished["step"]
        forget_turns(run.run_dir, self.saved_step)
        for kept in checkpoints.drop_old(run.run_dir, run.config.run.keep_checkpoints):
            run.log.warn_seldom(kept)
        self._seconds = time.monotonic() - started
        run.log.note(f"checkpoint {self.checkpoint} written in {self._seconds:.1f} s")
        run.log.write_report()

    def _save_parts(self, folder: str) -> None:
        self._run.cluster.learner.save(folder)
        if self._ahead:
            kept = self._kept_ahead or fetch_all(self._ahead, self._run.cluster.micro_groups.completions)
            if kept is None:
                self._run.log.warn(
                    f"the samples for step {self.finished['step'] + 1} are gone with a worker and not in the "
                    "checkpoint: a resumed run draws them by newer weights"
                )
            else:
                write_ahead(Path(folder), kept)
        if self._run.probe is not None:
            self._run.probe.save(Path(folder))

    def save_before_the_end(self) -> None:
        """The run is told to end: drop the unfinished step, save the last finished one if there is time for it, and say
        what is lost."""
        run, finished, saved = self._run, self.finished["step"], self.saved_step or 0
        why = "" if finished == saved else self._try_to_save()
        if why:
            run.log.warn(
                f"{run.interruption.reason}: {why}: steps {saved + 1} to {finished} are lost; "
                f"{self.checkpoint or 'no checkpoint'} is kept"
            )
        else:
            run.log.note(
                f"{run.interruption.reason}: stopped after step {finished}; nothing but the unfinished step is lost"
            )

    def _try_to_save(self) -> str:
        """Why the finished step could not be saved; empty where it was."""
        run, grace_s = self._run, self._run.config.run.grace_s
        left = run.interruption.seconds_left(grace_s)
        if self.unsavable:
            return self.unsavable
        if self._seconds > left:
            return f"saving takes {self._seconds:.1f} s, run.grace_s leaves {max(0.0, left):.1f}"
        try:
            with run.interruption.held(grace_s):
                self._kept_ahead = fetch_all(self._ahead, run.cluster.micro_groups.completions)
                run.cluster.traffic.abandon(for_good=True)
                run.step = self.finished["step"]
                self.save()
        except (StepLost, OSError, RuntimeError) as error:
            return str(error)
        except Terminated:
            return f"the save did not end within run.grace_s={grace_s:g}"
        return "" if self.saved_step == self.finished["step"] else "it could not be saved"

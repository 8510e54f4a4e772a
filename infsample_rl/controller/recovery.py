"""Back to the last checkpoint when the unfinished step cannot be ended; the steps since then are done again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infsample_rl.cluster.dealing import ExpectedLengths
from infsample_rl.cluster.workers import StepLost
from infsample_rl.controller import checkpoints
from infsample_rl.controller.run_state import RunState
from infsample_rl.controller.saving import CheckpointSaver


class Recovery:
    """Brings a run back to its newest whole checkpoint, or to where it began."""

    def __init__(self, run: RunState, saver: CheckpointSaver) -> None:
        self._run, self._saver = run, saver
        self._origin = (saver.checkpoint, saver.finished)  # of the run that was resumed, or the start
        self._furthest = run.step  # the most updates so far

    def step_finished(self) -> None:
        """A step that is new renews the restarts; one that was done again does not: whatever ended it may come
        again."""
        if self._run.step > self._furthest:
            self._furthest = self._run.step
            self._run.cluster.restarts.step_finished()

    def return_to_checkpoint(self, reason: str) -> None:
        """Do the steps since the last checkpoint again, from the state it has; tried as often as restarts are left.

        RuntimeError when no checkpoint is whole, or restarts are used up.
        """
        self._saver.unsavable = "the learner is being brought back"
        while True:
            checkpoint, state, damages = self._newest_whole()
            if checkpoint is not None and not checkpoint.is_dir():  # no longer among those that are kept
                raise RuntimeError(
                    f"{'; '.join([reason, *damages])}; and no checkpoint of run.dir={self._run.run_dir} is whole: "
                    f"{checkpoint}, where it began, has been dropped"
                )
            back = (
                f"{reason}: going back to {checkpoint or 'the start'}; steps {state['step'] + 1} to "
                f"{self._saver.finished['step'] + 1} are done again"
            )
            try:
                self._run.cluster.return_to(str(checkpoint) if checkpoint else None, reason)
                self._rewind(checkpoint, state)
                for warning in (*damages, back):  # of the step gone back to: those of later ones have just been dropped
                    self._run.log.warn(warning)
                self._run.publish_weights()
                return
            except StepLost as lost:
                reason = str(lost)

    def _newest_whole(self) -> tuple[Path | None, dict[str, Any], list[str]]:
        """A checkpoint and its state, that of the origin where none is newer; and what is wrong with those that are
        newer."""
        newest, damages = checkpoints.newest_whole(self._run.run_dir)
        if newest is not None and (state := checkpoints.read_state(newest))["step"] > self._origin[1]["step"]:
            return newest, state, damages
        return *self._origin, damages

    def _rewind(self, checkpoint: Path | None, state: dict[str, Any]) -> None:
        """Take the state of `checkpoint`; None: of the start."""
        run = self._run
        run.step, run.failed_steps = state["step"], 0
        checkpoints.set_aside_after(run.run_dir, run.step)
        run.prompts.restore(state["data"])
        run.expected_lengths = ExpectedLengths(state.get("expected_lengths"))
        if run.probe is not None:
            run.probe.reset(checkpoint)
        self._saver.go_on_from(checkpoint)
        run.log.rewind(run.step)

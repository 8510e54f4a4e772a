"""Reward calls that failed: the first of a step are shown, the others counted, and a run that gets none is ended."""

from __future__ import annotations

from infsample_rl.controller.groups import StepGroups
from infsample_rl.controller.run_state import RunState
from infsample_rl.controller.saving import CheckpointSaver

SHOWN = 3  # of a step


def show_first(run: RunState, groups: StepGroups, failures: list[str]) -> None:
    """Warn of failures that have just arrived, beside those that `groups` has already."""
    for failure in failures[: max(0, SHOWN - len(groups.failures))]:
        run.log.warn_seldom(failure)


def show_number(run: RunState, groups: StepGroups) -> None:
    """Say how many failed beyond those that were shown."""
    if len(groups.failures) > SHOWN:
        run.log.warn_seldom(f"... and {len(groups.failures) - SHOWN} more failed reward calls after step {run.step}")


def end_if_all_fail(run: RunState, saver: CheckpointSaver, groups: StepGroups) -> None:
    """RuntimeError after reward.max_failed_steps steps in a row without a sample to train on, once the step before is
    saved.

    To be called when a step is sampled and not yet learned from.
    """
    is_trained = any(group.trained_samples() for group in groups.groups)
    run.failed_steps = 0 if is_trained else run.failed_steps + 1
    if run.failed_steps < run.config.reward.max_failed_steps:
        return
    if run.step not in (0, saver.saved_step):
        saver.save()
    raise RuntimeError(
        f"every reward of {run.failed_steps} steps in a row failed (reward.max_failed_steps), the first of the last "
        f"step: {groups.failures[0]}; once that is mended, run.dir={run.run_dir} and the same settings go on"
    )

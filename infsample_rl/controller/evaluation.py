"""Held-out problems, sampled and scored with the weights of now: when they are due, and when a run owes them."""

from __future__ import annotations

import time

from infsample_rl.controller.groups import StepGroups
from infsample_rl.controller.reward_failures import show_number
from infsample_rl.controller.run_state import RunState
from infsample_rl.controller.step import enter_samples, start_rollout
from infsample_rl.controller.step_metrics import Metrics, evaluation_metrics
from infsample_rl.observe.phases import phase
from infsample_rl.types import Prompt


class Evaluation:
    """Evaluates a run at its start, every run.eval_every steps, and at its end; never without held-out problems."""

    def __init__(self, run: RunState, prompts: list[Prompt]) -> None:
        self._run, self._prompts = run, prompts

    def is_owed(self) -> bool:
        """Whether the step that was done last is still to be evaluated."""
        if not self._prompts or not self._run.is_due(self._run.config.run.eval_every):
            return False
        record = self._run.log.record_of(self._run.step)
        return record is not None and "eval/accuracy" not in record

    def catch_up(self) -> None:
        """Evaluate before the first step, or the step that is done where that is owed."""
        run = self._run
        if run.step == 0 and self._prompts:
            run.log.log_step(0, self.evaluate(), [])
        elif self.is_owed():
            run.log.add_to_step(run.step, self.evaluate())

    @phase("evaluate")
    def evaluate(self) -> Metrics:
        """Sample and score the held-out problems with the current weights."""
        run, started, samples = self._run, time.time(), self._run.config.run.eval_samples
        # episodes of their own, the same at every evaluation
        prompts = run.openings.open(self._prompts, position=-len(self._prompts), check=run.interruption.check)
        groups = StepGroups(prompts, run.config, group_size=samples, step=run.step, with_reference=False)
        start_rollout(run, prompts, samples, batch=run.step, evaluation=True)
        for arrival in run.cluster.traffic.arrivals():
            enter_samples(run, arrival, groups)
        show_number(run, groups)
        run.cluster.micro_groups.forget(groups.micro_groups)
        return evaluation_metrics(groups, samples) | {"timing/eval": time.time() - started}

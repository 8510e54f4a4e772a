"""One call under way, whoever computes its tokens: how samples leave their rows, and who hears of their end."""

from __future__ import annotations

from abc import ABC, abstractmethod

from infsample_rl.rollout.engine.call import MicroGroups, RolloutStats, StopRule
from infsample_rl.rollout.engine.length_source import Watch
from infsample_rl.rollout.engine.turns import Turns, TurnTaking
from infsample_rl.rollout.schedule.prompt_group import Sample
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from infsample_rl.types import Completion, MaybeNone


class StepLoop(ABC):
    """One call under way, until its planner is done."""

    def __init__(
        self,
        planner: StepPlanner,
        stops: StopRule,
        micro_groups: MicroGroups,
        watch: Watch | MaybeNone,
        turns: Turns | None,
    ) -> None:
        """`watch`: predicts lengths and learns them. `turns`: what answers a sample that has ended a turn."""
        self.planner, self.stops, self.micro_groups, self.watch = planner, stops, micro_groups, watch
        self.stats = RolloutStats()
        truncates = micro_groups.truncates
        self.turns = None if turns is None else TurnTaking(turns, planner, truncates=truncates, ended=self._end)

    @abstractmethod
    def step(self) -> list[list[Completion]]:
        """One running step (more when KV is computed again); the micro-groups it completes."""

    def free(self) -> None:
        """Let go of all samples and KV."""
        self.planner.drop_all()
        if self.turns is not None:
            self.turns.close()

    def _end_step(self, ended: list[Sample]) -> None:
        """A step has been read, and with it the last token of these samples or of their turns."""
        self.micro_groups.stays.end(ended, self.planner.running_steps)
        if self.turns is None:
            self._end(ended)
            self.planner.end_step(ended)
        else:
            self.turns.send_away(ended)
            self.planner.end_step([])

    def _end(self, samples: list[Sample]) -> None:
        """Tell who watches samples that they have ended."""
        if self.watch is not None:
            for sample in samples:
                self.watch.ended(sample, len(sample.tokens), cut=sample.finish_reason == "length")

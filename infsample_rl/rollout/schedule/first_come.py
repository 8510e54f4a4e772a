"""vLLM's own rule, to be simulated beside our schedules: first come, first served, and the last to start gives way.

A request is let in when its prompt and its tokens so far have blocks, whatever it may grow to. When a row finds no
block, the row that was let in last gives all of its own back, waits at the front of the line, and is computed again
in the batch of the step in which it comes back (vllm/v1/core/sched/scheduler.py of vLLM 0.32).
"""

from __future__ import annotations

from collections.abc import Sequence

from infsample_rl.rollout.schedule.prompt_group import Sample
from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy

FIRST_COME = "first_come"


class FirstComePolicy(TokenBudgetPolicy):
    """In the place of the policy of `token_budget`."""

    def next_waiting(self, waiting: Sequence[Sample], *, turns: bool = False, parked: float = 1.0) -> int:
        """Who gave way comes first, in the order asked for."""
        return min(
            range(len(waiting)),
            key=lambda index: (waiting[index].admitted_order < 0, waiting[index].group_id, waiting[index].index),
        )

    def may_admit(
        self,
        running: Sequence[Sample],
        candidate: Sample,
        missing_pages: int,
        free_pages: int,
        response_pages: int,
        *,
        others_wait: bool = False,
    ) -> bool:
        """Whoever finds its pages, and one for its next token."""
        return not running or missing_pages + (candidate.num_tokens == 0) <= free_pages

    def victim(self, running: Sequence[Sample]) -> int:
        """The row that was let in last."""
        return max(range(len(running)), key=lambda index: running[index].admitted_order)

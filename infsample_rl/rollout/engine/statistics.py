"""Figures of an engine: of one call, and sums since it was made."""

from __future__ import annotations

from dataclasses import dataclass, field

from infsample_rl.rollout.schedule.step_planner import StepPlanner


@dataclass(slots=True)
class RolloutStats:
    """Figures of one call, so far."""

    running_steps: int = 0  # rounds in which every row got one token, plus one for every prefill that computes KV again
    row_utilisation: float = 0.0  # tokens sampled / (running_steps x slots); token_budget: x most rows at a time
    peak_kv_bytes: int = 0  # pages held at a time, prompts included
    kv_pool_bytes: int = 0  # pages allocated
    preemptions: int = 0  # rows that had to give their pages back unfinished
    # tokens whose KV had been given up and was computed again: of preempted samples, prefixes and prompts
    recomputed_tokens: int = 0
    parked_tokens: int = 0  # tokens whose KV was copied out of the pool and back instead
    predict_seconds: float = field(default=0.0, compare=False)  # spent on predicting lengths, and on learning to

    def read(self, planner: StepPlanner, page_bytes: int) -> None:
        """Take the planner's figures."""
        self.running_steps, self.preemptions = planner.running_steps, planner.num_preemptions
        self.recomputed_tokens, self.parked_tokens = planner.recomputed_tokens, planner.parked_tokens
        slots = planner.most_rows if planner.policy is not None else planner.num_slots
        self.row_utilisation = planner.num_tokens / (planner.running_steps * slots)
        self.peak_kv_bytes = planner.pool.peak_pages * page_bytes
        self.kv_pool_bytes = planner.pool.num_pages * page_bytes


@dataclass(slots=True)
class Totals:
    """Sums over all calls of an engine; they grow from step to step."""

    running_steps: int = 0
    last_step_at: float = 0.0  # time.time() of the last running step: when what a stream just yielded ended

"""Schedules over known lengths, without a model: the engine's own planner, driven by a list of ints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infsample_rl.config import SCHEDULES
from infsample_rl.rollout.kv_pool import KVPool, smallest_budget_tokens
from infsample_rl.rollout.prompt_group import GroupSettings, PromptGroup
from infsample_rl.rollout.step_planner import StepPlanner
from infsample_rl.rollout.token_budget import TokenBudgetPolicy


@dataclass(slots=True)
class Simulation:
    """What one prompt's group took."""

    running_steps: int = 0  # rounds in which every active row got one token, plus one for every rebuild
    completed: list[int] = field(default_factory=list)  # sample indices in finishing order
    finish_steps: list[int] = field(default_factory=list)  # running steps until each of them had ended
    peak_kv_tokens: int = 0  # whole pages, prompt included
    busy_row_steps: int = 0  # sum over steps of the rows that got a token
    preemptions: int = 0
    recomputed_tokens: int = 0


def simulate(
    lengths: Sequence[int],
    schedule: str,
    *,
    slots: int = 4,
    predicted: Sequence[float] | None = None,
    kv_budget_tokens: int | None = None,
    page_size: int = 1,
    prompt_tokens: int = 0,
    group_size: int | None = None,
    max_rows: int | None = None,
    max_new_tokens: int | None = None,
) -> Simulation:
    """Run `schedule` over samples of `lengths` tokens.

    predicted: what fptas, sjf, infinite and lpt order by (default: the true lengths). kv_budget_tokens: all KV, prompt included
    (default: slots x max_new_tokens plus the prompt). group_size: dynamic_slot draws from all given lengths and stops at the
    group_size-th finish (default: all of them). max_rows: most rows of token_budget. max_new_tokens: the cap of a response
    (default: the longest of `lengths`). Raises ValueError for an unknown schedule, empty or non-positive lengths, and a budget
    that no single sample fits in.
    """
    _check(lengths, schedule, slots, predicted, page_size, group_size, max_rows, max_new_tokens)
    cap = max_new_tokens or max(lengths)
    num_samples = group_size if schedule == "dynamic_slot" and group_size is not None else len(lengths)
    settings = GroupSettings(schedule, num_samples if schedule == "full_group" else slots, num_samples)
    budget = kv_budget_tokens
    if budget is None:
        budget = (settings.slots * -(-cap // page_size) + -(-prompt_tokens // page_size)) * page_size
    smallest = smallest_budget_tokens(prompt_tokens, cap, page_size)
    if budget < smallest:
        raise ValueError(f"kv_budget_tokens must be >= {smallest} to hold one prompt and one full response of {cap} tokens, got {budget}")
    order_by = None if schedule == "token_budget" and predicted is None else [float(length) for length in predicted or lengths]
    group = PromptGroup(0, [0] * prompt_tokens, list(range(num_samples)), settings, lambda sample_index: 0, lengths=order_by)
    pool = KVPool(budget // page_size, page_size)
    by_budget = schedule == "token_budget"
    planner = StepPlanner(
        [group],
        pool,
        num_slots=min(max_rows or len(lengths), pool.num_pages) if by_budget else settings.slots,
        prompts_at_once=1,
        max_new_tokens=cap,
        policy=TokenBudgetPolicy(page_size, cap) if by_budget else None,
    )
    return _run(planner, group, lengths)


def _run(planner: StepPlanner, group: PromptGroup, lengths: Sequence[int]) -> Simulation:
    result = Simulation()
    while not planner.is_done:
        rows = planner.next_step().rows
        planner.end_step([sample for sample in rows if sample.num_tokens == lengths[sample.sample_index % len(lengths)]])
        for sample in group.finished[len(result.completed) :]:
            result.completed.append(sample.sample_index)
            result.finish_steps.append(planner.running_steps)
    result.running_steps, result.busy_row_steps = planner.running_steps, planner.num_tokens
    result.peak_kv_tokens = planner.pool.peak_pages * planner.pool.page_size
    result.preemptions, result.recomputed_tokens = planner.num_preemptions, planner.recomputed_tokens
    return result


def _check(
    lengths: Sequence[int],
    schedule: str,
    slots: int,
    predicted: Sequence[float] | None,
    page_size: int,
    group_size: int | None,
    max_rows: int | None,
    max_new_tokens: int | None,
) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if len(lengths) == 0 or min(lengths) < 1:
        raise ValueError(f"lengths must be positive and at least one, got {list(lengths)[:8]}")
    if predicted is not None and len(predicted) != len(lengths):
        raise ValueError(f"predicted must have one length for each of the {len(lengths)} samples, got {len(predicted)}")
    for name, value in (("slots", slots), ("page_size", page_size), ("group_size", group_size), ("max_rows", max_rows)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    if group_size is not None and group_size > len(lengths):
        raise ValueError(f"group_size must be <= the {len(lengths)} given lengths, got {group_size}")
    if max_new_tokens is not None and max_new_tokens < max(lengths):
        raise ValueError(f"max_new_tokens must be >= the longest of lengths = {max(lengths)}, got {max_new_tokens}")

"""Schedules over known lengths, without a model: the engine's own planner, driven by lists of ints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from infsample_rl.config.fields import kv_pages
from infsample_rl.rollout.schedule.fast_forward import repeat_steps
from infsample_rl.rollout.schedule.kv_pool import MOST_POOLS, KVPool, Parking
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup, Sample
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy
from infsample_rl.rollout.simulator_arguments import Repredicted, check, group_sizes, orders_of, prompt_tokens_of
from infsample_rl.types import MaybeNone


class Stay(NamedTuple):
    """One sample in one row without a pause: from running step `start` (counted from 0) until `end` steps had
    passed."""

    prompt: int
    sample: int
    start: int
    end: int
    row: int


@dataclass(slots=True)
class Simulation:
    """What the prompts of one call took."""

    running_steps: int = 0  # rounds in which every active row got one token, plus one for every rebuild
    completed: list[int] = field(default_factory=list)  # sample indices in finishing order
    completed_prompts: list[int] = field(default_factory=list)  # the prompt of each of them
    finish_steps: list[int] = field(default_factory=list)  # running steps until each of them had ended
    kv_pool_tokens: int = 0  # all pages of the pool
    peak_kv_tokens: int = 0  # most held at a time, whole pages, prompts included
    busy_row_steps: int = 0  # sum over steps of the rows that got a token
    most_rows: int = 0  # at a time
    preemptions: int = 0
    recomputed_tokens: int = 0
    parked_tokens: int = 0
    stays: list[Stay] = field(default_factory=list)  # where record_rows was asked for: who decoded when, in which row


def simulate(
    lengths: Sequence[int],
    schedule: str,
    *,
    predicted: Sequence[float] | None = None,
    repredicted: Repredicted | None = None,
    **options: Any,
) -> Simulation:
    """Run `schedule` over the samples of one prompt; their lengths are in tokens. `options`: see simulate_prompts()."""
    return simulate_prompts(
        [lengths],
        schedule,
        prompts_at_once=1,
        predicted=None if predicted is None else [predicted],
        repredicted=None if repredicted is None else [repredicted],
        **options,
    )


def simulate_prompts(
    groups: Sequence[Sequence[int]],
    schedule: str,
    *,
    slots: int = 4,
    prompts_at_once: int = 2,
    predicted: Sequence[Sequence[float]] | None = None,
    repredicted: Sequence[Repredicted] | None = None,
    kv_budget_tokens: int | None = None,
    page_size: int = 1,
    prompt_tokens: int | Sequence[int] = 0,
    group_size: int | Sequence[int] | None = None,
    max_rows: int | None = None,
    max_new_tokens: int | None = None,
    parks: bool = False,
    record_rows: bool = False,
) -> Simulation:
    """Run `schedule` over prompts that share one pool: groups[p] are the lengths of prompt p's samples, in tokens.

    prompts_at_once: prompts resident together; the samples of later ones fill rows that earlier ones leave idle.
    predicted: for each prompt what fptas, sjf, infinite and lpt order by (default: the true lengths). repredicted: for
    each sample the predicted total length once it has generated that many tokens; token_budget follows it, the others
    take the first where `predicted` is not given. kv_budget_tokens: all KV, prompts included (default: slots x
    max_new_tokens plus the longest resident prompts). prompt_tokens, group_size: one number or one per prompt;
    dynamic_slot draws from all lengths and stops at the group_size-th finish (default, and for all other schedules:
    all). max_rows, parks (KV of preempted
    samples waits outside the pool, as in the engine, else it is computed again): token_budget's. max_new_tokens: the
    cap of a response (default: the longest of all). record_rows: fill `.stays`. Raises ValueError for an unknown
    schedule, lengths that are no positive whole numbers, predictions that are not finite and positive, a budget that no
    single sample fits in, and arguments the schedule does not read.
    """
    counts: dict[str, int | None] = {"slots": slots, "prompts_at_once": prompts_at_once, "page_size": page_size}
    counts |= {"kv_budget_tokens": kv_budget_tokens, "max_rows": max_rows, "max_new_tokens": max_new_tokens}
    cap = check(groups, schedule, counts)
    groups = [[int(length) for length in lengths] for lengths in groups]
    sizes, prompts = group_sizes(groups, schedule, group_size), prompt_tokens_of(prompt_tokens, len(groups))
    by_budget = schedule == "token_budget"
    if parks and not by_budget:
        raise ValueError(f"parks=True is not read by schedule {schedule}, which preempts nobody: leave it out")
    num_slots = max(map(len, groups)) if schedule == "full_group" else slots
    budget = pool_tokens(kv_budget_tokens, num_slots, cap, page_size, prompts, prompts_at_once)
    num_slots = min(_useful_slots(num_slots, schedule, groups, sizes), budget // page_size)  # as in the engine
    orders = orders_of(groups, schedule, predicted, repredicted)
    planned = [
        PromptGroup(
            place,
            [0] * tokens,
            list(range(samples)),
            GroupSettings(schedule, num_slots, samples),
            lambda _: 0,
            lengths=order,
        )
        for place, (samples, tokens, order) in enumerate(zip(sizes, prompts, orders, strict=True))
    ]
    pool = KVPool(budget // page_size, page_size)
    planner = StepPlanner(
        planned,
        pool,
        num_slots=min(max_rows or max(map(len, groups)) * prompts_at_once, pool.num_pages) if by_budget else num_slots,
        prompts_at_once=prompts_at_once,
        max_new_tokens=cap,
        policy=TokenBudgetPolicy(page_size, cap, parks=parks) if by_budget else None,
        parking=Parking(MOST_POOLS * pool.num_pages) if parks else None,
    )
    return _Run(planner, planned, groups, repredicted if by_budget else None, record_rows).to_end()


def _useful_slots(slots: int, schedule: str, groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> int:
    """More rows than samples change nothing, nor do more of dynamic_slot than let it decode every length as often as it
    keeps samples."""
    return min(slots, sum(map(len, groups)) * (max(sizes) if schedule == "dynamic_slot" else 1))


class _Run:
    """One simulation under way."""

    def __init__(
        self,
        planner: StepPlanner,
        groups: Sequence[PromptGroup],
        lengths: Sequence[Sequence[int]],
        repredicted: Sequence[Repredicted] | MaybeNone,
        record_rows: bool,
    ) -> None:
        self.planner, self.groups, self.lengths, self.repredicted = planner, groups, lengths, repredicted
        self.result = Simulation()
        self._record_rows = record_rows
        self._open: dict[Sample, tuple[int, int]] = {}  # samples in a row: since which step, in which one
        # of prompt and sample: tokens at which it is predicted again, the next one last
        self._moments: dict[tuple[int, int], list[int]] = {}
        for place, samples in enumerate(repredicted or ()):
            self._moments |= {(place, index): sorted(moments, reverse=True) for index, moments in enumerate(samples)}

    def to_end(self) -> Simulation:
        """Decode until every sample has ended."""
        planner, result = self.planner, self.result
        while not planner.is_done:
            steps_before = planner.running_steps
            rows = planner.next_step().rows
            if self._record_rows:
                self._record(rows, steps_before)
            repeat_steps(planner, self._steps_to_an_event(rows))
            if self._moments:
                self._predict_again(rows)
            self._end([sample for sample in rows if sample.num_tokens == self._length(sample)])
        result.running_steps, result.busy_row_steps = planner.running_steps, planner.num_tokens
        result.most_rows, result.preemptions = planner.most_rows, planner.num_preemptions
        result.recomputed_tokens, result.parked_tokens = planner.recomputed_tokens, planner.parked_tokens
        pool = planner.pool
        result.kv_pool_tokens, result.peak_kv_tokens = pool.num_pages * pool.page_size, pool.peak_pages * pool.page_size
        return result

    def _length(self, sample: Sample) -> int:
        lengths = self.lengths[sample.group_id]
        return lengths[sample.sample_index % len(lengths)]

    def _steps_to_an_event(self, rows: Sequence[Sample]) -> int:
        """Steps until a row ends or is predicted again."""
        steps = min(self._length(sample) - sample.num_tokens for sample in rows)
        for sample in rows if self._moments else ():
            moments = self._moments[sample.group_id, sample.sample_index]
            if moments:
                steps = min(steps, moments[-1] - sample.num_tokens)
        return steps

    def _predict_again(self, rows: Sequence[Sample]) -> None:
        for sample in rows:
            moments = self._moments[sample.group_id, sample.sample_index]
            if moments and moments[-1] == sample.num_tokens:
                sample.predicted = float(self.repredicted[sample.group_id][sample.sample_index][moments.pop()])

    def _end(self, ended: list[Sample]) -> None:
        self.planner.end_step(ended)
        kept = {sample for group in {sample.group for sample in ended} for sample in group.finished}
        for sample in ended:
            if sample in kept:
                self.result.completed.append(sample.sample_index)
                self.result.completed_prompts.append(sample.group_id)
                self.result.finish_steps.append(self.planner.running_steps)
        if self._record_rows:
            self._close(self.planner.running_steps)

    def _record(self, rows: Sequence[Sample], steps_before: int) -> None:
        """Note who has come into a row with the newest step and, as of the step before, who has left one."""
        self._close(steps_before)
        for sample in rows:
            self._open.setdefault(sample, (self.planner.running_steps - 1, sample.slot))

    def _close(self, end: int) -> None:
        for sample, (start, row) in list(self._open.items()):
            if sample.slot != row:
                self.result.stays.append(Stay(sample.group_id, sample.sample_index, start, end, row))
                del self._open[sample]


def pool_tokens(
    given: int | None, num_slots: int, cap: int, page_size: int, prompts: Sequence[int], prompts_at_once: int
) -> int:
    """Tokens of the pool: those `given`, by default num_slots full responses and the longest resident prompts, as in
    the engine.

    Raises ValueError, with the smallest budget that would do, when one prompt and one full response of `cap` tokens do
    not fit.
    """
    smallest = kv_pages(1, cap, [max(prompts)], page_size) * page_size
    if given is not None and given < smallest:
        raise ValueError(
            f"kv_budget_tokens must be >= {smallest} to hold one prompt and one full response of {cap} tokens, got "
            f"{given}"
        )
    longest = sorted(prompts, reverse=True)[:prompts_at_once]
    return given or kv_pages(num_slots, cap, longest, page_size) * page_size

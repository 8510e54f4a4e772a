"""Schedules over known lengths, without a model: the engine's own planner, driven by lists of ints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from infsample_rl.config.rollout import DEFAULT_SLOTS, MOST_ROWS, PLANNED_PROMPTS
from infsample_rl.rollout.length_prediction.recordings import MOST_TOKENS
from infsample_rl.rollout.schedule.drafter import Drafter
from infsample_rl.rollout.schedule.fast_forward import repeat_steps
from infsample_rl.rollout.schedule.first_come import FIRST_COME, FirstComePolicy
from infsample_rl.rollout.schedule.kv_budget import slots_in
from infsample_rl.rollout.schedule.kv_pool import MOST_POOLS, UNBOUNDED, KVPool, Parking
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup, Sample
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy
from infsample_rl.rollout.simulator_drafts import Accepted, Drafting, Text
from infsample_rl.rollout.simulator_input import (
    Repredicted,
    check_counts,
    check_read,
    group_sizes,
    one_each,
    orders_of,
    pool_tokens,
)


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
    slots: int = 0  # rows of a fixed-slot schedule
    kv_pool_tokens: int = 0  # all pages of the pool
    peak_kv_tokens: int = 0  # most held at a time, whole pages, prompts included
    busy_row_steps: int = 0  # sum over steps of the rows that decoded
    tokens: int = 0  # that they got
    drafted_tokens: int = 0  # that were run beside them
    most_rows: int = 0  # at a time
    preemptions: int = 0
    recomputed_tokens: int = 0
    parked_tokens: int = 0
    stays: list[Stay] = field(default_factory=list)  # where record_rows was asked for: who decoded when, in which row
    accepted: list[Accepted] = field(default_factory=list)  # drafted tokens that were kept


def slot_bound(lengths: Sequence[int], slots: int) -> float:
    """max(max l, sum l / slots): no schedule of `slots` rows takes fewer steps."""
    return max(max(lengths), sum(lengths) / slots)


def token_bound(lengths: Sequence[int], budget_tokens: float) -> float:
    """max(max l, sum l(l+1)/2 / budget): the least steps in which ramps of 1 to l tokens fit under the budget.

    A pool that takes a token's KV one step later can beat the second term by at most sum l / budget steps.
    """
    return max(max(lengths), sum(length * (length + 1) for length in lengths) / 2 / budget_tokens)


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
    slots: int | None = None,
    prompts_at_once: int | None = None,
    predicted: Sequence[Sequence[float]] | None = None,
    repredicted: Sequence[Repredicted] | None = None,
    prefix_tokens: int = 0,
    epsilon: float = 0.1,
    kv_budget_tokens: int | None = None,
    page_size: int = 1,
    prompt_tokens: int | Sequence[int] = 0,
    group_size: int | Sequence[int] | None = None,
    max_rows: int | None = None,
    max_new_tokens: int | None = None,
    parks: bool = False,
    record_rows: bool = False,
    texts: Sequence[Text] | None = None,
    drafts: int = 0,
    drafter: Drafter | None = None,
) -> Simulation:
    """Run `schedule` over prompts that share one pool: groups[p] are the lengths of prompt p's samples, in tokens.
    Beside the engine's schedules there is vLLM's own rule, "first_come".

    slots, epsilon: as rollout's. prompts_at_once: prompts resident together (default: as rollout.prompts_at_once=auto).
    predicted: for each prompt what fptas, sjf, infinite and lpt order by (default: the true lengths), once every sample
    has prefix_tokens. repredicted: for each sample the predicted total length once it has generated that many tokens,
    which token_budget follows. kv_budget_tokens: all KV, prompts included (default: slots x max_new_tokens plus the
    longest resident prompts). prompt_tokens, group_size: one number or one per prompt; dynamic_slot draws from all
    lengths and stops at the group_size-th finish (default, and for all other schedules: all). max_rows, parks (KV of
    preempted samples waits outside the pool, else it is computed again): token_budget's. max_new_tokens: the cap of a
    response (default: the longest of all). record_rows: fill `.stays`. texts: the prompts' and samples' token ids, of
    which up to `drafts` are drafted for every row of a step; drafter: knows the calls before. ValueError for an
    argument that is out of bounds, does not fit the others, or is not read by the schedule.
    """
    first_come, by_budget = schedule == FIRST_COME, schedule in (FIRST_COME, "token_budget")
    check_read(
        schedule, {"max_rows": max_rows, "parks": parks, "repredicted": repredicted}, {"prefix_tokens": prefix_tokens}
    )
    counts: dict[str, int | None] = {"slots": slots, "prompts_at_once": prompts_at_once, "page_size": page_size}
    counts |= {"kv_budget_tokens": kv_budget_tokens, "max_rows": max_rows, "max_new_tokens": max_new_tokens}
    cap = check_counts(groups, counts)
    groups = [[int(length) for length in lengths] for lengths in groups]
    sizes, prompts = group_sizes(groups, schedule, group_size), one_each("prompt_tokens", prompt_tokens, len(groups))
    resident = sorted(prompts, reverse=True)[: prompts_at_once or PLANNED_PROMPTS]
    num_slots, pool = _slots_and_pool(schedule, slots, max(sizes), kv_budget_tokens, cap, page_size, resident)
    # more rows than samples change nothing, nor do more than let dynamic_slot draw every length for every kept sample
    useful = sum(map(len, groups)) * (max(sizes) if schedule == "dynamic_slot" else 1)
    most_rows = max_rows or (max(sizes) * prompts_at_once if prompts_at_once else MOST_ROWS)
    rule = "arrival" if first_come else schedule
    rules = [GroupSettings(rule, num_slots, samples, epsilon, prefix_tokens) for samples in sizes]
    policy = FirstComePolicy if first_come else TokenBudgetPolicy
    most_parked = UNBOUNDED if first_come else MOST_POOLS * pool.num_pages
    planner = StepPlanner(
        _groups(rules, prompts, orders_of(groups, schedule, predicted, repredicted)),
        pool,
        num_slots=min(most_rows, pool.num_pages) if by_budget else min(num_slots, useful),
        prompts_at_once=prompts_at_once or len(groups),
        max_new_tokens=cap,
        policy=policy(page_size, cap, parks=parks) if by_budget else None,
        parking=Parking(most_parked) if parks or first_come else None,
    )
    drafting = Drafting(texts, drafts, drafter) if drafts else None
    found = _Run(planner, groups, repredicted or (), record_rows, drafting).to_end()
    found.slots = num_slots
    if first_come:  # what gave way is computed again, in the step in which it comes back
        found.recomputed_tokens, found.parked_tokens = found.parked_tokens, 0
    return found


def _groups(
    rules: Sequence[GroupSettings], prompts: Sequence[int], orders: Sequence[list[float] | None]
) -> list[PromptGroup]:
    """Groups of so many prompt tokens each."""
    return [
        PromptGroup(
            place,
            [0] * tokens,
            list(range(rule.group_size)),
            rule,
            lambda _: 0,
            predicted_in_rows=rule.prefix_tokens > 0,
            lengths=order,
        )
        for place, (rule, tokens, order) in enumerate(zip(rules, prompts, orders, strict=True))
    ]


def _slots_and_pool(
    schedule: str,
    slots: int | None,
    group_size: int,
    kv_budget_tokens: int | None,
    cap: int,
    page_size: int,
    resident: Sequence[int],
) -> tuple[int, KVPool]:
    """Rows of a fixed-slot schedule and the pool, as rollout.slots and rollout.kv_budget_tokens would give them."""
    if schedule == "full_group":
        slots = group_size
    pages = pool_tokens(kv_budget_tokens, slots or DEFAULT_SLOTS, cap, page_size, resident) // page_size
    if slots is None and kv_budget_tokens is not None:
        slots = slots_in(pages, cap, resident, page_size)
        slots = min(slots, group_size) if schedule == "dynamic_slot" else slots  # as RolloutConfig.most_rows
    return min(slots or DEFAULT_SLOTS, pages), KVPool(pages, page_size)


class _Run:
    """One simulation under way."""

    def __init__(
        self,
        planner: StepPlanner,
        lengths: Sequence[Sequence[int]],
        repredicted: Sequence[Repredicted],
        record_rows: bool,
        drafting: Drafting | None,
    ) -> None:
        self._drafting = drafting
        self.planner, self.lengths, self.repredicted = planner, lengths, repredicted
        self.result = Simulation()
        self._record_rows = record_rows
        self._open: dict[Sample, tuple[int, int]] = {}  # samples in a row: since which step, in which one
        # of prompt and sample: tokens at which it is predicted again, the next one last
        self._moments: dict[tuple[int, int], list[int]] = {}
        for place, samples in enumerate(repredicted):
            self._moments |= {(place, index): sorted(moments, reverse=True) for index, moments in enumerate(samples)}

    def to_end(self) -> Simulation:
        """Decode until every sample has ended."""
        planner, result = self.planner, self.result
        while not planner.is_done:
            steps_before = planner.running_steps
            rows = planner.next_step().rows
            if self._record_rows:
                self._record(rows, steps_before)
            if self._drafting is None:
                repeat_steps(planner, self._steps_to_an_event(rows))
            else:
                self._drafting.accept(planner, rows)
            if self._moments:
                self._predict_again(rows)
            self._end([sample for sample in rows if sample.num_tokens == self._length(sample)])
        result.running_steps, result.busy_row_steps = planner.running_steps, planner.row_steps
        result.tokens = planner.num_tokens
        if self._drafting is not None:
            result.drafted_tokens, result.accepted = self._drafting.drafted_tokens, self._drafting.accepted
            self._drafting.close()
        result.most_rows, result.preemptions = planner.most_rows, planner.num_preemptions
        result.recomputed_tokens, result.parked_tokens = planner.recomputed_tokens, planner.parked_tokens
        pool = planner.pool
        result.kv_pool_tokens, result.peak_kv_tokens = pool.num_pages * pool.page_size, pool.peak_pages * pool.page_size
        return result

    def _length(self, sample: Sample) -> int:
        lengths = self.lengths[sample.group_id]
        return lengths[sample.sample_index % len(lengths)]

    def _steps_to_an_event(self, rows: Sequence[Sample]) -> int:
        """Steps until a row ends, has its prefix or is predicted again."""
        steps = min(min(self._length(sample), sample.wait_at or MOST_TOKENS) - sample.num_tokens for sample in rows)
        for sample in rows if self._moments else ():
            moments = self._moments[sample.group_id, sample.sample_index]
            if moments:
                steps = min(steps, moments[-1] - sample.num_tokens)
        return steps

    def _predict_again(self, rows: Sequence[Sample]) -> None:
        for sample in rows:
            moments = self._moments[sample.group_id, sample.sample_index]
            while moments and moments[-1] <= sample.num_tokens:  # drafted tokens may lead past one
                sample.predicted = float(self.repredicted[sample.group_id][sample.sample_index][moments.pop()])

    def _end(self, ended: list[Sample]) -> None:
        if self._drafting is not None:
            self._drafting.end(ended)
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

"""Schedules over known lengths, without a model: the engine's own planner, driven by lists of ints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

from infsample_rl.config.fields import kv_pages
from infsample_rl.config.rollout import DEFAULT_SLOTS, MOST_ROWS, PLANNED_PROMPTS, PREDICTED_SCHEDULES
from infsample_rl.rollout.length_prediction.recordings import MOST_TOKENS
from infsample_rl.rollout.schedule.fast_forward import repeat_steps
from infsample_rl.rollout.schedule.kv_budget import slots_in
from infsample_rl.rollout.schedule.kv_pool import MOST_POOLS, KVPool, Parking
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup, Sample
from infsample_rl.rollout.schedule.schedules import check_predictions
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy

Repredicted = Sequence[Mapping[int, float]]  # of each sample: tokens generated -> predicted total length


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
    busy_row_steps: int = 0  # sum over steps of the rows that got a token
    most_rows: int = 0  # at a time
    preemptions: int = 0
    recomputed_tokens: int = 0
    parked_tokens: int = 0
    stays: list[Stay] = field(default_factory=list)  # where record_rows was asked for: who decoded when, in which row


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

    slots: as rollout.slots. prompts_at_once: prompts resident together (default: as rollout.prompts_at_once=auto).
    predicted: for each prompt what fptas, sjf, infinite and lpt order by (default: the true lengths), once every sample
    has prefix_tokens. repredicted: for each sample the predicted total length once it has generated that many tokens,
    which token_budget follows. kv_budget_tokens: all KV, prompts included (default: slots x max_new_tokens plus the
    longest resident prompts). prompt_tokens, group_size: one number
    or one per prompt; dynamic_slot draws from all lengths and stops at the group_size-th finish (default, and for all
    other schedules: all). max_rows, parks (KV of preempted samples waits outside the pool, else it is computed again):
    token_budget's. max_new_tokens: the cap of a response (default: the longest of all). record_rows: fill `.stays`.
    ValueError for an argument that is out of bounds, does not fit the others, or is not read by the schedule.
    """
    by_budget = schedule == "token_budget"
    for name, value in {"max_rows": max_rows, "parks": parks, "repredicted": repredicted}.items():
        if value and not by_budget:
            raise ValueError(f"{name} is not read by schedule {schedule}: leave it out")
    if prefix_tokens and schedule not in PREDICTED_SCHEDULES:
        raise ValueError(f"prefix_tokens is not read by schedule {schedule}: leave it out")
    counts: dict[str, int | None] = {"slots": slots, "prompts_at_once": prompts_at_once, "page_size": page_size}
    counts |= {"kv_budget_tokens": kv_budget_tokens, "max_rows": max_rows, "max_new_tokens": max_new_tokens}
    cap = _check_counts(groups, counts)
    groups = [[int(length) for length in lengths] for lengths in groups]
    sizes, prompts = _group_sizes(groups, schedule, group_size), _each("prompt_tokens", prompt_tokens, len(groups))
    resident = sorted(prompts, reverse=True)[: prompts_at_once or PLANNED_PROMPTS]
    num_slots = max(sizes) if schedule == "full_group" else slots or DEFAULT_SLOTS
    budget = pool_tokens(kv_budget_tokens, num_slots, cap, page_size, resident)
    if slots is None and kv_budget_tokens is not None and schedule != "full_group":
        num_slots = slots_in(budget // page_size, cap, resident, page_size)
    num_slots = min(num_slots, budget // page_size)
    # more rows than samples change nothing, nor do more than let dynamic_slot draw every length for every kept sample
    useful = sum(map(len, groups)) * (max(sizes) if schedule == "dynamic_slot" else 1)
    orders = _orders(groups, schedule, predicted, repredicted)
    most_rows = max_rows or (max(sizes) * prompts_at_once if prompts_at_once else MOST_ROWS)
    planned = [
        PromptGroup(
            place,
            [0] * tokens,
            list(range(samples)),
            GroupSettings(schedule, num_slots, samples, prefix_tokens=prefix_tokens),
            lambda _: 0,
            predicted_in_rows=prefix_tokens > 0,
            lengths=orders[place],
        )
        for place, (samples, tokens) in enumerate(zip(sizes, prompts, strict=True))
    ]
    pool = KVPool(budget // page_size, page_size)
    planner = StepPlanner(
        planned,
        pool,
        num_slots=min(most_rows, pool.num_pages) if by_budget else min(num_slots, useful),
        prompts_at_once=prompts_at_once or len(groups),
        max_new_tokens=cap,
        policy=TokenBudgetPolicy(page_size, cap, parks=parks) if by_budget else None,
        parking=Parking(MOST_POOLS * pool.num_pages) if parks else None,
    )
    found = _Run(planner, groups, repredicted or (), record_rows).to_end()
    found.slots = num_slots
    return found


class _Run:
    """One simulation under way."""

    def __init__(
        self,
        planner: StepPlanner,
        lengths: Sequence[Sequence[int]],
        repredicted: Sequence[Repredicted],
        record_rows: bool,
    ) -> None:
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


def pool_tokens(given: int | None, num_slots: int, cap: int, page_size: int, prompts: Sequence[int]) -> int:
    """Tokens of the pool: those `given`, by default num_slots full responses and the resident prompts, the longest
    first, as in the engine. ValueError, with the smallest budget that would do, when one prompt and one full response
    of `cap` tokens do not fit."""
    smallest = kv_pages(1, cap, prompts[:1], page_size) * page_size
    if given is not None and given < smallest:
        raise ValueError(f"kv_budget_tokens must be >= {smallest} to hold one prompt and a full response, got {given}")
    return given or kv_pages(num_slots, cap, prompts, page_size) * page_size


def _check_counts(groups: Sequence[Sequence[int]], counts: Mapping[str, int | None]) -> int:
    """The cap of a response, when lengths and counts are positive whole numbers."""
    lengths = [length for group in groups for length in group]
    if not lengths or min(map(len, groups)) == 0:
        raise ValueError("lengths must be positive and at least one of every prompt, got none")
    for length in lengths:
        if not (isinstance(length, Integral) and 1 <= length <= MOST_TOKENS):
            raise ValueError(f"lengths must be positive whole numbers of at most {MOST_TOKENS} tokens, got {length}")
    for name, value in counts.items():
        if value is not None and not (isinstance(value, Integral) and value >= 1):
            raise ValueError(f"{name} must be >= 1 and whole, got {value}")
    cap = counts["max_new_tokens"] or int(max(lengths))
    if cap < max(lengths):
        raise ValueError(f"max_new_tokens must be >= the longest of lengths = {max(lengths)}, got {cap}")
    return cap


def _each(name: str, given: int | Sequence[int], num_prompts: int) -> list[int]:
    found = list(given) if isinstance(given, Iterable) else [given] * num_prompts
    if len(found) != num_prompts or not all(isinstance(each, Integral) and 0 <= each <= MOST_TOKENS for each in found):
        wanted = f"must be >= 0 and whole, one number or one for each of the {num_prompts} prompts"
        raise ValueError(f"{name} {wanted}, got {given}")
    return found


def _group_sizes(groups: Sequence[Sequence[int]], schedule: str, given: int | Sequence[int] | None) -> list[int]:
    """Samples wanted of each prompt. Only dynamic_slot may be asked for fewer than the given lengths."""
    counts = [len(lengths) for lengths in groups]
    sizes = counts if given is None else _each("group_size", given, len(groups))
    for size, count in zip(sizes, counts, strict=True):
        if not 1 <= size <= count:
            raise ValueError(f"group_size must be >= 1 and <= the {count} given lengths, got {size}")
        if size != count and schedule != "dynamic_slot":
            raise ValueError(f"group_size={size} is not read by schedule {schedule}: give {size} of {count} lengths")
    return sizes


def _orders(
    groups: Sequence[Sequence[int]],
    schedule: str,
    predicted: Sequence[Sequence[float]] | None,
    repredicted: Sequence[Repredicted] | None,
) -> Sequence[list[float] | None]:
    """What each prompt's schedule orders by, None: nothing. ValueError for predictions that are no lengths."""
    for name, given in (("predicted", predicted), ("repredicted", repredicted)):
        if given is not None and list(map(len, given)) != list(map(len, groups)):
            raise ValueError(f"{name} must have one length for each sample of {list(map(len, groups))[:8]}")
    for moments in (moments for samples in repredicted or () for moments in samples):
        check_predictions(list(moments.values()), "repredicted")
        if min(moments, default=1) < 1:
            raise ValueError(f"repredicted must be made at 1 token or later, got {min(moments)}")
    for each in predicted or ():
        check_predictions(each, "predicted")
    if predicted is None and schedule == "token_budget":
        return [None] * len(groups)
    return [[float(length) for length in each] for each in predicted or groups]

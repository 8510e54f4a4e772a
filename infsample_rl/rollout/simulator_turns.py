"""Trajectories of several turns over known lengths, without a model: the engine's own planner and a clock, since tools
answer after seconds, not steps."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infsample_rl.config.fields import kv_pages
from infsample_rl.config.rollout import MOST_ROWS
from infsample_rl.rollout.schedule.first_come import FirstComePolicy
from infsample_rl.rollout.schedule.kv_pool import UNBOUNDED, KVPool, Parking
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup, Sample
from infsample_rl.rollout.schedule.residents import StepPlan
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy


class Trajectory(NamedTuple):
    """One sample: its turns, and what stands between two of them."""

    lengths: tuple[int, ...]  # tokens of each turn that is sampled
    observation_lengths: tuple[int, ...]  # tokens behind each turn but the last
    tool_seconds: tuple[float, ...]  # until each of them is there

    @property
    def tokens(self) -> int:
        """Sampled and observed."""
        return sum(self.lengths) + sum(self.observation_lengths)


class Costs(NamedTuple):
    """Seconds."""

    step: float  # of a running step
    row: float  # of a row in it
    prefill: float  # of a token of a prompt, of an observation, or that is computed again
    park: float  # of a token whose KV is copied out and back


@dataclass(slots=True)
class TurnSimulation:
    """What the trajectories took."""

    seconds: float = 0.0
    steps: int = 0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0  # prompts and observations, the first time
    recomputed_tokens: int = 0
    parked_tokens: int = 0
    peak_parked_tokens: int = 0
    peak_kv_tokens: int = 0
    waiting_kv_token_seconds: float = 0.0  # held in the pool by trajectories that wait for their tools
    idle_seconds: float = 0.0  # in which all waited

    @property
    def recomputed_share(self) -> float:
        """Of all tokens that were computed."""
        return self.recomputed_tokens / (self.sampled_tokens + self.prefilled_tokens + self.recomputed_tokens)


class _PrefixCachePlanner(StepPlanner):
    """vLLM: a turn that has ended leaves its blocks in the prefix cache, from which whoever needs them takes them one
    by one, those of the turn that began first before others, its last before its first."""

    def _give_up(self, sample: Sample) -> None:
        cached = (each for each in (*self.away, *self.line) if each.pages)
        super()._give_up(min(cached, key=lambda each: each.admitted_order))

    def _pages_to_be_had(self, sample: Sample) -> int:
        return sum(len(other.pages) for other in (*self.away, *self.line) if other is not sample)


def least_seconds(
    groups: Sequence[Sequence[Trajectory]], costs: Costs, kv_budget_tokens: int, prompt_tokens: Sequence[int]
) -> float:
    """max(longest trajectory with its tools, work over throughput): no order takes less. The work is every token's, and
    the steps in which the KV of decoding rows fits under the budget; waiting ones hold none."""
    longest = area = tokens = 0.0
    for trajectories, prompt in zip(groups, prompt_tokens, strict=True):
        tokens += prompt * costs.prefill
        for each in trajectories:
            own = sum(each.lengths) * (costs.step + costs.row) + sum(each.observation_lengths) * costs.prefill
            longest = max(longest, own + sum(each.tool_seconds) + prompt * costs.prefill)
            tokens += sum(each.lengths) * costs.row + sum(each.observation_lengths) * costs.prefill
            held = 0
            for place, length in enumerate(each.lengths):
                area += length * held + length * (length + 1) / 2
                held += length + (each.observation_lengths[place] if place < len(each.observation_lengths) else 0)
    return max(longest, tokens + costs.step * area / (kv_budget_tokens - min(prompt_tokens)))


def simulate_turns(
    groups: Sequence[Sequence[Trajectory]],
    costs: Costs,
    *,
    kv_budget_tokens: int,
    prompt_tokens: Sequence[int],
    cap: int,
    page_size: int = 16,
    parked_budget_tokens: int = UNBOUNDED,
    predicted: Sequence[Sequence[float]] | None = None,
    first_come: bool = False,
) -> TurnSimulation:
    """groups[p]: the trajectories of prompt p. They are decoded by token_budget, which parks, or by vLLM's rule beside
    a prefix cache of the same bytes (first_come), in which a turn that comes back stands before those that have not
    begun. cap: most tokens of a trajectory. predicted: whole lengths, as token_budget knows them; None: it knows none.
    ValueError for a trajectory above the cap, and for a budget that does not hold one prompt and one full trajectory.
    """
    longest = max(each.tokens for trajectories in groups for each in trajectories)
    if longest > cap:
        raise ValueError(f"cap must be >= the longest trajectory = {longest}, got {cap}")
    smallest = kv_pages(1, cap, [max(prompt_tokens)], page_size) * page_size
    if kv_budget_tokens < smallest:
        raise ValueError(f"kv_budget_tokens must be >= {smallest}, a prompt and a trajectory, got {kv_budget_tokens}")
    pool = KVPool(kv_budget_tokens // page_size, page_size)
    policy = (FirstComePolicy if first_come else TokenBudgetPolicy)(page_size, cap, parks=not first_come)
    planner = (_PrefixCachePlanner if first_come else StepPlanner)(
        [
            PromptGroup(
                place,
                [0] * prompt_tokens[place],
                list(range(len(trajectories))),
                GroupSettings("arrival", 1, len(trajectories)),
                lambda _: 0,
                lengths=None if predicted is None or first_come else list(predicted[place]),
            )
            for place, trajectories in enumerate(groups)
        ],
        pool,
        num_slots=min(MOST_ROWS, pool.num_pages),
        prompts_at_once=len(groups),
        max_new_tokens=cap,
        policy=policy,
        parking=None if first_come else Parking(parked_budget_tokens // page_size),
    )
    return _Run(planner, groups, costs, separate_prefills=not first_come).to_end()


class _Run:
    """One simulation under way."""

    def __init__(
        self,
        planner: StepPlanner,
        groups: Sequence[Sequence[Trajectory]],
        costs: Costs,
        *,
        separate_prefills: bool,
    ) -> None:
        """`separate_prefills`: every one is a pass of its own, as in the engine; else part of a step, as in vLLM."""
        self._planner, self._groups, self._costs = planner, groups, costs
        self._separate_prefills = separate_prefills
        self._turns: dict[Sample, int] = {}  # that have ended
        self._ends: dict[Sample, int] = {}  # tokens at which the turn ends that is sampled
        self._due: list[tuple[float, int, Sample]] = []  # who is away: until when
        self.result = TurnSimulation()

    def to_end(self) -> TurnSimulation:
        """Decode until every trajectory has ended."""
        planner, result = self._planner, self.result
        while not planner.is_done:
            plan = planner.next_step()
            if not plan.rows:
                self._wait_for_one()
                continue
            self._pass_time(self._seconds(plan))
            result.steps += 1
            result.sampled_tokens += len(plan.rows)
            self._end_turns(plan.rows)
            self._take_back()
        result.parked_tokens = planner.parked_tokens
        result.peak_kv_tokens = planner.pool.peak_pages * planner.pool.page_size
        return result

    def _trajectory(self, sample: Sample) -> Trajectory:
        return self._groups[sample.group_id][sample.sample_index]

    def _seconds(self, plan: StepPlan) -> float:
        """Of a step with the prefills before it."""
        costs, planner, result = self._costs, self._planner, self.result
        prompts = sum(len(group.prompt_ids) for group in plan.prefills)
        lacking = sum(sample.num_tokens - 2 - sample.num_kv_tokens for sample in plan.rebuilt)
        recomputed = planner.recomputed_tokens - result.recomputed_tokens
        result.recomputed_tokens = planner.recomputed_tokens
        result.prefilled_tokens += max(0, prompts + lacking - recomputed)
        copied = sum(len(pages) for _, pages in plan.parked) * planner.pool.page_size
        passes = 1 + (len(plan.rebuilt) + len(plan.prefills) if self._separate_prefills else 0)
        return (
            costs.step * passes + costs.row * len(plan.rows) + costs.prefill * (prompts + lacking) + costs.park * copied
        )

    def _pass_time(self, seconds: float) -> None:
        planner, result = self._planner, self.result
        result.seconds += seconds
        held = sum(len(sample.pages) for sample in planner.away) * planner.pool.page_size
        result.waiting_kv_token_seconds += held * seconds
        if planner.parking is not None:
            parked = planner.parking.num_taken * planner.pool.page_size
            result.peak_parked_tokens = max(result.peak_parked_tokens, parked)

    def _end_turns(self, rows: Sequence[Sample]) -> None:
        """Send away whose turn has ended, to its tools; end whose last."""
        ended = []
        for sample in list(rows):
            trajectory = self._trajectory(sample)
            if sample.num_tokens < self._ends.setdefault(sample, trajectory.lengths[0]):
                continue
            turn = self._turns[sample] = self._turns.get(sample, 0) + 1
            if turn == len(trajectory.lengths):
                ended.append(sample)
                continue
            self._planner.send_away(sample)
            place = sample.group_id << 32 | sample.sample_index
            heapq.heappush(self._due, (self.result.seconds + trajectory.tool_seconds[turn - 1], place, sample))
        self._planner.end_step(ended)

    def _take_back(self) -> None:
        """Whose tools have answered by now."""
        while self._due and self._due[0][0] <= self.result.seconds:
            sample = heapq.heappop(self._due)[2]
            trajectory, turn = self._trajectory(sample), self._turns[sample]
            observed = trajectory.observation_lengths[turn - 1]
            self._ends[sample] = sample.num_tokens + observed + trajectory.lengths[turn]
            self._planner.take_back(sample, observed)

    def _wait_for_one(self) -> None:
        seconds = max(0.0, self._due[0][0] - self.result.seconds)
        self.result.idle_seconds += seconds
        self._pass_time(seconds)
        self._take_back()

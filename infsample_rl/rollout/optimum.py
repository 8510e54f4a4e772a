"""How few running steps are possible at all when every length is known: bounds, and schedules that reach them or come
near.

With g slots this is the classical P||Cmax: jobs of given lengths on g equal machines, least makespan. With a budget of
KV tokens a sample of length l is a ramp that holds 1, 2, ..., l tokens in l steps and then nothing, and the ramps must
fit under the budget.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np

from infsample_rl.rollout.simulator import simulate

MOST_SEARCHED = 200  # samples up to which branch and bound is tried
MIXES = 40  # of two slots at random where splitting the fullest anew ends above the bound
PACKING_TRIES = 24  # orders in which the ramps are packed beside the first; fewer above 32 samples


class SlotOptimum(NamedTuple):
    """The best found for g slots."""

    steps: int
    proven: bool  # whether no schedule takes fewer


class TokenOptimum(NamedTuple):
    """The best found for a budget of KV tokens."""

    steps: int  # rebuilds included
    recomputed_tokens: int
    parked_tokens: int


class Packing(NamedTuple):
    """A schedule under a token budget that preempts nobody: sample i decodes in steps starts[i] + 1 to starts[i] +
    lengths[i]."""

    steps: int
    starts: list[int]


def slot_bound(lengths: Sequence[int], slots: int) -> float:
    """max(max l, sum l / slots): no schedule of `slots` rows takes fewer steps."""
    return max(max(lengths), sum(lengths) / slots)


def token_bound(lengths: Sequence[int], budget_tokens: float) -> float:
    """max(max l, sum l(l+1)/2 / budget): least steps if the newest token counts as held; our pool takes it a step later
    and may need fewer.

    Within a pool of `budget_tokens` response tokens that takes a token's KV one step later, the second term can be
    beaten by at most sum l / budget steps.
    """
    return max(max(lengths), sum(length * (length + 1) for length in lengths) / 2 / budget_tokens)


def slot_optimum(lengths: Sequence[int], slots: int, most_nodes: int = 20_000) -> SlotOptimum:
    """The least makespan on `slots` slots, or the best found within `most_nodes` nodes of branch and bound (then not
    proven).

    Longest first (LPT); then the fullest slot and another are split anew as evenly as subset sums allow, while that
    helps; then branch and bound, longest sample first, for one step less until there is none. slot_optimum([3, 3, 2, 2,
    2], 2).steps -> 6
    """
    if len(lengths) == 0 or min(lengths) < 1 or slots < 1:
        raise ValueError(f"lengths and slots must be >= 1, got {list(lengths)[:8]} and {slots}")
    slots = min(slots, len(lengths))
    bound = _makespan_bound(lengths, slots)
    steps = _makespan(_improve(_longest_first(lengths, slots), lengths, bound), lengths)
    while steps > bound and len(lengths) <= MOST_SEARCHED:
        search = _Search(lengths, slots, steps - 1, most_nodes)
        if not search.place(0):
            return SlotOptimum(steps, search.nodes_left > 0)
        most_nodes, steps = search.nodes_left, _makespan(search.groups, lengths)
    return SlotOptimum(steps, steps == bound)


def token_optimum(
    lengths: Sequence[int], budget_tokens: int, *, page_size: int = 1, max_new_tokens: int | None = None
) -> TokenOptimum:
    """The best schedule found that knows all lengths and holds at most `budget_tokens` response tokens: at most so many
    steps are needed.

    The best of token_packing, which preempts nobody, and of the engine's own token_budget planner given the true
    lengths, with preempted KV parked and with it computed again; its rebuilds count as steps. Of equal steps,
    the one that computes fewer tokens again, then parks fewer.
    """
    bound = token_bound(lengths, budget_tokens)
    optima = [TokenOptimum(token_packing(lengths, budget_tokens).steps, 0, 0)] if page_size == 1 else []
    for parks in (True, False):
        if optima and min(optima).steps <= bound:
            break
        found = simulate(
            lengths,
            "token_budget",
            predicted=lengths,
            kv_budget_tokens=budget_tokens,
            page_size=page_size,
            max_new_tokens=max_new_tokens,
            parks=parks,
        )
        optima.append(TokenOptimum(found.running_steps, found.recomputed_tokens, found.parked_tokens))
    return min(optima)


def token_packing(lengths: Sequence[int], budget_tokens: int, seed: int = 0) -> Packing:
    """A short clairvoyant schedule under `budget_tokens` response tokens, without preemption: an upper bound of the
    optimum.

    Every sample starts as early as its ramp fits under what is held already, longest first; then samples are moved in
    that order, at random, while it helps. Raises ValueError for a sample above the budget.
    """
    if len(lengths) == 0 or min(lengths) < 1:
        raise ValueError(f"lengths must be positive and at least one, got {list(lengths)[:8]}")
    if max(lengths) > budget_tokens:
        raise ValueError(f"budget_tokens must be >= the longest of lengths = {max(lengths)}, got {budget_tokens}")
    draw, bound = random.Random(seed), token_bound(lengths, budget_tokens)
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    best = _pack(lengths, budget_tokens, order)
    for _ in range(min(PACKING_TRIES, 768 // len(order))):
        if best.steps <= bound:
            break
        moved = list(order)
        moved.insert(draw.randrange(len(order)), moved.pop(draw.randrange(len(order))))
        found = _pack(lengths, budget_tokens, moved)
        if found.steps <= best.steps:
            order = moved
            best = found if found.steps < best.steps else best
    return best


def _pack(lengths: Sequence[int], budget: int, order: Sequence[int]) -> Packing:
    held, starts, end = np.zeros(2 * sum(lengths), dtype=np.int64), [0] * len(lengths), 0
    ramp = np.arange(1, max(lengths) + 1)
    for index in order:
        length, start = lengths[index], 0
        while (over := int((held[start : start + length] + ramp[:length]).max()) - budget) > 0:
            start += over  # one step later lowers the ramp by one wherever it is too high
        held[start : start + length] += ramp[:length]
        starts[index], end = start, max(end, start + length)
    return Packing(end, starts)


def _makespan(groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    return max(sum(lengths[index] for index in group) for group in groups)


def _makespan_bound(lengths: Sequence[int], slots: int) -> int:
    """The longest; the mean load in whole common divisors; and of the k g + 1 longest, k + 1 share a slot, for every
    k."""
    unit = gcd(*lengths)
    longest = sorted(lengths, reverse=True)
    shared = [sum(longest[k * slots - k : k * slots + 1]) for k in range(1, (len(lengths) - 1) // slots + 1)]
    return max(longest[0], -(-sum(lengths) // (unit * slots)) * unit, *shared)


def _longest_first(lengths: Sequence[int], slots: int) -> list[list[int]]:
    groups: list[list[int]] = [[] for _ in range(slots)]
    loads = [0] * slots
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        least = loads.index(min(loads))
        groups[least].append(index)
        loads[least] += lengths[index]
    return groups


def _improve(groups: list[list[int]], lengths: Sequence[int], bound: int) -> list[list[int]]:
    """Split the fullest group and another anew while the fullest gets less; where that ends above `bound`, mix two at
    random and go on."""
    draw, mixes = random.Random(0), MIXES if len(groups) > 2 else 0
    while True:
        groups.sort(key=lambda group: sum(lengths[index] for index in group))
        load = sum(lengths[index] for index in groups[-1])
        if load == bound:
            return groups
        for place, other in enumerate(groups[:-1]):
            halves = _split(groups[-1] + other, lengths)
            if max(sum(lengths[index] for index in half) for half in halves) < load:
                groups[-1], groups[place] = halves
                break
        else:
            if mixes == 0:
                return groups
            mixes -= 1
            one, two = draw.sample(range(len(groups)), 2)
            groups[one], groups[two] = _split(draw.sample(both := groups[one] + groups[two], len(both)), lengths)


def _split(indices: list[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """The two most even halves, by subset sums: bit s of reached[k] says whether some of the first k samples sum to
    s."""
    reached = [1]
    for index in indices:
        reached.append(reached[-1] | reached[-1] << lengths[index])
    half = sum(lengths[index] for index in indices) // 2
    left = (reached[-1] & ((1 << half + 1) - 1)).bit_length() - 1
    one, two = [], []
    for place in range(len(indices) - 1, -1, -1):
        if reached[place] >> left & 1:
            two.append(indices[place])
        else:
            one.append(indices[place])
            left -= lengths[indices[place]]
    return one, two


class _Search:
    """Branch and bound: is there an assignment in which no slot has more than `target` steps?"""

    def __init__(self, lengths: Sequence[int], slots: int, target: int, most_nodes: int) -> None:
        self.lengths, self.target, self.nodes_left = lengths, target, most_nodes
        self.order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        self.groups: list[list[int]] = [[] for _ in range(slots)]
        self._loads = [0] * slots

    def place(self, depth: int) -> bool:
        """Place samples `depth`, depth + 1, ... of the order; slots of equal load are tried once."""
        if depth == len(self.order):
            return True
        index = self.order[depth]
        length, tried = self.lengths[index], set()
        for slot, load in sorted(enumerate(self._loads), key=lambda item: -item[1]):
            if load in tried or load + length > self.target:
                continue
            tried.add(load)
            self.nodes_left -= 1
            if self.nodes_left <= 0:
                return False
            self._loads[slot] += length
            self.groups[slot].append(index)
            if self.place(depth + 1):
                return True
            self._loads[slot] -= length
            self.groups[slot].pop()
        return False

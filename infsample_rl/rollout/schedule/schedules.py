"""Which sample of a prompt group decodes next: plain ints, so the engine and a simulator run the same objects.

A schedule is made for one group of `num_samples` samples and `slots` slots. Whoever drives it offers a free slot with
`next_sample(slot)`, starts the sample it answers, and reports its end with `finished()`. None means nothing for this
slot now; `holds(slot)` then says whether the group will want the slot later. Indices count the samples asked for.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Sequence
from numbers import Real

from infsample_rl.config.rollout import SCHEDULES


class _Counted:
    """Done when so many samples have ended; keeps no slot for later."""

    def __init__(self, num_samples: int) -> None:
        self._unfinished = num_samples

    def finished(self) -> None:
        """A sample has ended, and is kept."""
        self._unfinished -= 1

    def holds(self, slot: int) -> bool:
        """Whether `slot`, free now, must be kept for later."""
        return False

    @property
    def is_done(self) -> bool:
        """Whether as many samples as asked for have ended."""
        return self._unfinished == 0


class SharedQueue(_Counted):
    """One queue for all slots: continuous sampling without barriers (`arrival`, `full_group`, `sjf`, `lpt`,
    `infinite`).

    `first` reserves a sample for a slot's first turn (Algorithm 1 starts the first sample of each FPTAS group). A
    reserved sample may still be drawn by another slot when it is next in line: Algorithm 3 draws from samples outside
    `mask`, which after phase 1 is none, so we read it as those not started.
    """

    def __init__(self, order: Sequence[int], first: dict[int, int] | None = None) -> None:
        super().__init__(len(order))
        self._order = deque(order)
        self._first = dict(first or {})
        self._started: set[int] = set()
        self._num_samples = len(order)

    def next_sample(self, slot: int) -> int | None:
        """The sample that starts in `slot` now, or None."""
        while self._order and self._order[0] in self._started:
            self._order.popleft()
        index = self._first.pop(slot, None)
        if index is None or index in self._started:
            if not self._order:
                return None
            index = self._order.popleft()
        self._started.add(index)
        return index

    def withdraw(self, count: int) -> list[int]:
        """Up to `count` samples that have not started and now never will, the last in line first."""
        withdrawn = self._free_to_go()[::-1][:count]
        self._order = deque(index for index in self._order if index not in withdrawn)
        self._num_samples -= len(withdrawn)
        self._unfinished -= len(withdrawn)
        return withdrawn

    @property
    def has_waiting(self) -> bool:
        """Whether some sample has not started."""
        return len(self._started) < self._num_samples

    @property
    def num_waiting(self) -> int:
        """Samples that withdraw() could name."""
        return len(self._free_to_go())

    def _free_to_go(self) -> list[int]:
        """Samples that have not started and are promised to no slot, in line."""
        kept = {*self._started, *self._first.values()}
        return [index for index in self._order if index not in kept]


class SlotQueues(_Counted):
    """Each slot has its own queue and no other slot helps (`fixed_slot`, `fptas`)."""

    def __init__(self, queues: Sequence[Sequence[int]]) -> None:
        super().__init__(sum(map(len, queues)))
        self._queues = [deque(queue) for queue in queues]

    def next_sample(self, slot: int) -> int | None:
        """The first sample of the slot's own queue, or None."""
        return self._queues[slot].popleft() if self.holds(slot) else None

    def holds(self, slot: int) -> bool:
        """Whether `slot`, free now, will be wanted later. Slots beyond the queues have none."""
        return slot < len(self._queues) and bool(self._queues[slot])

    @property
    def has_waiting(self) -> bool:
        """Whether some sample has not started."""
        return any(self._queues)


class Rounds:
    """Micro groups of `slots` samples one after another, with a barrier between (`naive`, the paper's section 3.1)."""

    def __init__(self, num_samples: int, slots: int) -> None:
        self._num_samples, self._slots = num_samples, slots
        self._round_start = 0
        self._waiting = set(range(min(slots, num_samples)))  # of this round, by slot
        self._running = 0

    def next_sample(self, slot: int) -> int | None:
        """This round's sample of `slot`, or None when it has started or the round has none for the slot."""
        if slot not in self._waiting:
            return None
        self._waiting.discard(slot)
        self._running += 1
        return self._round_start + slot

    def finished(self) -> None:
        """A sample has ended; the last one of a round opens the next."""
        self._running -= 1
        if self._running or self._waiting:
            return
        self._round_start += self._slots
        self._waiting = set(range(max(0, min(self._slots, self._num_samples - self._round_start))))

    def holds(self, slot: int) -> bool:
        """Whether `slot`, free now, has a sample in this round or a later one."""
        return slot in self._waiting or self._round_start + self._slots + slot < self._num_samples

    @property
    def has_waiting(self) -> bool:
        """Whether some sample has not started."""
        return bool(self._waiting) or self._round_start + self._slots < self._num_samples

    @property
    def is_done(self) -> bool:
        """Whether every sample has ended."""
        return self._round_start >= self._num_samples


class Endless(_Counted):
    """Freed slots start new samples without end; the first `num_samples` to finish are kept (`dynamic_slot`),
    those still running then dropped.

    Short samples finish first, so the kept ones are shorter than the policy's (the paper's figures 3b and table 1).
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self._next = 0

    def next_sample(self, slot: int) -> int | None:
        """The next new sample; indices num_samples and above are extra ones."""
        if self.is_done:
            return None
        self._next += 1
        return self._next - 1

    @property
    def has_waiting(self) -> bool:
        """Whether another sample would start: until enough have ended, always."""
        return not self.is_done


Schedule = SharedQueue | SlotQueues | Rounds | Endless


def make_schedule(name: str, num_samples: int, slots: int, lengths: Sequence[float], epsilon: float = 0.1) -> Schedule:
    """The schedule `name` for one prompt group. `lengths` are predicted tokens, read by fptas, sjf, infinite, lpt and
    token_budget. ValueError for an unknown name."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")
    everyone = range(num_samples)
    if name in ("lpt", "token_budget"):  # how many at once is token_budget's planner's to decide
        return SharedQueue(sorted(everyone, key=lambda index: -lengths[index]))
    if name == "sjf":
        return SharedQueue(sorted(everyone, key=lambda index: lengths[index]))
    if name == "naive":
        return Rounds(num_samples, slots)
    if name == "fixed_slot":
        return SlotQueues([everyone[slot::slots] for slot in range(min(slots, num_samples))])
    if name == "dynamic_slot":
        return Endless(num_samples)
    if name == "fptas":
        return SlotQueues(fptas_groups(lengths, slots, epsilon))
    if name == "infinite":  # Algorithm 1: the first of each bin, then Algorithm 3: the shortest
        first = {slot: group[0] for slot, group in enumerate(fptas_groups(lengths, slots, epsilon))}
        return SharedQueue(sorted(everyone, key=lambda index: lengths[index]), first)
    return SharedQueue(everyone)  # arrival, and full_group, which differs in its slot count alone


def check_predictions(lengths: Sequence[float], name: str) -> None:
    """ValueError for a predicted length that is no number of tokens: NaN, None, infinite, zero... `name`: theirs."""
    for index, length in enumerate(lengths):
        if not (isinstance(length, Real) and 0 < length <= sys.float_info.max):
            raise ValueError(
                f"{name} must be finite and > 0 tokens, got {length} for sample {index}; the smallest that makes sense "
                "is 1"
            )


def fptas_groups(lengths: Sequence[float], num_groups: int, epsilon: float) -> list[list[int]]:
    """Algorithm 2: assign samples to at most `num_groups` groups of near equal total length; each group in its decoding
    order.

    fptas_groups([6, 5, 4, 3, 2], 2, 0.1) -> [[0, 2], [1, 3, 4]] (loads 10 and 10)

    As the paper has it this is first-fit-decreasing on rounded lengths, with no (1 + epsilon) guarantee, and it drops a
    sample that fits in no group; here such a sample goes to the least loaded one. The paper's memory threshold sets
    the number of groups: as many as the KV budget holds full responses, so that each stays within its share.
    """
    unit = epsilon * sum(lengths) / num_groups
    rounded = [math.ceil(length / unit) for length in lengths]
    capacity = math.ceil(sum(rounded) / num_groups)
    groups: list[list[int]] = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -rounded[i]):
        group = next((group for group, load in enumerate(loads) if load + rounded[index] <= capacity), None)
        if group is None and len(groups) < num_groups:  # the first empty one
            group = len(groups)
            groups.append([])
            loads.append(0)
        elif group is None:
            group = loads.index(min(loads))
        groups[group].append(index)
        loads[group] += rounded[index]
    return groups

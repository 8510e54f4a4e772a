"""Who holds KV, and how they give it up: rows, preempted samples in line, kept prefixes, prompts. Plain ints."""

from __future__ import annotations

from dataclasses import dataclass, field

from infsample_rl.rollout.schedule.kv_pool import KVPool, Parking
from infsample_rl.rollout.schedule.prompt_group import PromptGroup, Sample
from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy


@dataclass(slots=True)
class StepPlan:
    """One running step, to be carried out in the order of the fields."""

    # preempted: copy the KV of these pages out of the pool
    parked: list[tuple[Sample, list[int]]] = field(default_factory=list)
    prefills: list[PromptGroup] = field(default_factory=list)  # compute the prompt's KV into the group's pages
    restored: list[Sample] = field(default_factory=list)  # copy the KV back
    # compute the KV from token num_kv_tokens to the newest but one again, one prefill each
    rebuilt: list[Sample] = field(default_factory=list)
    rows: list[Sample] = field(default_factory=list)  # each gets one token; rows of one prompt are neighbours
    rows_changed: bool = False  # other rows than in the step before
    pages_changed: bool = False  # some row has a new page


class Residents:
    """The prompts of a call that are resident, the samples that decode, each in a slot, and those in line."""

    def __init__(
        self, pool: KVPool, num_slots: int, policy: TokenBudgetPolicy | None = None, parking: Parking | None = None
    ) -> None:
        """`policy` None: fixed slots. `num_slots`: most rows at a time. `parking`: where preempted KV goes while there
        is room; what finds none, and with None all, keeps its pages until they are needed and is rebuilt."""
        self.pool, self.policy, self.parking = pool, policy, parking
        self.resident: list[PromptGroup] = []
        self.running: list[Sample] = []
        self.line: list[Sample] = []  # token_budget: preempted samples, and at most one that has not started
        self.num_preemptions = self.parked_tokens = 0
        self._free_slots = list(range(num_slots))  # ascending
        self._keepers: list[Sample] = []  # samples that wait with the KV of their prefix
        self._rows_left = False  # since the last plan
        self._plan = StepPlan()

    def _make_room(self, count: int, taker: Sample) -> bool:
        """Free pages until there are `count`. False: `taker` itself had to go.

        Kept prefixes give way first, then what preempted samples still hold, page by page, then prompts without rows,
        then rows.
        """
        while self.pool.num_free < count:
            if self._keepers:
                self._forget(self._keepers.pop())
            elif self.policy is not None and (donors := [sample for sample in self.line if sample.pages]):
                donor = donors[self.policy.donor(donors)]
                self.pool.release([donor.pages.pop()])
            elif idle := [
                group for group in self.resident if group.pages and not group.num_running and group is not taker.group
            ]:
                self._release_prompt(idle[-1])
            elif self.policy is None:
                raise RuntimeError(f"the KV pool of {self.pool.num_pages} pages has run out")
            else:
                victim = self.running[self.policy.victim(self.running)]
                self._preempt(victim)
                if victim is taker:
                    return False
        return True

    def _preempt(self, sample: Sample) -> None:
        self.num_preemptions += 1
        self._leave(sample)
        self._plan.rows_changed = True
        sample.num_kv_tokens = max(0, sample.num_tokens - 1)
        count = self.pool.pages_for(sample.num_kv_tokens)
        if self.parking is not None and count and self.parking.take(count):
            sample.num_parked_pages = count
            self.parked_tokens += sample.num_kv_tokens
            self._plan.parked.append((sample, sample.pages[:count]))
            self.pool.release(sample.pages)
            sample.pages = []
        self.line.append(sample)

    def _forget(self, sample: Sample) -> None:
        self.pool.release(sample.pages)
        sample.pages, sample.num_kv_tokens = [], 0
        self._unpark(sample)

    def _unpark(self, sample: Sample) -> None:
        if self.parking is not None and sample.num_parked_pages:
            self.parking.release(sample.num_parked_pages)
            sample.num_parked_pages = 0

    def _leave(self, sample: Sample) -> None:
        self.running.remove(sample)
        self._rows_left = True
        sample.group.num_running -= 1
        self.pool.release(sample.group.pages)
        self._free_slots.append(sample.slot)
        self._free_slots.sort()
        sample.slot = -1

    def _release_prompt(self, group: PromptGroup) -> None:
        self.pool.release(group.pages)
        group.pages = None

    def _drop_group(self, group: PromptGroup) -> None:
        """A group whose samples are all in, or a stream closed early: nothing of it stays."""
        for sample in [sample for sample in self.running if sample.group is group]:
            self._leave(sample)
            self._forget(sample)
        for sample in [sample for sample in self._keepers if sample.group is group]:
            self._forget(sample)
        self._keepers = [sample for sample in self._keepers if sample.group is not group]
        for sample in [sample for sample in self.line if sample.group is group]:
            self._forget(sample)
            self.line.remove(sample)
        self.resident.remove(group)
        if group.pages is not None:
            self._release_prompt(group)

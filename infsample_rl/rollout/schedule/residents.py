"""Who holds KV, and how they give it up: rows, preempted samples in line, kept prefixes, prompts. Plain ints."""

from __future__ import annotations

from dataclasses import dataclass, field

from infsample_rl.rollout.schedule.kv_pool import KVPool, Parking
from infsample_rl.rollout.schedule.prompt_group import PromptGroup, Sample
from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy
from infsample_rl.types import MaybeNone

# Steps that an environment may take before the KV of its sample is copied out for others: most tools answer sooner.
PATIENCE = 64


@dataclass(slots=True)
class StepPlan:
    """One running step, to be carried out in the order of the fields."""

    # of preempted samples, and of prompts that had to give way: copy the KV of these pages out of the pool
    parked: list[tuple[Sample | PromptGroup, list[int]]] = field(default_factory=list)
    prefills: list[PromptGroup] = field(default_factory=list)  # compute the prompt's KV into the group's pages
    restored: list[Sample | PromptGroup] = field(default_factory=list)  # copy the KV back
    # compute the KV from token num_kv_tokens to the newest but one again, one prefill each
    rebuilt: list[Sample] = field(default_factory=list)
    rows: list[Sample] = field(default_factory=list)  # each gets one token; rows of one prompt are neighbours
    rows_changed: bool = False  # other rows than in the step before
    pages_changed: bool = False  # some row has a new page
    steps_before: int = 0  # running steps before it, and before those in which it computes KV again


class Residents:
    """The prompts of a call that are resident, the samples that decode, each in a slot, and those in line."""

    def __init__(
        self, pool: KVPool, num_slots: int, policy: TokenBudgetPolicy | None = None, parking: Parking | MaybeNone = None
    ) -> None:
        """`policy` None: fixed slots. `num_slots`: most rows at a time. `parking`: where KV that gives way goes while
        there is room; of a sample, what finds none, and with None all, keeps its pages until they are needed."""
        self.pool, self.policy, self.parking = pool, policy, parking
        self.resident: list[PromptGroup] = []
        self.running: list[Sample] = []
        self.line: list[Sample] = []  # token_budget: preempted samples, and at most one that has not started
        self.away: list[Sample] = []  # turns that have ended: outside the slots until an environment answers
        self.running_steps = self.num_preemptions = self.parked_tokens = 0
        self._free_slots = list(range(num_slots))  # ascending
        self._keepers: list[Sample] = []  # samples that wait with the KV of their prefix
        self._rows_left = False  # since the last plan
        self._has_turns = False  # some sample was away
        self._plan = StepPlan()
        self._places_left = 0  # outside the pool, of what this plan copies back

    def send_away(self, sample: Sample) -> None:
        """A row's newest token ended its turn: it leaves its slot, and keeps its KV until the pages are needed."""
        self._leave(sample)
        sample.num_kv_tokens, sample.away_since = sample.num_tokens - 1, self.running_steps
        self.away.append(sample)
        self._has_turns = True

    def take_back(self, sample: Sample, observed: int) -> None:
        """A sample that was away has `observed` tokens more, and waits in line for a slot."""
        self.away.remove(sample)
        sample.num_tokens += observed
        sample.num_observed += observed
        sample.num_unseen = observed
        self.line.append(sample)

    def _pages_to_be_had(self, sample: Sample) -> int:
        """Pages that others hold who do not decode, and which can be copied out for `sample`; not of those whose
        environments may answer at once."""
        if self.parking is None:
            return 0
        long_away = [other for other in self.away if self.running_steps - other.away_since >= PATIENCE]
        held = sum(len(other.pages) for other in (*long_away, *self.line) if other is not sample)
        return min(held, self.parking.most_pages - self.parking.num_taken)

    def _make_room(self, count: int, taker: Sample) -> bool:
        """Free pages until there are `count`. False: `taker` itself had to go.

        Kept prefixes give way first, then samples that are away, then what preempted samples still hold, page by page,
        then prompts without rows, then rows.
        """
        while self.pool.num_free < count:
            if self._keepers:
                self._forget(self._keepers.pop())
            elif holders := [sample for sample in self.away if sample.pages]:
                self._give_up(holders[0])  # who has waited longest has longest to wait: tools are quick or very slow
            elif self.policy is not None and (donors := [sample for sample in self.line if sample.pages]):
                self._give_up(donors[self.policy.donor(donors)])
            elif idle := [
                group for group in self.resident if group.pages and not group.num_running and group is not taker.group
            ]:
                self._park_prompt(idle[-1])
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
        if self._park(sample, sample.pages, sample.num_kv_tokens):
            self.pool.release(sample.pages)
            sample.pages = []
        self.line.append(sample)

    def _give_up(self, sample: Sample) -> None:
        """Of a sample that does not decode: its KV outside the pool, where there is a place for it, else its last
        page."""
        if self._park(sample, sample.pages, sample.num_kv_tokens):
            self.pool.release(sample.pages)
            sample.pages = []
        else:
            self.pool.release([sample.pages.pop()])
            sample.num_kv_tokens = min(sample.num_kv_tokens, len(sample.pages) * self.pool.page_size)

    def _forget(self, sample: Sample) -> None:
        self.pool.release(sample.pages)
        sample.pages, sample.num_kv_tokens = [], 0
        self._forget_parked(sample)

    def _park(self, owner: Sample | PromptGroup, pages: list[int], num_tokens: int) -> bool:
        """Copy the first `num_tokens` tokens' KV in an owner's pages out of the pool, if there is a place for it."""
        count = self.pool.pages_for(num_tokens)
        if self.parking is None or not count or not self.parking.take(count):
            return False
        owner.num_parked_pages = count
        self.parked_tokens += num_tokens
        self._plan.parked.append((owner, pages[:count]))
        return True

    def _unpark(self, owner: Sample | PromptGroup) -> bool:
        """Whether an owner's KV was parked; from now on it is not. Its place is free once the plan has been carried
        out, whose copies out of the pool come before those back."""
        self._places_left += owner.num_parked_pages
        was_parked, owner.num_parked_pages = owner.num_parked_pages > 0, 0
        return was_parked

    def _forget_parked(self, owner: Sample | PromptGroup) -> None:
        if owner.num_parked_pages:
            self.parking.release(owner.num_parked_pages)
            self.parking.forget(owner)
            owner.num_parked_pages = 0

    def _free_places(self) -> None:
        """The last plan has been carried out."""
        if self._places_left:
            self.parking.release(self._places_left)
            self._places_left = 0

    def _park_prompt(self, group: PromptGroup) -> None:
        """A prompt without rows gives way: a place outside the pool, where there is one, saves computing it again."""
        self._park(group, group.pages, len(group.prompt_ids) - group.own_tokens)
        self._release_prompt(group)

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
        for samples in (self.line, self.away):
            for sample in [sample for sample in samples if sample.group is group]:
                self._forget(sample)
                samples.remove(sample)
        self.resident.remove(group)
        self._forget_parked(group)
        if group.pages is not None:
            self._release_prompt(group)

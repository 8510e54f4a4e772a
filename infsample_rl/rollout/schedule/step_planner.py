"""What every running step does: which samples decode, which start, grow, give way or come back. Plain ints.

The engine and the simulator drive the same planner: `next_step()` says what to run, `end_step(ended)` what has come of
it. KV pages are taken as rows grow and never beyond the pool. Fixed-slot schedules start a sample only when a full
response fits beside those that decode, so they never run short; `token_budget` starts what its policy lets in and
preempts when pages run out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from infsample_rl.rollout.schedule.kv_pool import KVPool, Parking
from infsample_rl.rollout.schedule.prompt_group import PromptGroup, Sample
from infsample_rl.rollout.schedule.residents import Residents, StepPlan
from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy
from infsample_rl.types import MaybeNone


class StepPlanner(Residents):
    """The prompts of one call: those that wait beside the residents, and what every running step does with them."""

    def __init__(
        self,
        groups: Sequence[PromptGroup],
        pool: KVPool,
        *,
        num_slots: int,
        prompts_at_once: int,
        max_new_tokens: int,
        policy: TokenBudgetPolicy | MaybeNone = None,
        parking: Parking | MaybeNone = None,
    ) -> None:
        """`prompts_at_once`: most prompts resident together. The others are the residents' own."""
        super().__init__(pool, num_slots, policy, parking)
        for place, group in enumerate(groups):
            group.place = place
        self.waiting = deque(groups)
        self.num_slots, self.prompts_at_once = num_slots, prompts_at_once
        self.row_steps = self.num_tokens = self.most_rows = self.recomputed_tokens = 0
        self._longest = self._kv_area = 0  # of the responses that have ended: tokens, and tokens held summed over steps
        shortest = min((len(group.prompt_ids) - group.own_tokens for group in groups), default=0)
        self._response_pages = max(1, pool.num_pages - pool.pages_for(shortest))
        self.max_new_tokens = max_new_tokens
        self._full_pages = pool.pages_for(max_new_tokens + max((group.own_tokens for group in groups), default=0))
        self._num_admitted = 0

    @property
    def is_done(self) -> bool:
        """Whether every sample of every prompt has ended."""
        return not self.waiting and not self.resident

    @property
    def least_steps(self) -> float:
        """What the responses that have ended take in the best of orders, a token a row and step: the steps of the
        longest, or those in which the KV of all fits into the pool beside one prompt (the simulator's token_bound)."""
        return max(self._longest, self._kv_area / (self._response_pages * self.pool.page_size))

    @property
    def is_settled(self) -> bool:
        """Whether rows decode of which none came, went or ended a prefix in the last planned step or since."""
        return bool(self.running) and not (self._plan.rows_changed or self._rows_left or self._keepers)

    def next_step(self) -> StepPlan:
        """Plan one running step, without rows where all that are left are away. RuntimeError when nothing can run
        although samples are left (never, unless a schedule is broken)."""
        self._free_places()
        plan = self._plan = StepPlan(steps_before=self.running_steps)
        self._grow_rows()
        self._fill_slots()
        if not self.running and not self.away:
            raise RuntimeError("no sample could start, yet some are not finished")
        if not self.running:
            return plan
        if plan.rows_changed or self._rows_left:
            plan.rows_changed = True
            place = {id(group): position for position, group in enumerate(self.resident)}
            self.running.sort(key=lambda sample: (place[id(sample.group)], sample.slot))
        self._rows_left = False
        self.running_steps += len(plan.rebuilt)
        return self._run_rows(plan)

    def repeat_step(self) -> StepPlan | None:
        """A step of the same rows, or None when a row is at its end or has left, or some need pages and too few are
        free.

        It may be planned before it is known which rows the last step has ended: their token is then thrown away.
        """
        if (
            self._rows_left
            or not self.running
            or any(sample.num_tokens in (self.max_new_tokens, sample.wait_at) for sample in self.running)
        ):
            return None
        growing = [sample for sample in self.running if len(sample.pages) * self.pool.page_size < sample.tokens_to_hold]
        if len(growing) > self.pool.num_free:
            return None
        for sample in growing:
            sample.pages += self.pool.take(1)
        return self._run_rows(StepPlan(pages_changed=bool(growing)))

    def _run_rows(self, plan: StepPlan) -> StepPlan:
        plan.rows = list(self.running)
        for sample in plan.rows:
            sample.num_tokens += 1
        self.num_tokens += len(plan.rows)
        self.row_steps += len(plan.rows)
        self.most_rows = max(self.most_rows, len(plan.rows))
        self.running_steps += 1
        return plan

    def lend_pages(self, sample: Sample, drafts: int) -> int:
        """Pages that nobody holds for the KV of up to `drafts` tokens drafted for a row of this step, none past the end
        of its prefix, where it is predicted even if it goes on; for how many there are. No row gives way for one."""
        size, prefix = self.pool.page_size, sample.group.settings.prefix_tokens
        most = min(drafts, (prefix if sample.num_tokens <= prefix else self.max_new_tokens) - sample.num_tokens)
        in_tokens = len(sample.pages) * size - (sample.tokens_to_hold - 1)
        lacking = self.pool.pages_for(max(0, most - in_tokens))
        pages = self.pool.take(min(lacking, self.pool.num_free))
        sample.pages += pages
        return min(most, in_tokens + len(pages) * size)

    def hold_back(self, sample: Sample) -> None:
        """A row of this step got no token yet."""
        sample.num_tokens -= 1
        self.num_tokens -= 1
        self.row_steps -= 1

    def accept(self, sample: Sample, drafts: int) -> None:
        """So many of the tokens drafted for a row of this step are the sample's; pages of the others go back."""
        sample.num_tokens += drafts
        self.num_tokens += drafts
        kept = self.pool.pages_for(sample.tokens_to_hold - 1)
        self.pool.release(sample.pages[kept:])
        del sample.pages[kept:]

    def end_step(self, ended: Sequence[Sample]) -> None:
        """`ended`: rows whose newest token was their last. Samples at the end of their prefix leave by themselves."""
        self._free_places()
        for sample in ended:
            self._leave(sample)
            self._finish(sample)
        for sample in [sample for sample in self.running if sample.num_tokens == sample.wait_at]:
            self._leave(sample)
            sample.num_kv_tokens = sample.num_tokens - 1
            self._keepers.append(sample)
            sample.group.keep_waiting(sample)
        self._drop_done()

    def end_away(self, sample: Sample) -> None:
        """A sample that was away has ended there."""
        self.away.remove(sample)
        self._finish(sample)
        self._drop_done()

    def _finish(self, sample: Sample) -> None:
        sampled = sample.num_tokens - sample.num_observed
        self._longest = max(self._longest, sampled)
        self._kv_area += sampled * (sampled + 1) // 2
        self._forget(sample)
        if sample.group.finish(sample) and self.policy is not None:
            self.policy.observe_finished(sample.group_id, sample.num_tokens)

    def _drop_done(self) -> None:
        for group in [group for group in self.resident if group.is_done]:
            self._drop_group(group)

    @property
    def num_waiting(self) -> int:
        """Samples that have not started and that give_back() could hand over."""
        return sum(group.num_waiting for group in (*self.resident, *self.waiting))

    def give_back(self) -> dict[int, list[int]]:
        """Half of the samples that have not started, the last in line first; they are no longer wanted. {prompt_index:
        sample indices}."""
        groups = [*self.resident, *self.waiting]
        left, given = self.num_waiting // 2, {}
        for group in reversed(groups):
            indices = group.withdraw(left)
            left -= len(indices)
            if indices:
                given[group.prompt_index] = sorted(indices)
        self.waiting = deque(group for group in self.waiting if not group.is_done)
        self._drop_done()
        return given

    def drop_all(self) -> None:
        """Let go of all samples and prompts."""
        self.waiting.clear()
        for group in list(self.resident):
            self._drop_group(group)

    def _grow_rows(self) -> None:
        """A page for every row whose newest token has none, the one that has run longest first."""
        page_size = self.pool.page_size
        growing = [sample for sample in self.running if len(sample.pages) * page_size < sample.tokens_to_hold]
        for sample in sorted(growing, key=lambda sample: sample.admitted_order):
            if sample.slot >= 0 and self._make_room(1, sample):
                sample.pages += self.pool.take(1)
                self._plan.pages_changed = True

    def _fill_slots(self) -> None:
        for slot in list(self._free_slots):
            sample = self._next_of_slot(slot) if self.policy is None else self._next_of_line(slot)
            if sample is not None:
                self._start(sample, slot)
            elif self.policy is not None:
                return  # slots of token_budget are all alike

    def _next_of_slot(self, slot: int) -> Sample | None:
        """Fixed slots: what the groups' schedules start in `slot`, if a full response fits, and beside it one in every
        slot that earlier prompts wait for: so a later prompt delays none, and several prompts together take no more
        steps than one after another."""
        earlier: list[PromptGroup] = []
        for group in self._groups_with_samples():
            # Kept prefixes give way, so they do not count; nor do, where nothing runs or waits, the prompts of others.
            prompts = [other for other in self.resident if other.pages and (self.running or earlier or other is group)]
            kept = [free for free in self._free_slots if any(other.holds(free) for other in earlier)]
            held = sum(len(other.pages) for other in prompts) + (len(self.running) + len(kept) + 1) * self._full_pages
            earlier.append(group)
            if held + sum(map(self._missing_prompt_pages, earlier)) > self.pool.num_pages:
                return None
            if group not in self.resident:
                self.resident.append(self.waiting.popleft())
            sample = group.next_sample(slot)
            if sample is not None or group.holds(slot):
                return sample
        return None

    def _next_of_line(self, slot: int) -> Sample | None:
        """token_budget: the policy's first in line, if it lets it in."""
        if all(sample.num_tokens for sample in self.line):
            group = next(self._groups_with_samples(), None)
            if group is not None:
                if group not in self.resident:
                    self.resident.append(self.waiting.popleft())
                first = group.next_sample(slot)
                assert first is not None, "a group with samples gives one"
                self.line.append(first)
        if not self.line or self.policy is None:
            return None
        parked = 1.0 if self.parking is None else self.parking.taken_share
        sample = self.line[self.policy.next_waiting(self.line, turns=self._has_turns, parked=parked)]
        prompt_pages = self._missing_prompt_pages(sample.group)
        missing = self.pool.pages_for(sample.tokens_to_hold) - len(sample.pages) + prompt_pages
        for_responses = (
            self.pool.num_pages - prompt_pages - sum(len(group.pages) for group in self.resident if group.pages)
        )
        others_wait = self.prompts_at_once > 1 and bool(self.waiting or len(self.resident) > 1)
        free = self.pool.num_free + self._pages_to_be_had(sample)
        if not self.policy.may_admit(self.running, sample, missing, free, for_responses, others_wait=others_wait):
            return None
        self.line.remove(sample)
        return sample

    def _groups_with_samples(self) -> Iterator[PromptGroup]:
        """Resident prompts some of whose samples have not started, then those that may become resident."""
        yield from [group for group in self.resident if group.has_waiting]
        while self.waiting and len(self.resident) < self.prompts_at_once:
            yield self.waiting[0]

    def _missing_prompt_pages(self, group: PromptGroup) -> int:
        return 0 if group.pages is not None else self.pool.pages_for(len(group.prompt_ids) - group.own_tokens)

    def _start(self, sample: Sample, slot: int) -> None:
        """`sample` decodes in `slot` from this step on."""
        group, pool = sample.group, self.pool
        sample.admitted_order, self._num_admitted = self._num_admitted, self._num_admitted + 1
        if sample in self._keepers:
            self._keepers.remove(sample)
        prompt_pages = self._missing_prompt_pages(group)
        new_pages = pool.pages_for(sample.tokens_to_hold) - len(sample.pages)
        self._make_room(new_pages + prompt_pages, sample)
        if group.pages is None:
            self._make_resident(group, prompt_pages)
        pool.share(group.pages)
        group.num_running += 1
        if self._unpark(sample):
            self._plan.restored.append(sample)
        else:
            sample.num_kv_tokens = min(sample.num_kv_tokens, len(sample.pages) * pool.page_size)
        lacking = max(0, sample.num_tokens - 1) - sample.num_kv_tokens
        if lacking:
            self._plan.rebuilt.append(sample)
            self.recomputed_tokens += lacking - sample.num_unseen
            sample.num_unseen = 0
        sample.pages += pool.take(new_pages)
        sample.slot = slot
        self._free_slots.remove(slot)
        self.running.append(sample)
        self._plan.rows_changed = True

    def _make_resident(self, group: PromptGroup, num_pages: int) -> None:
        group.pages = self.pool.take(num_pages)
        if self._unpark(group):
            self._plan.restored.append(group)
            return
        self._plan.prefills.append(group)
        if group.was_resident:  # its prompt had to give way: computed once more
            self.recomputed_tokens += len(group.prompt_ids)
            self.running_steps += 1
        group.was_resident = True

"""The policy of the `token_budget` schedule: who starts, who waits and who gives up pages. Plain ints, no torch.

All samples of a group look alike until they end, so the one with the fewest tokens has the most to do and is the
likeliest to end last. Hence *least work left first* decides who is preempted and whose pages are taken, since the steps
are lost in the tail of the run; samples that have not started go before preempted ones. Of those the one that lacks
fewest pages returns first: pages that a longer one holds do not lie idle behind one that needs many. Earlier groups
come before later ones, which fill what the earlier leave idle.

Where lengths are predicted, who is predicted to have most left returns first, and nobody is preempted who has more than
CRITICAL of the longest left among the rows, as long as there are others; of the others still the one with most tokens,
whose pages serve many. A sample without a prediction yet counts with its group's mean. Predictions are used only while
replays of recent groups take no more steps with them (length_prediction/replay.py), and not by the admission rule.

Admission (past-future admission, closed form). Let the running rows and the candidate have expected lengths m_i and
hold t_i tokens, S = sum m_i, T = sum t_i. If lengths were exponential, after h more steps they would hold about (T + n
h) exp(-h n / S) tokens; the maximum over h >= 0 is

    peak = S exp(T / S - 1) if T < S, else T

and a sample is admitted when its pages are free and peak fits in the pages the responses may use. At the start (T = 0)
this admits e x budget / m rows, in the steady state (T = S) budget / m. Over-commitment is meant: a row that does not
fit after all is preempted.

Expected length of a sample: the mean over its group, in which a finished sample counts with its length, a running one
with twice what it has (a life seen at a random moment is half over) but not less than the prior, and one sample more
with the prior. The prior is the mean of the other groups of this call, with one sample more of max_new_tokens / 3.

A preempted sample keeps its tokens. Its KV is parked outside the pool where there is a place (Parking) and costs a
copy. Else it keeps its pages as long as nobody needs them: pages are taken one by one, from the end of the sample at
the back of the line, and only the tokens in them are recomputed.

No livelock. Every running row gains a token in every step, and tokens are never lost, so n samples of l_i tokens need
at most sum l_i decoding steps, and at most one rebuild for each token gained: 2 x sum l_i running steps in all.
Besides, the row that has run longest without a pause is never preempted, so some sample ends at least every
max_new_tokens decoding steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from infsample_rl.rollout.schedule.prompt_group import Sample

CRITICAL = 0.5  # of the longest predicted to be left
# A preempted sample returns only where this x its expected length would stay free: what computing a token again costs
# beside decoding one. Between two ends of samples the rows together write about one mean length.
REBUILD_COST = 0.25
# Shares of the pages that admission counts on: fewer while nothing lies idle for want of samples and what is preempted
# is computed again, more where preemption costs a copy only.
SHARE_WHILE_OTHERS_WAIT, PARKED_SHARE = 0.9, 1.2
ROOMY = 0.5  # of the places outside the pool
# the first guess of a length is max_new_tokens / 3: exp(-3) = 5 % of exponential lengths reach the maximum
PRIOR_SHARE = 3


class TokenBudgetPolicy:
    """Decides admission and preemption under a budget of KV pages; see the module's docstring for the rule."""

    def __init__(self, page_size: int, max_new_tokens: int, *, parks: bool = False) -> None:
        """`parks`: what is preempted is parked, not computed again."""
        self._page_size = page_size
        self._max_new_tokens = max_new_tokens
        self._parks = parks
        self._first_guess = max_new_tokens / PRIOR_SHARE
        self._finished: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])  # group: samples, tokens
        self._all_samples = self._all_tokens = 0

    def observe_finished(self, group_id: int, length: int) -> None:
        """A sample has ended with `length` tokens."""
        group = self._finished[group_id]
        group[0] += 1
        group[1] += length
        self._all_samples += 1
        self._all_tokens += length

    def next_waiting(self, waiting: Sequence[Sample], *, turns: bool = False, parked: float = 1.0) -> int:
        """Index of the sample to admit next: earliest group, then not started, then fewest pages lacking; ties in the
        order given.

        With predictions: prompts that hold their pages, then neither started nor predicted, then most predicted to be
        left, of whatever group, so that a prompt is opened only once nobody of the open ones is in line. Not with
        `turns`, between which samples wait for environments: who has most left would go ahead turn by turn, all would
        be open at once, and more KV be parked than there is room for.

        Samples with turns get on evenly, whatever their group, while at most ROOMY of the places outside the pool is
        taken, `parked` of them: those of the last group would else begin late, and wait for environments alone.
        """
        known = not turns and any(sample.predicted is not None for sample in waiting)
        by_group = not turns or parked > ROOMY
        return min(range(len(waiting)), key=lambda index: self._place_in_line(waiting[index], known, by_group))

    def may_admit(
        self,
        running: Sequence[Sample],
        candidate: Sample,
        missing_pages: int,
        free_pages: int,
        response_pages: int,
        *,
        others_wait: bool = False,
    ) -> bool:
        """Whether `candidate` may run from this step on.

        `missing_pages`: pages it must get now, ceil(num_tokens / page_size) less those it has kept. `free_pages`: pages
        nobody holds, after the running rows took what they need in this step. `response_pages`: all pages that are not
        a prompt's. `others_wait`: another prompt has samples left, so that no page lies idle for want of one. An empty
        engine admits always (the caller takes pages from preempted samples if it must).
        """
        if not running:
            return True
        means = self._group_means(running, candidate)
        mean = means[candidate.group_id]
        size = self._page_size
        # a fresh sample needs no page before its second step, but its prompt's
        if (free_pages - missing_pages) * size < (REBUILD_COST * mean if candidate.num_tokens else 0):
            return False
        expected, held = mean, -(-candidate.num_tokens // size)
        for row in running:
            expected += means[row.group_id]
            held -= -row.num_tokens // size
        share = PARKED_SHARE if self._parks else SHARE_WHILE_OTHERS_WAIT if others_wait else 1
        return _future_peak(expected, held * size) <= response_pages * size * share

    def victim(self, running: Sequence[Sample]) -> int:
        """Index of the row to preempt: latest group, then least work left, but never the row that has run longest.

        With predictions: latest group, then most tokens among those with at most CRITICAL of the longest left, if any.

        Raises RuntimeError with fewer than two rows: the budget holds one prompt and one full response, so one row
        always fits.
        """
        if len(running) < 2:
            raise RuntimeError(
                f"token_budget has {len(running)} rows and no page for them: the budget must hold a prompt and "
                "max_new_tokens"
            )
        oldest = min(range(len(running)), key=lambda index: running[index].admitted_order)
        longest = self._longest_left(running)

        def gives_way(index: int) -> tuple[int, bool, float, int]:
            row = running[index]
            left = self._work_left(row) if longest is None else self._expected_left(row)
            is_critical = longest is not None and left > CRITICAL * longest
            by = -left if is_critical or longest is None else row.num_tokens
            return row.group_id, not is_critical, by, row.admitted_order

        return max((index for index in range(len(running)) if index != oldest), key=gives_way)

    def donor(self, preempted: Sequence[Sample]) -> int:
        """Index of the preempted sample, of those that still hold pages, whose last page is taken next: the back of the
        line."""
        keys = [(sample.group_id, -self._work_left(sample)) for sample in preempted]
        return keys.index(max(keys))

    def _place_in_line(self, sample: Sample, known: bool, by_group: bool) -> tuple[int, int, float, float]:
        """Smaller is admitted earlier. `known`: some sample in line has a prediction."""
        if known:
            is_known = sample.num_tokens > 0 or sample.predicted is not None
            return sample.group.pages is None, is_known, -self._expected_left(sample), sample.group_id
        lacking = -(-sample.num_tokens // self._page_size) - len(sample.pages)
        return sample.group_id if by_group else 0, sample.num_tokens > 0, lacking, -self._work_left(sample)

    def _work_left(self, sample: Sample) -> float:
        """Tokens left, up to a constant where there is no prediction; at least one, at most the room left."""
        room = self._max_new_tokens - sample.num_tokens
        return room if sample.predicted is None else min(room, max(1.0, sample.predicted - sample.num_tokens))

    def _expected_left(self, sample: Sample) -> float:
        """Tokens left, as predicted or, without a prediction, as long as a sample of its group takes in all."""
        if sample.predicted is not None:
            return self._work_left(sample)
        prior, samples = self._prior(sample.group_id)
        tokens = self._finished[sample.group_id][1]
        return min(self._max_new_tokens - sample.num_tokens, max(1.0, (prior + tokens) / (1 + samples)))

    def _longest_left(self, running: Sequence[Sample]) -> float | None:
        """The most that a row is expected to have left; None while none has a prediction."""
        if all(row.predicted is None for row in running):
            return None
        return max(self._expected_left(row) for row in running)

    def _prior(self, group_id: int) -> tuple[float, int]:
        """Expected length of a sample of this group before any of it has ended, and how many have."""
        samples, tokens = self._finished[group_id]
        return (self._first_guess + self._all_tokens - tokens) / (1 + self._all_samples - samples), samples

    def _group_means(self, running: Sequence[Sample], candidate: Sample) -> dict[int, float]:
        """Expected length of a sample of each group present."""
        sums: dict[int, list[float]] = {}  # group: prior, samples, tokens
        for row in (candidate, *running):
            entry = sums.get(row.group_id)
            if entry is None:
                prior, samples = self._prior(row.group_id)
                entry = sums[row.group_id] = [prior, 1 + samples, prior + self._finished[row.group_id][1]]
            doubled = 2 * row.num_tokens
            if doubled:
                floored = doubled if doubled > entry[0] else entry[0]
                entry[1] += 1
                entry[2] += floored if floored < self._max_new_tokens else self._max_new_tokens
        return {group_id: tokens / samples for group_id, (_, samples, tokens) in sums.items()}


def _future_peak(expected: float, held: float) -> float:
    """Largest number of tokens that rows of `expected` tokens in all will hold, if they hold `held` now."""
    return held if held >= expected else expected * math.exp(held / expected - 1)

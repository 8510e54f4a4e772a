"""The samples one call wants of one prompt: which starts next, which wait with their prefix, which are finished.

Plain Python and ints, so that the simulator runs the same objects as the engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from infsample_rl.rollout.schedule.schedules import Schedule, SharedQueue, make_schedule
from infsample_rl.types import Episode, Forecast, MaybeNone

Predict = Callable[[list[int], list[list[int]]], list[float]]  # (prompt ids, prefixes) -> response lengths


@dataclass(slots=True, eq=False)
class Sample:
    """One sample of a group. While it decodes with t tokens, its pages hold the KV of the first t - 1 (a step adds the
    newest's)."""

    group: PromptGroup
    index: int  # what the group's schedule counts; a sample that waited with its prefix gets a new one
    sample_index: int  # what the caller asked for and the noise depends on
    key: int  # noise key
    predicted: float | None = None  # tokens
    wait_at: int | None = None  # tokens after which it leaves its slot to wait for a length prediction
    slot: int = -1
    admitted_order: int = -1  # counts admissions, those after a preemption included: smaller has run longer
    num_tokens: int = 0  # sampled so far, as the planner counts; the arrays below may be behind while rows decode
    pages: list[int] = field(default_factory=list)
    num_kv_tokens: int = 0  # first tokens whose KV is kept while it does not decode: in its pages or parked
    num_parked_pages: int = 0  # outside the pool
    tokens: array = field(default_factory=lambda: array("i"))
    logprobs: array = field(default_factory=lambda: array("f"))
    sampling_logprobs: array = field(default_factory=lambda: array("f"))
    num_observed: int = 0  # of its tokens, those that an environment gave
    away_since: int = 0  # running steps when it left its row for its environment
    num_unseen: int = 0  # newest tokens that no row has run yet: an observation, and the stop token before it
    finish_reason: str = ""  # once it has ended
    episode: Episode | None = None  # once its environment has ended
    forecast: Forecast | None = None

    @property
    def group_id(self) -> int:
        """Place of its prompt in the call: earlier prompts are served first."""
        return self.group.place

    @property
    def tokens_to_hold(self) -> int:
        """Tokens whose KV is in its pages after its next step: its own, and those of the prompt that it does not
        share."""
        return self.num_tokens + self.group.own_tokens


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What all groups of a call have in common."""

    schedule: str
    slots: int  # of a fixed-slot schedule
    group_size: int  # G, also where a worker has a part of the group
    epsilon: float = 0.1  # rounding of Algorithm 2
    prefix_tokens: int = 0  # k
    shared_block: int = 0  # rows share a prompt's whole blocks of so many tokens, not its last one; 0: all of it


class PromptGroup:
    """One prompt's samples under one schedule, with a prefix phase before it when lengths are predicted.

    In the prefix phase every sample decodes prefix_tokens and waits; those that end within them are finished.
    Predictions order samples and change none of them.
    """

    def __init__(
        self,
        prompt_index: int,
        prompt_ids: list[int],
        sample_indices: list[int],
        settings: GroupSettings,
        key_of: Callable[[int], int],
        *,
        predict: Predict | None = None,
        predicted_in_rows: bool = False,
        lengths: list[float] | None = None,
    ) -> None:
        """`key_of`: noise key of a sample index. `predict`: asked for the lengths once all samples have their prefix;
        `predicted_in_rows`: they are found in the samples then, as whoever decodes has set them. With neither there is
        no prefix phase; `lengths` are the predictions, None: all equal."""
        self.prompt_index, self.prompt_ids = prompt_index, prompt_ids
        self.sample_indices, self.settings = sample_indices, settings
        self.place = 0  # among the prompts of the call
        # of the prompt, whose KV every row holds for itself
        self.own_tokens = (len(prompt_ids) - 1) % settings.shared_block + 1 if settings.shared_block else 0
        self.pages: list[int] | MaybeNone = None  # the prompt's, while it is resident
        self.was_resident = False
        self.num_parked_pages = 0  # of the prompt, outside the pool
        self.num_running = 0
        self.finished: list[Sample] = []  # not yet in a micro-group
        self._key_of, self._predict, self._lengths = key_of, predict, lengths
        self._in_prefix = predict is not None or predicted_in_rows
        self._num_prefixes_left = len(sample_indices)
        self._with_prefix: list[Sample] | MaybeNone = [] if self._in_prefix else None
        count = len(sample_indices)
        equal = [1.0] * count
        self._schedule = SharedQueue(range(count)) if self._in_prefix else self._make_schedule(count, lengths or equal)

    def next_sample(self, slot: int) -> Sample | None:
        """The sample to start, or to go on with, in a free slot now."""
        index = self._schedule.next_sample(slot)
        if index is None:
            return None
        if self._in_prefix or self._with_prefix is None:
            return self._new_sample(index)
        sample = self._with_prefix[index]
        sample.index, sample.wait_at = index, None
        return sample

    def holds(self, slot: int) -> bool:
        """Whether a free slot must wait for this group instead of going to the next prompt."""
        return self._in_prefix or self._schedule.holds(slot)

    @property
    def has_waiting(self) -> bool:
        """Whether some sample may still start."""
        return self._in_prefix or self._schedule.has_waiting

    def keep_waiting(self, sample: Sample) -> None:
        """A sample has decoded its prefix."""
        self._with_prefix.append(sample)
        self._end_prefix()

    def finish(self, sample: Sample) -> bool:
        """A sample has ended; False when the group no longer wants it (dynamic_slot)."""
        if self.is_done:
            return False
        self.finished.append(sample)
        self._schedule.finished()
        if self._in_prefix:
            self._end_prefix()
        return True

    def withdraw(self, count: int) -> list[int]:
        """Up to `count` of its sample indices, of samples that have not started and now never will. None where samples
        have a prefix, or where the schedule has given each its slot."""
        queue = self._schedule if self._with_prefix is None else None
        return [self.sample_indices[index] for index in queue.withdraw(count)] if isinstance(queue, SharedQueue) else []

    @property
    def num_waiting(self) -> int:
        """Samples that withdraw() could name."""
        queue = self._schedule if self._with_prefix is None else None
        return queue.num_waiting if isinstance(queue, SharedQueue) else 0

    @property
    def is_done(self) -> bool:
        """Whether no sample is wanted any more."""
        return not self._in_prefix and self._schedule.is_done

    def _new_sample(self, index: int) -> Sample:
        # dynamic_slot's extra samples: G, G + 1, ...; a worker with a part of the group keeps to that part modulo G
        extra_round, offset = divmod(index, len(self.sample_indices))
        sample_index = extra_round * self.settings.group_size + self.sample_indices[offset]
        predicted = self._lengths[offset] if self._lengths else None
        wait_at = self.settings.prefix_tokens if self._in_prefix else None
        return Sample(self, index, sample_index, self._key_of(sample_index), predicted, wait_at)

    def _end_prefix(self) -> None:
        """One prefix is done; after the last, predict the lengths of the waiting samples and start the schedule
        proper."""
        self._num_prefixes_left -= 1
        if self._num_prefixes_left:
            return
        self._in_prefix = False
        waiting = self._with_prefix
        if waiting:  # else every sample ended within its prefix
            waiting.sort(key=lambda sample: sample.index)
            if self._predict is not None:
                lengths = self._predict(self.prompt_ids, [list(sample.tokens) for sample in waiting])
                for sample, length in zip(waiting, lengths, strict=True):
                    sample.predicted = length
                    sample.forecast = Forecast(len(sample.tokens), float(length))
            else:
                lengths = with_means([sample.predicted for sample in waiting])
            self._schedule = self._make_schedule(len(waiting), lengths)

    def _make_schedule(self, count: int, lengths: Sequence[float]) -> Schedule:
        """The schedule proper of `count` samples with these predicted lengths."""
        return make_schedule(self.settings.schedule, count, self.settings.slots, lengths, self.settings.epsilon)


def with_means(predicted: Sequence[float | None]) -> list[float]:
    """Predicted lengths, those without one at the mean of the others (1 where there is none): with_means([4, None, 8])
    -> [4, 6, 8]."""
    known = [length for length in predicted if length is not None]
    mean = sum(known) / len(known) if known else 1.0
    return [mean if length is None else length for length in predicted]

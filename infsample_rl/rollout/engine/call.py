"""One call of an engine: what it asks for, where its samples end, how they leave, what is asked back, its figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from infsample_rl.rollout.schedule.prompt_group import GroupSettings, Predict, PromptGroup, Sample
from infsample_rl.rollout.schedule.stay_log import StayLog
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from infsample_rl.types import Completion


@dataclass(frozen=True, slots=True)
class Request:
    """Samples sample_indices[n] of the prompt prompt_ids[n], which is prompt_indices[n] in the step's batch."""

    prompt_ids: Sequence[list[int]]
    prompt_indices: list[int]
    sample_indices: Sequence[Sequence[int]]

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[list[int]],
        prompt_indices: Sequence[int] | None,
        sample_indices: Sequence[Sequence[int]] | None,
        group_size: int,
    ) -> Request:
        """None: the first prompts of the step; whole groups. ValueError for lists that do not go together."""
        indices = list(range(len(prompt_ids))) if prompt_indices is None else list(prompt_indices)
        asked = [range(group_size)] * len(prompt_ids) if sample_indices is None else sample_indices
        if not len(prompt_ids) == len(indices) == len(asked):
            lengths = f"{len(prompt_ids)}, {len(indices)} and {len(asked)}"
            raise ValueError(f"prompt_ids, prompt_indices and sample_indices must be equally long, got {lengths}")
        return cls(prompt_ids, indices, asked)

    def check(self, vocab_size: int, context: int | None, max_new_tokens: int, schedule: str) -> None:
        """ValueError for prompts the model cannot read, and for samples the schedule cannot give."""
        for index, ids, asked in zip(self.prompt_indices, self.prompt_ids, self.sample_indices, strict=True):
            if len(ids) == 0:
                raise ValueError(f"prompt {index} is empty; give at least one token")
            if not (0 <= min(ids) and max(ids) < vocab_size):
                outside = min(ids) if min(ids) < 0 else max(ids)
                raise ValueError(f"prompt {index} has token {outside}, outside the model's vocabulary of {vocab_size}")
            if context is not None and len(ids) + max_new_tokens > context:
                room = f"max_new_tokens={context - len(ids)}" if len(ids) < context else f"a prompt of {context - 1}"
                raise ValueError(
                    f"prompt {index} of {len(ids)} tokens + rollout.max_new_tokens = {max_new_tokens} is above the "
                    f"model's context of {context}; the nearest that works is {room}"
                )
            if len(set(asked)) != len(asked):
                raise ValueError(f"sample_indices of prompt {index} must differ, got {list(asked)}")
            contiguous = list(range(asked[0], asked[0] + len(asked))) if len(asked) else []
            if schedule == "dynamic_slot" and list(asked) != contiguous:
                raise ValueError(
                    f"sample_indices of prompt {index} must be contiguous with schedule=dynamic_slot, got {list(asked)}"
                )

    def groups(
        self,
        settings: GroupSettings,
        key: Callable[[int, int], int],
        predict: Predict | None,
        *,
        predicted_in_rows: bool,
    ) -> list[PromptGroup]:
        """The prompts of which samples are wanted. `key`: noise key of (prompt_index, sample_index)."""
        make = partial(PromptGroup, predict=predict, predicted_in_rows=predicted_in_rows)
        return [
            make(index, list(ids), list(asked), settings, partial(key, index))
            for index, ids, asked in zip(self.prompt_indices, self.prompt_ids, self.sample_indices, strict=True)
            if len(asked) > 0
        ]


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends a sample: a stop token, a stop string, or its length."""

    max_new_tokens: int
    stop_token_ids: set[int]
    ends_text: Callable[[Sequence[int]], bool] | None  # whether a response's newest token completes a stop string

    def reason(self, tokens: Sequence[int]) -> str:
        """Why a response of these tokens ends with the newest: stop or length; "": it goes on."""
        if tokens[-1] in self.stop_token_ids or (self.ends_text is not None and self.ends_text(tokens)):
            return "stop"
        return "length" if len(tokens) == self.max_new_tokens else ""


class MicroGroups:
    """The groups of one call, whose finished samples leave in micro-groups of one prompt each."""

    def __init__(self, groups: Sequence[PromptGroup], size: int, policy_version: int, *, truncates: bool) -> None:
        """`truncates`: completions carry log-probabilities of the truncated distribution too."""
        self.stays = StayLog()
        self._groups = list(groups)
        self._size, self._policy_version, self.truncates = size, policy_version, truncates

    def take(self) -> list[list[Completion]]:
        """Full micro-groups, and the smaller last one of a group that is done."""
        taken = []
        for group in list(self._groups):
            while len(group.finished) >= self._size or (group.is_done and group.finished):
                taken.append([self._completion(sample) for sample in group.finished[: self._size]])
                group.finished = group.finished[self._size :]
            if group.is_done:
                self._groups.remove(group)
        return taken

    def _completion(self, sample: Sample) -> Completion:
        return Completion(
            prompt_index=sample.group.prompt_index,
            sample_index=sample.sample_index,
            token_ids=np.array(sample.tokens, np.int32),
            logprobs=np.array(sample.logprobs, np.float32),
            sampling_logprobs=np.array(sample.sampling_logprobs, np.float32) if self.truncates else None,
            finish_reason=sample.finish_reason,
            policy_version=self._policy_version,
            stays=self.stays.take(sample),
            forecast=sample.forecast,
            episode=sample.episode,
        )


class Withdrawals:
    """Asked for at any time, answered between the running steps of the stream that is open."""

    def __init__(self) -> None:
        self.is_open = False  # whether a stream runs, which will answer
        self._asked: deque[Future[dict[int, list[int]]]] = deque()

    def ask(self) -> dict[int, list[int]]:
        """From another thread: half of the samples of the stream that have not started, which it leaves out.
        {prompt_index: sample indices}."""
        asked: Future[dict[int, list[int]]] = Future()
        self._asked.append(asked)
        while True:
            try:
                return asked.result(timeout=0.1)
            except TimeoutError:
                if not self.is_open and asked.cancel():
                    return {}

    def answer(self, planner: StepPlanner) -> None:
        """Give what was asked for since the last time."""
        while self._asked:
            asked = self._asked.popleft()
            if asked.set_running_or_notify_cancel():
                asked.set_result(planner.give_back())


@dataclass(slots=True)
class RolloutStats:
    """Figures of one call, so far."""

    running_steps: int = 0  # rounds in which every row got one token, plus one for every prefill that computes KV again
    least_steps: float = 0.0  # what its longest response or the pool would take in any order, without drafts
    row_utilisation: float = 0.0  # rows of all steps / (running_steps x slots); token_budget: x most rows at a time
    peak_kv_bytes: int = 0  # pages held at a time, prompts included
    kv_pool_bytes: int = 0  # pages allocated
    preemptions: int = 0  # rows that had to give their pages back unfinished
    # tokens whose KV had been given up and was computed again: of preempted samples, prefixes and prompts
    recomputed_tokens: int = 0
    parked_tokens: int = 0  # tokens whose KV was copied out of the pool and back instead
    row_steps: int = 0  # rows of all steps: so many tokens, and accepted_tokens more
    drafted_tokens: int = 0  # run beside the rows' newest tokens
    accepted_tokens: int = 0  # of them, those that were sampled
    draft_seconds: float = field(default=0.0, compare=False)  # spent on drafting
    sent_tokens: int = 0  # of prompts, and of responses begun, that vLLM was sent
    cached_tokens: int = 0  # of them, those whose KV it found in its prefix cache
    predict_seconds: float = field(default=0.0, compare=False)  # spent on predicting lengths, and on learning to

    def read(self, planner: StepPlanner, page_bytes: int) -> None:
        """Take the planner's figures."""
        self.running_steps, self.preemptions = planner.running_steps, planner.num_preemptions
        self.least_steps = planner.least_steps
        self.row_steps, self.accepted_tokens = planner.row_steps, planner.num_tokens - planner.row_steps
        self.recomputed_tokens, self.parked_tokens = planner.recomputed_tokens, planner.parked_tokens
        slots = planner.most_rows if planner.policy is not None else planner.num_slots
        self.row_utilisation = planner.row_steps / (planner.running_steps * slots)
        self.peak_kv_bytes = planner.pool.peak_pages * page_bytes
        self.kv_pool_bytes = planner.pool.num_pages * page_bytes


@dataclass(slots=True)
class Totals:
    """Sums over all calls of an engine; they grow from step to step."""

    running_steps: int = 0
    last_step_at: float = 0.0  # time.time() of the last running step: when what a stream just yielded ended

"""Where samples end, and the micro-groups of completions that they leave as."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from infsample_rl.rollout.schedule.prompt_group import PromptGroup, Sample
from infsample_rl.rollout.schedule.stay_log import StayLog
from infsample_rl.types import Completion


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
        self._size, self._policy_version, self._truncates = size, policy_version, truncates

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
            sampling_logprobs=np.array(sample.sampling_logprobs, np.float32) if self._truncates else None,
            finish_reason=sample.finish_reason,
            policy_version=self._policy_version,
            stays=self.stays.take(sample),
            forecast=sample.forecast,
        )

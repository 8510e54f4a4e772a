"""What one call asks of an engine: samples of some prompts of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from infsample_rl.rollout.engine.model_runner import ModelRunner
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, Predict, PromptGroup


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

    def check(self, runner: ModelRunner, max_new_tokens: int, schedule: str) -> None:
        """ValueError for prompts the model cannot read, and for samples the schedule cannot give."""
        vocab_size, context = runner.vocab_size, runner.context
        for index, ids, asked in zip(self.prompt_indices, self.prompt_ids, self.sample_indices, strict=True):
            if len(ids) == 0:
                raise ValueError(f"prompt {index} is empty; give at least one token")
            if not (0 <= min(ids) and max(ids) < vocab_size):
                outside = min(ids) if min(ids) < 0 else max(ids)
                raise ValueError(f"prompt {index} has token {outside}, outside the model's vocabulary of {vocab_size}")
            if context is not None and len(ids) + max_new_tokens > context:
                raise ValueError(
                    f"prompt {index} of {len(ids)} tokens + rollout.max_new_tokens = {max_new_tokens} is above the "
                    f"model's context of {context}; the nearest that works is max_new_tokens={context - len(ids)}"
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

"""Engines on tiny models for the tests, and what is asked of their completions. Needs neither Ray nor Hydra."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from infsample_rl.rollout.engine.sampling_engine import SamplingEngine
    from infsample_rl.types import Completion

PROMPTS = [[5, 9, 7, 30, 2], [11, 4, 4], [8, 60, 33, 21, 17, 50, 3]]
STOP = {3, 17, 40}  # of 64 tokens: samples end after 20 tokens on average


def make_engine(
    model, tokenizer, *, stop=STOP, max_prompt_tokens=None, doubles=False, exact=False, **settings
) -> SamplingEngine:
    """An engine whose warnings are not of interest; `settings` beside those of six samples in three slots."""
    from infsample_rl.config import RolloutConfig
    from infsample_rl.rollout.engine.sampling_engine import SamplingEngine

    config = RolloutConfig(**({"group_size": 6, "slots": 3, "max_new_tokens": 24} | settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends = None if stop is None else set(stop)
        prompts = {"max_prompt_tokens": max_prompt_tokens, "doubles": doubles}
        own = {"stop_token_ids": ends, "exact": exact, **prompts}
        return SamplingEngine(model, tokenizer, config, **own)


def tokens_of(groups: Sequence[Sequence[Completion]]) -> list[list[list[int]]]:
    """Token ids [prompt][sample]."""
    return [[completion.token_ids.tolist() for completion in group] for group in groups]


def ends_of(groups: Sequence[Sequence[Completion]]) -> list[list[tuple[list[int], str]]]:
    """(token ids, finish reason) [prompt][sample]."""
    return [[(completion.token_ids.tolist(), completion.finish_reason) for completion in group] for group in groups]


def bits_of(groups: Sequence[Sequence[Completion]]) -> list[list[bytes]]:
    """Log-probabilities [prompt][sample], those of the truncated distribution among them, as their bytes."""
    return [[_bits(completion) for completion in group] for group in groups]


def _bits(completion: Completion) -> bytes:
    own, truncated = completion.logprobs, completion.sampling_logprobs
    return own.tobytes() if truncated is None else own.tobytes() + truncated.tobytes()


def assert_logprobs_close(found, wanted, tolerance: float) -> None:
    """Log-probabilities of two generate() results, sample by sample."""
    for one, other in zip(sum(found, []), sum(wanted, []), strict=True):
        difference = torch.from_numpy(one.logprobs) - torch.from_numpy(other.logprobs)
        assert difference.abs().max() <= tolerance


def greedy(model, prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that transformers' own generate finds likeliest after `prompt`."""
    ids = torch.tensor([prompt], device=model.device)
    plain = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **plain)[0, len(prompt) :].tolist()

"""Whether what is trained is what was sampled: the engine's and the learner's log-probabilities of the same tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from infsample_rl.config import Config
from infsample_rl.learner.update_sums import UpdateSums
from infsample_rl.model.packing import TrainingRow
from infsample_rl.types import TrainingSample


def check_finite(samples: list[TrainingSample], row: TrainingRow, logprobs: Tensor, loss: float, update: int) -> None:
    """RuntimeError, with the tokens to blame, for a loss that is not finite."""
    if not math.isfinite(loss):
        worst = _worst_tokens(samples, (~torch.isfinite(logprobs)).float(), logprobs, row)
        raise RuntimeError(f"update {update}: loss is {loss}; {worst}; learner.on_nonfinite=skip would skip the update")


def check_tokens(
    config: Config, samples: list[TrainingSample], row: TrainingRow, logprobs: Tensor, update: int
) -> None:
    """RuntimeError for tokens [R] whose log-probabilities differ by more than rounding explains, where it is all that
    can differ."""
    difference, limit = (logprobs - row.engine_logprobs).abs(), config.objective.mismatch_stop_float32
    if config.mismatch_is_rounding and not difference.max() <= limit:  # NaN is a mismatch too
        worst = _worst_tokens(samples, difference, logprobs, row)
        raise RuntimeError(
            f"update {update}: engine and learner differ by {difference.max().item():.3g} in a token's "
            f"log-probability, above objective.mismatch_stop_float32={limit:g}: they do not run the same policy; "
            f"{worst}"
        )


def check_mean(config: Config, sums: UpdateSums, update: int) -> None:
    """RuntimeError for an update whose tokens differ by more than objective.mismatch_stop in the mean."""
    mean, bound = sums.mismatch / max(1, sums.num_tokens), config.objective.mismatch_stop
    if config.mismatch_is_bounded_in_mean and not mean <= bound:  # NaN is a mismatch too
        raise RuntimeError(
            f"update {update}: engine and learner differ by {mean:.3g} in the mean log-probability of a token, above "
            f"objective.mismatch_stop={bound} (largest {sums.mismatch_max:.3g}): they do not run the same policy"
        )


def _worst_tokens(samples: list[TrainingSample], badness: Tensor, logprobs: Tensor, row: TrainingRow) -> str:
    """The three tokens of largest `badness` [R], named by prompt_index, sample_index and position, with both
    log-probabilities."""
    names = [(sample, position) for sample in samples for position in range(len(sample.response_ids))]
    lines = []
    for token in badness.nan_to_num(nan=math.inf).topk(min(3, len(badness))).indices.tolist():
        sample, position = names[token]
        lines.append(
            f"(prompt_index={sample.prompt_index}, sample_index={sample.sample_index}, token {position}): "
            f"engine {row.engine_logprobs[token].item():.6f}, learner {logprobs[token].item():.6f}"
        )
    return "; ".join(lines)

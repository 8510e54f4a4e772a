"""What a rank adds up over the rows of one update, the metrics that become of it over all ranks, and whether what is
trained is what was sampled: the engine's and the learner's log-probabilities of the same tokens."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist
from torch import Tensor

from infsample_rl.config import Config
from infsample_rl.learner.loss import effective_sample_size, engine_mismatch
from infsample_rl.model.packing import TrainingRow
from infsample_rl.types import TrainingSample

MEANS = {  # metric -> its sum
    "learner/kl": "kl",
    "learner/entropy": "entropy",
    "learner/clip_fraction": "clip_fraction",
    "learner/importance_mean": "importance_mean",
    "learner/logprob_diff_mean": "logprob_diff_mean",
    "learner/logprob_diff_k3": "logprob_diff_k3",
}


@dataclasses.dataclass
class UpdateSums:
    """This rank's sums over the rows of one update, one or two for each metric; the loss still has the provisional
    denominator."""

    loss: float = 0.0
    kl: float = 0.0  # per token, like all below
    entropy: float = 0.0
    clip_fraction: float = 0.0
    importance_mean: float = 0.0  # truncated weights
    logprob_diff_mean: float = 0.0  # |engine - learner|
    logprob_diff_k3: float = 0.0
    engine_weight: float = 0.0  # learner / engine probability, as importance weights it
    engine_weight_square: float = 0.0
    num_tokens: int = 0
    num_nonfinite_rows: int = 0
    logprob_diff_max: float = 0.0  # over ranks the largest, like what follows
    denominator: float = 0.0  # of the losses so far, the same on every rank that had a row

    def add_row(
        self,
        loss: float,
        metrics: dict[str, float],
        num_tokens: int,
        logprobs: Tensor,
        engine_logprobs: Tensor,
        entropy: Tensor,
    ) -> None:
        """Enter a row: its loss, policy_loss's `metrics` (divided by `num_tokens`), and [R] token figures."""
        absolute, largest, k3 = (value.item() for value in engine_mismatch(logprobs, engine_logprobs))
        self.loss += loss
        for name, value in metrics.items():
            setattr(self, name, getattr(self, name) + value * num_tokens)
        self.entropy += entropy.detach().double().sum().item()
        self.logprob_diff_mean += absolute
        self.logprob_diff_k3 += k3
        self.logprob_diff_max = max(self.logprob_diff_max, largest)
        self.num_tokens += len(logprobs)

    def over_ranks(self, device: torch.device, world_size: int) -> UpdateSums:
        """The sums of all ranks together; a collective."""
        values = torch.tensor(dataclasses.astuple(self), dtype=torch.float64, device=device)
        total = values[:-2].clone()
        if world_size > 1:
            dist.all_reduce(total)
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return UpdateSums(*total.tolist(), *values[-2:].tolist())

    def metrics(self) -> dict[str, float | None]:
        """Means over the update's tokens, by metric name; None where no row was sent.

        logprob_diff_* and engine_ess compare the engine's log-probabilities with the learner's first ones of the same
        tokens.
        """
        tokens = self.num_tokens
        found = {metric: getattr(self, name) / max(1, tokens) for metric, name in MEANS.items()} | {
            "learner/logprob_diff_max": self.logprob_diff_max,
            "learner/engine_ess": effective_sample_size(self.engine_weight, self.engine_weight_square, tokens),
        }
        return {name: value if tokens else None for name, value in found.items()}


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
    mean, bound = sums.logprob_diff_mean / max(1, sums.num_tokens), config.objective.mismatch_stop
    if config.mismatch_is_bounded_in_mean and not mean <= bound:  # NaN is a mismatch too
        raise RuntimeError(
            f"update {update}: engine and learner differ by {mean:.3g} in the mean log-probability of a token, above "
            f"objective.mismatch_stop={bound} (largest {sums.logprob_diff_max:.3g}): they do not run the same policy"
        )


def _worst_tokens(samples: list[TrainingSample], badness: Tensor, logprobs: Tensor, row: TrainingRow) -> str:
    """The three tokens of largest `badness` [R], named by prompt_index, sample_index and position, with both
    log-probabilities."""
    names = [(sample, position) for sample in samples for position in sample.sampled.nonzero()[0].tolist()]
    lines = []
    for token in badness.nan_to_num(nan=math.inf).topk(min(3, len(badness))).indices.tolist():
        sample, position = names[token]
        lines.append(
            f"(prompt_index={sample.prompt_index}, sample_index={sample.sample_index}, token {position}): "
            f"engine {row.engine_logprobs[token].item():.6f}, learner {logprobs[token].item():.6f}"
        )
    return "; ".join(lines)

"""What a rank adds up over the rows of one update, and the metrics that become of it over all ranks."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from infsample_rl.learner.loss import effective_sample_size, engine_mismatch


@dataclasses.dataclass
class UpdateSums:
    """This rank's sums over the rows of one update, one or two for each metric; the loss still has the provisional
    denominator."""

    loss: float = 0.0
    kl: float = 0.0  # per token, like all below
    entropy: float = 0.0
    clipped: float = 0.0
    importance: float = 0.0  # truncated weights
    mismatch: float = 0.0  # |engine - learner|
    mismatch_k3: float = 0.0
    weight: float = 0.0  # learner / engine probability, as importance weights it
    weight_square: float = 0.0
    num_tokens: int = 0
    num_nonfinite_rows: int = 0
    mismatch_max: float = 0.0  # over ranks the largest, like what follows
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
        self.kl += metrics["kl"] * num_tokens
        self.clipped += metrics["clip_fraction"] * num_tokens
        self.importance += metrics["importance_mean"] * num_tokens
        self.weight += metrics["engine_weight"] * num_tokens
        self.weight_square += metrics["engine_weight_square"] * num_tokens
        self.entropy += entropy.detach().double().sum().item()
        self.mismatch += absolute
        self.mismatch_k3 += k3
        self.mismatch_max = max(self.mismatch_max, largest)
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
        means = {
            "learner/kl": self.kl / max(1, tokens),
            "learner/entropy": self.entropy / max(1, tokens),
            "learner/clip_fraction": self.clipped / max(1, tokens),
            "learner/importance_mean": self.importance / max(1, tokens),
            "learner/logprob_diff_mean": self.mismatch / max(1, tokens),
            "learner/logprob_diff_max": self.mismatch_max,
            "learner/logprob_diff_k3": self.mismatch_k3 / max(1, tokens),
            "learner/engine_ess": effective_sample_size(self.weight, self.weight_square, self.num_tokens),
        }
        return {name: value if tokens else None for name, value in means.items()}

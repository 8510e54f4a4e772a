"""What the learner asks of the policy it trains, however that is sharded: FSDP2, DeepSpeed, or not at all at one rank.

The optimizer keeps float32 masters; forward and backward run in the model's dtype; gradients are summed over rows and
ranks in float32. Every call is a collective of all ranks: they make the same calls in the same order. With
learner.grad_sync=every_row that holds for every row too (rows of weight zero fill up); with last_row rows run free of
the other ranks until reduce_with_next_backward().
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from infsample_rl.config import Config
from infsample_rl.learner.checkpoint import SavedState
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.packing import PackedRow

# A trained parameter as the optimizer holds it: full float32 tensors under the names master, exp_avg, exp_avg_sq
# (moments from the first step on).
TrainingState = dict[str, Tensor]


class Backend(Protocol):
    """The same few calls for every way of sharding."""

    optimizer_steps: int  # steps of AdamW done: updates without the skipped ones

    def forward(self, row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        """(log-probabilities [R], entropies [R]) of the row, as PackedPolicy.forward."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, this rank's part of a sum over all ranks and rows."""

    def reduce_with_next_backward(self) -> None:
        """grad_sync=last_row: let the next backward(), the update's last on every rank, reduce the gradients over the
        ranks."""

    def update(self, *, factor: float, max_norm: float, lr: float) -> float:
        """Multiply the summed gradients by `factor` in float32, clip their norm at `max_norm`, step AdamW; the norm
        before clipping.

        A parameter that saw no row has gradient zero. With a norm that is not finite nothing is stepped. The gradients
        are gone after it.
        """

    def discard(self) -> None:
        """Drop the gradients."""

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor in the model's dtype) of every parameter, a tied one once, one at a time; run
        it to its end."""

    def training_states(self) -> Iterator[tuple[str, TrainingState]]:
        """(name, full float32 state) of every trained parameter, one at a time; run it to its end."""

    def load_training_states(self, saved: SavedState) -> None:
        """Take masters, moments and optimizer_steps from a checkpoint saved by any backend at any number of ranks."""


def build_backend(policy: PackedPolicy, config: Config, *, device: torch.device, world_size: int) -> Backend:
    """The backend of the settings. Imported where it is chosen: a machine may lack DeepSpeed."""
    learner, dtype = config.learner, getattr(torch, config.model.dtype)
    if learner.backend == "deepspeed":
        from infsample_rl.learner.deepspeed_backend import DeepSpeedBackend

        return DeepSpeedBackend(policy, learner, device=device, dtype=dtype, world_size=world_size)
    if world_size == 1:
        from infsample_rl.learner.unsharded_backend import UnshardedBackend

        return UnshardedBackend(policy, learner, dtype=dtype)
    from infsample_rl.learner.fsdp_backend import FsdpBackend

    return FsdpBackend(policy, learner, device=device, dtype=dtype, world_size=world_size)

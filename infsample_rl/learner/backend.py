"""What the learner asks of the policy it trains, however that is sharded: FSDP2, DeepSpeed, or not at all at one rank.

The optimizer keeps float32 masters; forward and backward run in the model's dtype; gradients are summed over rows and
ranks in float32. Every call is a collective of all ranks: they make the same calls in the same order. With
learner.grad_sync=every_row that holds for every row too (rows of weight zero fill up); with last_row rows run free of
the other ranks until reduce_with_next_backward().
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infsample_rl.learner.checkpoint import KINDS, SavedState
from infsample_rl.learner.optimizer import load_moments, moments, step
from infsample_rl.model.logprobs import TokenScores
from infsample_rl.model.packing import PackedRow
from infsample_rl.model.weight_sync.buckets import Shape


class Backend(ABC):
    """The same few calls for every way of sharding; what is here holds for an optimizer that steps `masters`."""

    policy: Any
    optimizer: torch.optim.Optimizer
    masters: dict[str, nn.Parameter]  # by Hugging Face name, those that are trained
    optimizer_steps = 0  # steps of AdamW done: updates without the skipped ones

    def forward(self, row: PackedRow, temperature: float) -> TokenScores:
        """Scores of the row's response tokens, as PackedPolicy.forward."""
        return self.policy(row, temperature)

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, this rank's part of a sum over all ranks and rows."""

    def reduce_with_next_backward(self) -> None:  # noqa: B027  # nothing to reduce without other ranks
        """grad_sync=last_row: let the next backward(), the update's last on every rank, reduce the gradients over the
        ranks."""

    def update(self, *, factor: float, max_norm: float, lr: float) -> float:
        """Multiply the summed gradients by `factor` in float32, clip their norm at `max_norm`, step AdamW; the norm
        before clipping.

        A parameter that saw no row has gradient zero. With a norm that is not finite nothing is stepped. The gradients
        are gone after it.
        """
        norm = step(self.optimizer, self.masters.values(), factor=factor, max_norm=max_norm, lr=lr)
        self.optimizer_steps += math.isfinite(norm)
        self.discard()
        return norm

    def discard(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        self._take_masters()

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor in the model's dtype) of every parameter, a tied one once, one at a time; run
        it to its end."""

    def training_shapes(self) -> list[Shape]:
        """Names, dtypes and shapes of training_states(), without gathering anything."""
        kinds = KINDS if self.optimizer_steps > 0 else KINDS[:1]
        return [
            (f"{name}/{kind}", torch.float32, tuple(self._shape(master)))
            for name, master in self.masters.items()
            for kind in kinds
        ]

    def training_states(self, kinds: Sequence[str] = KINDS) -> Iterator[tuple[str, Tensor]]:
        """(name/kind, full float32 tensor) of every trained parameter and these of its KINDS, moments from the first
        step on, one at a time; run it to its end."""
        for name, master in self.masters.items():
            state = {"master": master.detach()} | moments(self.optimizer, master)
            for kind in kinds:
                if kind in state:
                    yield f"{name}/{kind}", self._gathered(state[kind])

    @torch.no_grad()
    def load_training_states(self, saved: SavedState) -> None:
        """Take masters, moments and optimizer_steps from a checkpoint saved by any backend at any number of ranks."""
        for name, master in self.masters.items():
            state = {key: self._own_part(value, master) for key, value in saved.read(name, master.shape).items()}
            master.copy_(state.pop("master"))
            load_moments(self.optimizer, master, state, saved.optimizer_steps)
        self.optimizer_steps = saved.optimizer_steps
        self._take_masters()

    def _take_masters(self) -> None:  # noqa: B027  # nothing to do where they are the parameters
        """Let forward passes read the masters as they are now."""

    def _shape(self, master: Any) -> torch.Size:
        """Of the whole parameter."""
        return master.shape

    def _gathered(self, part: Tensor) -> Tensor:
        """The full tensor, of whose shards `part` is this rank's."""
        return part

    def _own_part(self, full: Tensor, master: Any) -> Tensor:
        """This rank's part of a full tensor that every rank has read, sharded like `master`."""
        return full

"""A policy on one rank that nothing wraps: an engine in the same process can read the very weights the learner's
forward reads.

In float32 the parameters are their own masters. In 16 bits float32 masters lie beside them, in host memory with
learner.offload_optimizer, and every row's gradients are added to the masters' float32 ones as soon as they are there.
The head adds its own, by chunks of logits, so that no second gradient of its size lives through a backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from infsample_rl.config import LearnerConfig
from infsample_rl.learner.checkpoint import SavedState
from infsample_rl.learner.optimizer import build_optimizer, load_moments, moments, step
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.packing import PackedRow


class UnshardedBackend:
    """The calls of Backend, for one rank."""

    def __init__(self, policy: PackedPolicy, learner: LearnerConfig, *, dtype: torch.dtype) -> None:
        """`policy` is float32 when given, in `dtype` afterwards."""
        self.policy = policy
        self.optimizer_steps = 0
        self.trained = {name: parameter for name, parameter in policy.lm.named_parameters() if parameter.requires_grad}
        self.masters: dict[str, nn.Parameter] = dict(self.trained)
        device = next(policy.lm.parameters()).device
        place = torch.device("cpu") if learner.offload_optimizer else device
        self.has_copies = dtype != torch.float32 or place.type != device.type
        if self.has_copies:
            self.masters = {
                name: nn.Parameter(parameter.detach().to(place, copy=True)) for name, parameter in self.trained.items()
            }
            for name, parameter in self.trained.items():
                parameter.register_post_accumulate_grad_hook(
                    lambda given, master=self.masters[name]: move_gradient(given, master)
                )
            for parameter in policy.lm.parameters():
                parameter.data = parameter.data.to(dtype)
        head = policy.lm.get_output_embeddings().weight
        for name, parameter in self.trained.items():
            if parameter is head and self.masters[name].device == head.device:
                policy.head_gradient = partial(gradient_sum, self.masters[name])
        self.optimizer = build_optimizer(self.masters.values(), learner)

    def forward(self, row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        """As PackedPolicy.forward."""
        return self.policy(row, temperature)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`."""
        loss.backward()

    def reduce_with_next_backward(self) -> None:
        """Nothing: there is one rank."""

    def update(self, *, factor: float, max_norm: float, lr: float) -> float:
        """Scale, clip, step; the norm before clipping."""
        norm = step(self.optimizer, self.masters.values(), factor=factor, max_norm=max_norm, lr=lr)
        if math.isfinite(norm):
            self.optimizer_steps += 1
            self._publish_masters()
        self.discard()
        return norm

    @torch.no_grad()
    def _publish_masters(self) -> None:
        if self.has_copies:
            for name, parameter in self.trained.items():
                parameter.copy_(self.masters[name])

    def discard(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every parameter; the tensors are the parameters themselves."""
        for name, parameter in self.policy.lm.named_parameters():
            yield name, parameter.detach()

    def training_states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(name, float32 state) of every trained parameter."""
        for name, master in self.masters.items():
            yield name, {"master": master.detach()} | moments(self.optimizer, master)

    @torch.no_grad()
    def load_training_states(self, saved: SavedState) -> None:
        """Take masters and moments from a checkpoint."""
        for name, master in self.masters.items():
            state = saved.read(name, master.shape)
            master.copy_(state.pop("master"))
            load_moments(self.optimizer, master, state, saved.optimizer_steps)
        self.optimizer_steps = saved.optimizer_steps
        self._publish_masters()


def gradient_sum(master: nn.Parameter) -> Tensor:
    """Where the gradients of all rows are added up."""
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad


@torch.no_grad()
def move_gradient(parameter: Tensor, master: nn.Parameter) -> None:
    if parameter.grad is None:  # a head that has added its own
        return
    gradient = parameter.grad.to(master.device, torch.float32)
    parameter.grad = None
    if master.grad is None:
        master.grad = gradient
    else:
        master.grad.add_(gradient)

"""A policy on one rank that nothing wraps: an engine in the same process can read the very weights the learner's
forward reads.

In float32 the parameters are their own masters. In 16 bits float32 masters lie beside them, in host memory with
learner.offload_optimizer, and every row's gradients are added to the masters' float32 ones as soon as they are there.
The head adds its own, by chunks of logits, so that no second gradient of its size lives through a backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from infsample_rl.config import LearnerConfig
from infsample_rl.learner.backend import Backend
from infsample_rl.learner.optimizer import build_optimizer
from infsample_rl.model.logprobs import PackedPolicy


class UnshardedBackend(Backend):
    """The calls of Backend, for one rank."""

    def __init__(self, policy: PackedPolicy, learner: LearnerConfig, *, dtype: torch.dtype) -> None:
        """`policy` is float32 when given, in `dtype` afterwards."""
        self.policy = policy
        self.trained = {name: parameter for name, parameter in policy.lm.named_parameters() if parameter.requires_grad}
        self.masters = dict(self.trained)
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

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`."""
        loss.backward()

    @torch.no_grad()
    def _take_masters(self) -> None:
        if self.has_copies:
            for name, parameter in self.trained.items():
                parameter.copy_(self.masters[name])

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every parameter; the tensors are the parameters themselves."""
        for name, parameter in self.policy.lm.named_parameters():
            yield name, parameter.detach()


def gradient_sum(master: nn.Parameter) -> Tensor:
    """Where the gradients of all rows are added up."""
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad


@torch.no_grad()
def move_gradient(parameter: Tensor, master: nn.Parameter) -> None:
    """Add a parameter's gradient to its master's."""
    if parameter.grad is None:  # a head that has added its own
        return
    gradient = parameter.grad.to(master.device, torch.float32)
    parameter.grad = None
    if master.grad is None:
        master.grad = gradient
    else:
        master.grad.add_(gradient)

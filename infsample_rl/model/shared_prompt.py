"""A prompt that is computed once for all passes over its responses, forward and backward.

A group too long for one pass is trained in several. Its prompt runs first, alone; every pass over some of its responses
then reads the prompt's keys, values and last hidden state as if they were inputs, and leaves its gradient there; one
backward pass through the prompt delivers the sum. By the chain rule that is the gradient of the group in one row.
Beside its activations the prompt takes one gradient of its keys and values.

Shape letters: P prompt tokens, K key-value heads, D head dimension, E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infsample_rl.types import MaybeNone


class SharedPrompt:
    """Filled by the prompt's own pass (`keep`, `end`), read by the passes over its responses (`keys_and_values`,
    `last_hidden`)."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.is_filled = False
        self._pairs: dict[nn.Module, tuple[_Shared, _Shared]] = {}  # by attention module
        self._last_hidden: _Shared | MaybeNone = None  # after end()

    def keep(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        """Called by the attention of the prompt's pass: key and value [1, K, P, D]."""
        if self.is_filled:  # activations that are computed again
            return
        if module in self._pairs:
            raise RuntimeError(f"{type(module).__name__} attends twice in one pass: its prompt cannot be shared")
        self._pairs[module] = (_Shared(key), _Shared(value))

    def end(self, last_hidden: Tensor) -> None:
        """The prompt's pass is over: `last_hidden` [E] predicts every response's first token."""
        self._last_hidden, self.is_filled = _Shared(last_hidden), True

    def keys_and_values(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """[1, K, P, D] of one attention module; gradients stop at them."""
        key, value = self._pairs[module]
        return key.leaf, value.leaf

    @property
    def last_hidden(self) -> Tensor:
        """[E] of the prompt's last token; gradients stop at it."""
        return self._last_hidden.leaf

    def gradient_carrier(self) -> Tensor:
        """A scalar whose backward pass, whatever it is scaled by, runs the gradients that all passes have left through
        the prompt. Once."""
        shared = [tensor for pair in self._pairs.values() for tensor in pair] + [self._last_hidden]
        trained = [tensor for tensor in shared if tensor.made.requires_grad]
        return _Carrier.apply([tensor.take_gradient() for tensor in trained], *(tensor.made for tensor in trained))


class _Shared:
    """A tensor as the prompt's pass made it, and the leaf that other passes read. Gradients are summed in float32, as a
    parameter's are."""

    def __init__(self, made: Tensor) -> None:
        self.made = made
        self.leaf = made.detach().requires_grad_(made.requires_grad)
        self._gradient: Tensor | None = None
        if made.requires_grad and made.dtype in (torch.float16, torch.bfloat16):
            self.leaf.register_post_accumulate_grad_hook(self._widen)

    def _widen(self, leaf: Any) -> None:
        if self._gradient is None:
            self._gradient = leaf.grad.float()
        else:
            self._gradient += leaf.grad
        leaf.grad = None

    def take_gradient(self) -> Tensor:
        gradient = self.leaf.grad if self._gradient is None else self._gradient.to(self.made.dtype)
        self.leaf.grad = self._gradient = None
        return torch.zeros_like(self.made) if gradient is None else gradient


class _Carrier(torch.autograd.Function):
    """Zero; its gradient with respect to the tensors is what it was given, already scaled as the losses were."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *made: Tensor) -> Tensor:
        ctx.gradients = gradients
        return made[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _scale: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return None, *gradients

"""What is taken of a chunk of logits: log-probabilities and entropies, and in the backward pass the logits' gradient.

On the CPU the passes work in place, since a chunk is the largest tensor there is. On a GPU, where each would read and
write all of it, they are compiled into a few that keep float32 in registers: the chunk exists once, in the dtype of the
head.

Shape letters: R tokens, V vocabulary. The distribution p is softmax(logits / temperature) without the masked ids. H is
its entropy; g and h are the gradients of a token's log-probability and entropy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LogitPasses(NamedTuple):
    """The passes of one policy."""

    temperature: float
    masked: Tensor | None  # ids without probability, int64

    def arguments_of(self, logits: Tensor, ids: Tensor | int) -> tuple[Tensor, Tensor]:
        """`ids` [R, K] and the softmax's arguments there, float32, of logits [R, V] before another pass; of a number K
        the K likeliest ids of every row."""
        if not isinstance(ids, Tensor) and ids == 0:  # topk of none may sort all on a GPU
            ids = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
        if isinstance(ids, Tensor):
            found = logits.gather(-1, ids)
        else:
            if self.masked is not None:
                logits.index_fill_(-1, self.masked, -math.inf)
            found, ids = logits.topk(ids, dim=-1)
        return ids, found.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature

    def summary(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of `labels` [R], entropies and normalizers (logsumexp of the softmax's argument) of logits
        [R, V], float32 (float64 stays)."""
        if logits.is_cuda:
            return _compiled(fused_summary)(logits, labels, self._mask(logits), self.temperature)
        logits = self._scaled(logits)
        normalizers = logits.logsumexp(-1)
        logprobs = logits.gather(-1, labels[:, None])[:, 0] - normalizers
        table = self._log_softmax_(logits, normalizers)
        return logprobs, -torch.linalg.vecdot(self._probabilities(table), table), normalizers

    def gradient(
        self,
        logits: Tensor,
        labels: Tensor,
        normalizers: Tensor,
        entropies: Tensor,
        g: Tensor,
        h: Tensor | None,
        others: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The logits' gradient [R, V]: p (-g - h (log p + H)), plus g at the label, over the temperature. On a GPU in
        the logits' dtype, else float32. `h` None: entropies have none. `others`: further ids [R, K] and the gradients
        [R, K] of their log-probabilities, each as a label's."""
        of_all = g if others is None else g + others[1].sum(-1)
        if logits.is_cuda:
            given = (labels, normalizers, entropies, g, of_all, h, self._mask(logits), self.temperature)
            return self.add_others_(_compiled(fused_gradient)(logits, *given), others)
        table = self._log_softmax_(self._scaled(logits), normalizers)
        gradient = self._probabilities(table)
        gradient.mul_(-of_all[:, None] if h is None else -of_all[:, None] - h[:, None] * (table + entropies[:, None]))
        gradient.scatter_add_(-1, labels[:, None], g[:, None].to(gradient.dtype)).div_(self.temperature)
        return self.add_others_(gradient, others)

    def add_others_(self, gradient: Tensor, others: tuple[Tensor, Tensor] | None) -> Tensor:
        """Add what the other ids' log-probabilities give at those ids, in place."""
        if others is None:
            return gradient
        return gradient.scatter_add_(-1, others[0], (others[1] / self.temperature).to(gradient.dtype))

    def _mask(self, logits: Tensor) -> Tensor | None:
        if self.masked is None:
            return None
        return torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device).index_fill_(0, self.masked, True)

    def _scaled(self, logits: Tensor) -> Tensor:
        """The softmax's argument."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(self.temperature)
        return logits if self.masked is None else logits.index_fill_(-1, self.masked, -math.inf)

    def _log_softmax_(self, logits: Tensor, normalizers: Tensor) -> Tensor:
        """Log-probabilities in place of the logits; those of masked ids, -inf, become 0, for 0 x -inf is NaN and its
        limit 0."""
        logits.sub_(normalizers[:, None])
        return logits if self.masked is None else logits.index_fill_(-1, self.masked, 0.0)

    def _probabilities(self, logprobs: Tensor) -> Tensor:
        """Of what _log_softmax_ gave."""
        found = logprobs.exp()
        return found if self.masked is None else found.index_fill_(-1, self.masked, 0.0)


def fused_summary(
    logits: Tensor, labels: Tensor, mask: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """LogitPasses.summary, to be compiled. `mask` [V]: true where an id has no probability."""
    scaled = _fused_scaled(logits, mask, temperature)
    normalizers = scaled.logsumexp(-1)
    table = scaled - normalizers[:, None]
    products = table.exp() * table
    if mask is not None:
        products = products.masked_fill(mask, 0.0)
    return scaled.gather(-1, labels[:, None])[:, 0] - normalizers, -products.sum(-1), normalizers


def fused_gradient(
    logits: Tensor,
    labels: Tensor,
    normalizers: Tensor,
    entropies: Tensor,
    g: Tensor,
    of_all: Tensor,
    h: Tensor | None,
    mask: Tensor | None,
    temperature: float,
) -> Tensor:
    """LogitPasses.gradient of the label and the entropy, to be compiled; `of_all` [R]: g and what is added for
    others."""
    table = _fused_scaled(logits, mask, temperature) - normalizers[:, None]
    gradient = -of_all[:, None] * table.exp()
    if h is not None:
        of_entropy = h[:, None] * table.exp() * (table + entropies[:, None])
        gradient = gradient - (of_entropy if mask is None else of_entropy.masked_fill(mask, 0.0))
    is_label = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    return (torch.where(is_label, gradient + g[:, None], gradient) / temperature).to(logits.dtype)


def _fused_scaled(logits: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return scaled if mask is None else scaled.masked_fill(mask, -math.inf)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Once for all numbers of rows: a row's last chunk is shorter."""
    return torch.compile(function, dynamic=True, fullgraph=True)

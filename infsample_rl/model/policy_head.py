"""The model's head as engine, learner and reference all use it: which ids it may name, and how exactly logits are
computed.

Shape letters: R rows (tokens), V vocabulary of the head, E hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of the head that exist as float32 at a time: on the CPU a slice that stays in the cache, on CUDA 256 MB.
_SLICE_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}


@contextlib.contextmanager
def sliced_as_on(device_type: str) -> Iterator[None]:
    """Let heads on the meta device be taken in the slices that they have on this one: cpu or cuda."""
    _SLICE_ELEMENTS["meta"] = _SLICE_ELEMENTS[device_type]
    try:
        yield
    finally:
        del _SLICE_ELEMENTS["meta"]


def masked_index(bad_token_ids: Sequence[int], valid_vocab: int, device: torch.device | str) -> Tensor | None:
    """The ids that logits are set to -inf at, as an int64 index for `index_fill_`; None for none.

    ValueError for an id outside the tokenizer's 0 to valid_vocab - 1, and when no id is left.
    """
    ids = sorted(set(bad_token_ids))
    if ids and not 0 <= ids[0] <= ids[-1] < valid_vocab:
        outside = [token for token in ids if not 0 <= token < valid_vocab]
        raise ValueError(f"rollout.bad_token_ids must be ids of the tokenizer, 0 to {valid_vocab - 1}, got {outside}")
    if len(ids) == valid_vocab:
        raise ValueError(
            f"rollout.bad_token_ids must leave an id to sample, got all {valid_vocab} of the tokenizer; take out at "
            "least one"
        )
    return torch.tensor(ids, dtype=torch.int64, device=device) if ids else None


def head_logits(hidden: Tensor, weight: Tensor, *, fp32: bool) -> Tensor:
    """Logits [R, V] of hidden [R, E] and the head's weight [V, E], in the weight's dtype or, with `fp32`, in float32.

    With `fp32` they are hidden.float() @ weight.float().T: products of 16-bit numbers are exact in float32, the sum and
    the result are not rounded to 16 bits. No float32 copy of the whole weight is made, here or in head_backward, whose
    gradients it is for. float64 stays.
    """
    if not fp32 or weight.dtype in (torch.float32, torch.float64):
        return F.linear(hidden, weight)
    if weight.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    hidden, logits = hidden.float(), hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
    for part in _slices(weight):
        logits[:, part] = hidden @ weight[part].float().T
    return logits


def head_backward(gradient: Tensor, hidden: Tensor, weight: Tensor, of_weight: Tensor | None, *, fp32: bool) -> Tensor:
    """Hidden's gradient [R, E] from that of `head_logits` [R, V], which may be wider than the weight; the weight's is
    added to `of_weight`.

    That may be float32 beside a weight of 16 bits.
    """
    if not fp32 or weight.dtype in (torch.float32, torch.float64):
        gradient = gradient.to(weight.dtype)
        if of_weight is not None and of_weight.dtype == weight.dtype:
            of_weight.addmm_(gradient.T, hidden)
        elif of_weight is not None:
            for part in _slices(weight):
                of_weight[part] += gradient[:, part].T @ hidden
        return gradient @ weight
    of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
    for part in _slices(weight):
        of_hidden.addmm_(gradient[:, part], weight[part].float())
        if of_weight is not None:
            of_weight[part] += gradient[:, part].T @ hidden.float()
    return of_hidden.to(hidden.dtype)


def _slices(weight: Tensor) -> list[slice]:
    rows = max(1, _SLICE_ELEMENTS[weight.device.type] // weight.shape[1])
    return [slice(start, start + rows) for start in range(0, len(weight), rows)]

"""The weights of a decoder layer as the fused kernels take them: what lies before its attention, and what behind."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from infsample_rl.types import MaybeNone


class AttentionIn(NamedTuple):
    """What leads from hidden states to query, keys and values."""

    norm: Tensor
    weight: Tensor  # query, key and value in one
    bias: Tensor | None
    query_norm: Tensor | None  # Qwen3's
    key_norm: Tensor | MaybeNone
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float


class AttentionOut(NamedTuple):
    """What leads from attention's output to the layer's."""

    out: Tensor
    out_bias: Tensor | None
    norm: Tensor
    gate_up: Tensor  # both in one
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    epsilon: float

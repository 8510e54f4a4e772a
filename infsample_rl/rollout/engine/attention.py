"""Two-part attention behind transformers' attention interface: the step arrives as the model call's keyword `pool`.

A decode query attends to its prompt's KV, stored once and read once for all rows of the prompt, and to its own response
KV; the parts are merged by log-sum-exp. Rows and the query heads of one kv head fold into one block of queries, so
grouped heads are never expanded. Letters: R rows, H kv heads, N query heads per kv head, D head size, T new tokens, K
keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from infsample_rl.rollout.engine.kv_cache import PagedKV
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.kernels.cpu_kernels import Kernels
from infsample_rl.types import MaybeNone

NAME = "infsample_pool"


class AttentionIn(NamedTuple):
    """What leads from hidden states to query, keys and values."""

    norm: Tensor
    weights: tuple[Tensor, ...]  # of query, key and value; or one of all three
    biases: tuple[Tensor | None, ...]
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
    gate_up: tuple[Tensor, ...]  # two, or one of both
    gate_up_biases: tuple[Tensor | None, ...]
    down: Tensor
    down_bias: Tensor | None
    epsilon: float


class Step(Protocol):
    """What runs a layer's attention over the pool: one of these, or a TritonStep."""

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """query [T, H N, D], keys and values [T, H, D] of T new tokens -> [T, H N, D]."""


@dataclass(slots=True)
class ExtendStep:
    """Consecutive tokens of one sequence: a prompt, a part of a long one, or the tokens of a preempted sample again."""

    kv: PagedKV
    # (pages, tokens) that every new token sees: the prompt, earlier tokens of the sequence
    past: list[tuple[Tensor, int]]
    token_index: Tensor  # [T], where the new tokens' KV goes

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """As Step's."""
        self.kv.write_run(layer, self.token_index, keys, values)
        query, keys, values = (part.transpose(0, 1)[None] for part in (query, keys, values))
        out, lse = attention_with_lse(query, keys, values, scaling, causal=True)
        for pages, num_tokens in self.past:
            past_keys, past_values = (
                part[:, :num_tokens].transpose(1, 2) for part in self.kv.gather(layer, pages[None])
            )
            out, lse = merge(out, lse, *attention_with_lse(query, past_keys, past_values, scaling))
        return out[0].transpose(0, 1)


@dataclass(slots=True)
class GatherStep:
    """One token of R rows in plain torch: one layer's pages are gathered into a dense copy, for any device."""

    kv: PagedKV
    write_index: Tensor  # [R]
    pages: Tensor  # [R, n], as many as the longest row has
    mask: Tensor | None  # [R, 1, 1, n S] added to the scores; None: every row sees all
    prompts: list[tuple[Tensor, int, Tensor | None]]  # (pages [1, n], tokens, rows; None: all)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """As Step's."""
        self.kv.write(layer, self.write_index, keys, values)
        num_rows, num_heads, head_dim = query.shape
        query = query.reshape(num_rows, keys.shape[1], -1, head_dim)
        own_keys, own_values = (part.transpose(1, 2) for part in self.kv.gather(layer, self.pages))
        own = attention_with_lse(query, own_keys, own_values, scaling, mask=self.mask)
        out, _ = merge(*own, *self._attend_prompts(layer, query, scaling))
        return out.reshape(num_rows, num_heads, head_dim)

    def _attend_prompts(self, layer: int, query: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """query [R, H, N, D] -> output [R, H, N, D] and log-sum-exp [R, H, N] over each row's own prompt."""
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        for pages, num_tokens, rows in self.prompts:
            keys, values = (part[:, :num_tokens].transpose(1, 2) for part in self.kv.gather(layer, pages))
            if rows is None:
                return _attend_folded(query, keys, values, scaling)
            out[rows], lse[rows] = _attend_folded(query[rows], keys, values, scaling)
        return out, lse


@dataclass(slots=True)
class CPUKernelStep:
    """One token of R rows through the compiled CPU kernel, which reads float32 pages where they lie."""

    kv: PagedKV
    write_index: Tensor  # [R]
    batch: RowBatch
    num_rows: int
    kernels: Kernels

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """As Step's."""
        self.kv.write(layer, self.write_index, keys, values)
        batch, num_rows = self.batch, self.num_rows
        return self.kernels.paged_attention(
            query.contiguous(),
            self.kv.layers[2 * layer],
            self.kv.layers[2 * layer + 1],
            batch.tables[:num_rows],
            batch.lengths[:num_rows],
            batch.prompt_tables[: len(batch.groups)],
            batch.prompt_lengths[: len(batch.groups)],
            batch.prompt_of_row[:num_rows],
            scaling,
        )


def _attend_folded(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """query [R, H, N, D] as one block of R N queries per kv head against keys [1, H, K, D], which are thus read
    once."""
    num_rows, num_kv_heads, group, head_dim = query.shape
    folded = query.transpose(0, 1).reshape(1, num_kv_heads, num_rows * group, head_dim)
    out, lse = attention_with_lse(folded, keys, values, scaling)
    return out.view(num_kv_heads, num_rows, group, head_dim).transpose(0, 1), lse.reshape(
        num_kv_heads, num_rows, group
    ).transpose(0, 1)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from the outputs [..., D] and log-sum-exps [...] over each."""
    # the other's share of the softmax, exp(other_lse) / (exp(lse) + exp(other_lse)); float64 because float32's
    # exponential rounds differently in a vector and in its tail, so that a row's place would show
    share = torch.sigmoid((other_lse - lse).double()).float().unsqueeze(-1)
    return torch.lerp(out.float(), other.float(), share).to(out.dtype), torch.logaddexp(lse, other_lse)


def attention_with_lse(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, *, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores, softmax in float32.

    query [B, H N, Q, D], keys and values [B, H, K, D], mask broadcastable to [B, H N, Q, K] -> [B, H N, Q, D], [B, H N,
    Q] float32.
    """
    if query.device.type == "cpu":  # one fused call; its log-sum-exp comes transposed in memory
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, causal, attn_mask=mask, scale=scaling
        )
    # flash attention takes no mask and no float32
    if query.dtype != torch.float32 and mask is None and query.shape[-1] <= 256:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, causal, False, scale=scaling
        )
        return out, lse
    return plain_attention_with_lse(query, keys, values, scaling, mask=mask, causal=causal)


def plain_attention_with_lse(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, *, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """`attention_with_lse` in plain matrix products, for any device; the heads of a group fold into the queries of
    their kv head."""
    batch, num_heads, num_queries, head_dim = query.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    group = num_heads // num_kv_heads
    flat_query = query.reshape(batch * num_kv_heads, group * num_queries, head_dim)
    flat_keys, flat_values = keys.reshape(-1, num_keys, head_dim), values.reshape(-1, num_keys, head_dim)
    if query.dtype == torch.float32:
        scores = torch.bmm(flat_query, flat_keys.transpose(1, 2))
    else:  # scores rounded to bfloat16 would cost more than the whole softmax gains
        scores = torch.bmm(flat_query, flat_keys.transpose(1, 2), out_dtype=torch.float32)
    scores = scores.view(batch, num_heads, num_queries, num_keys) * scaling
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(
            torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).triu(1), float("-inf")
        )
    lse = torch.logsumexp(scores, dim=-1)
    weights = (
        torch.exp(scores - lse.unsqueeze(-1)).to(values.dtype).view(batch * num_kv_heads, group * num_queries, num_keys)
    )
    return torch.bmm(weights, flat_values).view(query.shape), lse


def pool_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    pool: Step,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: hands the layer's query, key and value [B, heads, T, D] to the step in `pool`.
    ValueError for attention sinks."""
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} has attention sinks, which are not supported; take e.g. Qwen3")
    size = (query.shape[0], query.shape[2])
    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    return pool.attend(module.layer_idx, query, key, value, scaling).unflatten(0, size), None


AttentionInterface.register(NAME, pool_attention)

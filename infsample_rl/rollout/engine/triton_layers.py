"""One decode step on CUDA in Triton: attention over pages where they lie, and, for up to 64 rows of Llama, Qwen2 and
Qwen3, the whole decoder layers: six kernels a layer, each launched before the last has ended.

The kernels are attention's input (norm, product, head norms, rotation, KV write), its parts, their merge, its output,
gate and up, down. The file needs Triton, so it is imported only where a step is to run on it. Letters: R rows, E hidden
size, D head size, K inputs of a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from infsample_rl.rollout.engine.attention import AttentionIn, AttentionOut
from infsample_rl.rollout.engine.kv_cache import PagedKV
from infsample_rl.rollout.engine.product_plans import HIDDEN_TILE, plans
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.kernels.paged_attention import STORED_DTYPES, Workspace, paged_attention, write_tokens
from infsample_rl.rollout.kernels.triton_linear import (
    _embed_kernel,
    _gated_kernel,
    _heads_kernel,
    _hidden_kernel,
    _norm_kernel,
)

MAX_ROWS = 64


@dataclass
class TritonStep:
    """One token of R rows through the Triton kernels: fixed shapes, lengths read on the device, fit for a CUDA
    graph."""

    kv: PagedKV
    batch: RowBatch
    num_rows: int
    workspace: Workspace

    @cached_property
    def positions(self) -> Tensor:
        """[R], of the newest tokens in their responses, >= 0."""
        return self.batch.positions[: self.num_rows].clamp(min=0)

    @cached_property
    def write_index(self) -> Tensor:
        """[R], for pages that PagedKV must write itself."""
        return self.kv.token_index(self.batch.tables[: self.num_rows].long(), self.positions[:, None])[:, 0]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """As attention.Step's, T = R."""
        kv = self.kv
        if not kv.is_quantised:
            own_keys, own_values = kv.layers[2 * layer : 2 * layer + 2]
            write_tokens(keys, values, own_keys, own_values, self.batch.tables, self.positions)
        else:
            kv.write(layer, self.write_index, keys, values)
        return self.attend_written(layer, query.contiguous(), scaling)

    def attend_written(self, layer: int, query: Tensor, scaling: float, *, early: bool = False) -> Tensor:
        """query [R, H N, D] -> [R, H N, D], over pages that hold the newest tokens. `early`: with programmatic
        dependent launch (sm_90)."""
        batch, (keys, values) = self.batch, self.kv.layers[2 * layer : 2 * layer + 2]
        return paged_attention(
            query,
            keys,
            values,
            batch.tables,
            batch.lengths,
            batch.prompt_tables,
            batch.prompt_lengths,
            batch.prompt_row_starts,
            scaling,
            workspace=self.workspace,
            key_scales=self.kv.key_scales[layer] if self.kv.is_quantised else None,
            value_scales=self.kv.value_scales[layer] if self.kv.is_quantised else None,
            early=early,
        )


class TritonLayers:
    """The layers whose weights are `ins` and `outs`. Hidden states [R, E] stay in one buffer, beside their sums of
    squares by tile."""

    def __init__(
        self,
        model: Any,
        ins: list[AttentionIn],
        outs: list[AttentionOut],
        scalings: list[float],
        *,
        in_blocks: bool = False,
    ) -> None:
        """The weights are such that `takes_weights`. `in_blocks`: more than MAX_ROWS rows too, so many at a time."""
        self.model, self.ins, self.outs, self.scalings, self.in_blocks = model, ins, outs, scalings, in_blocks
        device, one, other = ins[0].weights[0].device, ins[0], outs[0]
        is_cuda = device.type == "cuda"
        self.early = is_cuda  # the interpreter has no programmatic dependent launch
        num = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 4
        self.tiles = one.weights[0].shape[1] // HIDDEN_TILE  # of hidden states
        self.plans = plans(one, other, num)
        most = max(plan.num_partials for plan in self.plans.values())
        self.partials = torch.empty(MAX_ROWS * most, dtype=torch.float32, device=device)
        num_tiles = max(plan.num_tiles for plan in self.plans.values())
        self.counters = torch.zeros(num_tiles, dtype=torch.int32, device=device)
        # the interpreter has no other dot
        self.product = tl.float32 if triton.knobs.runtime.interpret else STORED_DTYPES[one.weights[0].dtype]
        self.square_sizes = {"SQUARE_PARTS": self.tiles, "SQUARE_PAD": triton.next_power_of_2(self.tiles)}
        self._angles: list[tuple[Tensor, Tensor]] = []  # the last is the longest; captured steps may read the others

    def takes(self, step: object) -> TypeGuard[TritonStep]:
        """Whether the layers can run a step."""
        return isinstance(step, TritonStep) and (step.num_rows <= MAX_ROWS or self.in_blocks)

    def angles(self, batch: RowBatch, page_size: int) -> tuple[Tensor, Tensor]:
        """cos and sin [places, D] of every place that a batch's tables can hold, by the model's own module."""
        places = (batch.prompt_tables.shape[1] + batch.tables.shape[1]) * page_size
        if not self._angles or len(self._angles[-1][0]) < places:
            table = self.model.embed_tokens.weight
            parts = self.model.rotary_emb(table[:1, None], torch.arange(places, device=table.device)[None])
            self._angles.append((parts[0][0].contiguous(), parts[1][0].contiguous()))
        return self._angles[-1]

    def __call__(self, step: TritonStep) -> Tensor:
        """Last hidden states [R, E], normed, of the newest tokens of a step's rows."""
        table = self.model.embed_tokens.weight
        num_rows, size, tokens = step.num_rows, table.shape[1], step.batch.tokens
        cos, sin = self.angles(step.batch, step.kv.page_size)
        hidden = torch.empty(num_rows, size, dtype=table.dtype, device=table.device)
        squares = torch.empty(num_rows, self.tiles, dtype=torch.float32, device=table.device)
        _embed_kernel[(num_rows, self.tiles)](tokens, table, hidden, squares, E=size, TILE=HIDDEN_TILE)
        blocks = [slice(start, start + MAX_ROWS) for start in range(0, num_rows, MAX_ROWS)]
        for index, (into, out) in enumerate(zip(self.ins, self.outs, strict=True)):
            query = _whole(
                [self.project(into, hidden[rows], squares[rows], cos, sin, step, index, rows) for rows in blocks]
            )
            attended = step.attend_written(index, query, self.scalings[index], early=self.early)
            for rows in blocks:
                self.add_product("out", attended[rows], out.out, out.out_bias, hidden[rows], squares[rows])
                gated = self.gate(out, hidden[rows], squares[rows])
                self.add_product("down", gated, out.down, out.down_bias, hidden[rows], squares[rows])
        normed = torch.empty_like(hidden)
        _norm_kernel[(num_rows, self.tiles)](
            hidden, squares, self.model.norm.weight, normed, self.ins[0].epsilon,
            E=size, TILE=HIDDEN_TILE, **self.square_sizes, EARLY=self.early, launch_pdl=self.early,
        )  # fmt: skip
        return normed

    def project(
        self,
        weights: AttentionIn,
        hidden: Tensor,
        squares: Tensor,
        cos: Tensor,
        sin: Tensor,
        step: TritonStep,
        layer: int,
        rows: slice,
    ) -> Tensor:
        """hidden [R, E] of some `rows` of the step -> query [R, heads, D], rotated by cos and sin [places, D]; keys and
        values are written to the layer's pages."""
        num_rows, kv, plan = len(hidden), step.kv, self.plans["heads"]
        shape = (num_rows, weights.num_kv_heads, weights.head_dim)
        query = torch.empty(num_rows, weights.num_heads, weights.head_dim, dtype=hidden.dtype, device=hidden.device)
        is_direct = not kv.is_quantised
        keys, values = (
            kv.layers[2 * layer : 2 * layer + 2] if is_direct else (hidden.new_empty(shape) for _ in range(2))
        )
        batch = step.batch
        tables, positions, starts = batch.tables[rows], batch.positions[rows], batch.starts[rows]
        _heads_kernel[(plan.num_tiles * plan.splits,)](
            hidden, squares, weights.norm, weights.weights[0], weights.biases[0], weights.query_norm,
            weights.key_norm, cos, sin, query, keys, values,
            tables, positions, starts, tables.stride(0),
            self.partials, self.counters, num_rows, weights.epsilon,
            HEADS=weights.num_heads, KV_HEADS=weights.num_kv_heads, PAGE=kv.page_size if is_direct else 0,
            **self.square_sizes,
            **plan.sizes(num_rows, early=self.early, product=self.product),
        )  # fmt: skip
        if not is_direct:
            kv.write(layer, step.write_index[rows], keys, values)
        return query

    def gate(self, weights: AttentionOut, hidden: Tensor, squares: Tensor) -> Tensor:
        """hidden [R, E] -> silu(gate) * up of its norm [R, intermediate size]."""
        num_rows, plan = len(hidden), self.plans["gated"]
        out = torch.empty(num_rows, weights.down.shape[1], dtype=hidden.dtype, device=hidden.device)
        _gated_kernel[(plan.num_tiles * plan.splits,)](
            hidden, squares, weights.norm, weights.gate_up[0], weights.gate_up_biases[0], out, self.partials,
            self.counters, num_rows, weights.epsilon,
            N=out.shape[1], **self.square_sizes, **plan.sizes(num_rows, early=self.early, product=self.product),
        )  # fmt: skip
        return out

    def add_product(
        self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor, squares: Tensor
    ) -> None:
        """hidden [R, E] += x @ weight.T + bias, and its sums of squares anew. `name`: out or down."""
        num_rows, plan = len(hidden), self.plans[name]
        _hidden_kernel[(plan.num_tiles * plan.splits,)](
            x, weight, bias, hidden, squares, self.partials, self.counters, num_rows,
            N=hidden.shape[1], **plan.sizes(num_rows, early=self.early, product=self.product),
        )  # fmt: skip


def _whole(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def takes_weights(into: AttentionIn, out: AttentionOut) -> bool:
    """Whether the kernels can run layers of these weights."""
    weight, head_dim = into.weights[0], into.head_dim
    # GPUs of other compute capabilities have too little shared memory
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] not in (9, 10):
        return False
    tensors = [tensor for tensor in (*into, *out) if isinstance(tensor, Tensor)]
    return (
        weight.dtype in (torch.bfloat16, torch.float16)
        and head_dim in (32, 64, 128, 256)
        and not any(size % 64 for size in (weight.shape[1], out.down.shape[1], out.out.shape[1]))
        and all(tensor.is_contiguous() for tensor in tensors)
    )

"""One decode step's attention on CUDA: writes the new tokens' KV where it belongs, then attends to pages where they
lie.

Needs Triton, so it is imported only where a step is to run on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from infsample_rl.rollout.engine.kv_cache import PagedKV
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.kernels.attention_triton import Workspace, launch_attention, paged_attention


@triton.jit(do_not_specialize=["table_stride", "key_stride", "value_stride"])
def _write_kernel(
    keys, values, key_pages, value_pages, tables, positions, table_stride, key_stride, value_stride,
    SIZE: tl.constexpr, PAGE: tl.constexpr, SIZE_PAD: tl.constexpr,
):  # fmt: skip
    """Program (row): copy its SIZE = H D numbers of keys and of values to its newest token's place."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    page = tl.load(tables + row * table_stride + position // PAGE).to(tl.int64)
    to = (page * PAGE + position % PAGE) * SIZE
    index = tl.arange(0, SIZE_PAD)
    stored = index < SIZE
    tl.store(key_pages + to + index, tl.load(keys + row * key_stride + index, mask=stored), mask=stored)
    tl.store(value_pages + to + index, tl.load(values + row * value_stride + index, mask=stored), mask=stored)


def write_tokens(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Write keys and values [R, H, D] to token `positions` [R] of the rows whose pages [G, S, H, D] are `tables` [R,
    n], in one launch.

    A row's H D numbers must lie in order; rows may lie apart, as in one product of query, key and value.
    """
    num_rows, num_heads, head_dim = keys.shape
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.stride()[1:] != (head_dim, 1):
            raise ValueError(f"{name} must have strides (any, {head_dim}, 1), got {tensor.stride()}; call contiguous()")
    _write_kernel[(num_rows,)](
        keys, values, key_pages, value_pages, tables, positions, tables.stride(0), keys.stride(0), values.stride(0),
        SIZE=num_heads * head_dim, PAGE=key_pages.shape[1], SIZE_PAD=triton.next_power_of_2(num_heads * head_dim),
        num_warps=4,
    )  # fmt: skip


@dataclass(slots=True)
class TritonStep:
    """One token of R rows through the Triton kernels: fixed shapes, lengths read on the device, fit for a CUDA
    graph."""

    kv: PagedKV
    batch: RowBatch
    num_rows: int
    positions: torch.Tensor  # [R], of the newest tokens in their responses, >= 0
    write_index: torch.Tensor  # [R], for pages that PagedKV must write itself
    workspace: Workspace

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """query [R, H N, 1, D], keys and values [R, H, 1, D] -> [R, 1, H N, D]."""
        batch, kv = self.batch, self.kv
        keys, values, tables = keys[:, :, 0], values[:, :, 0], batch.tables[: self.num_rows]
        scales = (None, None)
        if kv.scales is None:
            write_tokens(keys, values, kv.layers[2 * layer], kv.layers[2 * layer + 1], tables, self.positions)
        else:
            kv.write(layer, self.write_index, keys, values)
            scales = (kv.scales[2 * layer], kv.scales[2 * layer + 1])
        return paged_attention(
            query[:, :, 0].contiguous(),
            kv.layers[2 * layer],
            kv.layers[2 * layer + 1],
            tables,
            batch.lengths[: self.num_rows],
            batch.prompt_tables,
            batch.prompt_lengths,
            batch.prompt_row_starts,
            scaling,
            workspace=self.workspace,
            row_order=batch.row_order[: self.num_rows],
            key_scales=scales[0],
            value_scales=scales[1],
        )[:, None]

    def attend_written(self, layer: int, query: torch.Tensor, scaling: float, *, early: bool) -> torch.Tensor:
        """query [R, H N, D] -> [R, H N, D], over pages that hold the newest tokens. `early`: with programmatic
        dependent launch (sm_90)."""
        batch, (keys, values) = self.batch, self.kv.layers[2 * layer : 2 * layer + 2]
        scales = (None, None) if self.kv.scales is None else self.kv.scales[2 * layer : 2 * layer + 2]
        of_prompts = (batch.prompt_tables, batch.prompt_lengths, batch.prompt_row_starts)
        places = (batch.tables, batch.lengths, *of_prompts, batch.row_order)
        out = torch.empty_like(query)
        launch_attention(query, keys, values, scales, places, scaling, self.workspace, out, early=early)
        return out

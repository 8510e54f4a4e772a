"""One decode step's attention on CUDA: writes the new tokens' KV where it belongs, then attends to pages where they lie.

Needs Triton, so it is imported only where a step is to run on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from infsample_rl.rollout.attention_triton import LOG2_E, Workspace, _attend, _blocks_per_split, _prompt_queries, _sizes, paged_attention
from infsample_rl.rollout.kv_cache import PagedKV
from infsample_rl.rollout.row_batch import RowBatch
from infsample_rl.rollout.triton_linear import let_next_start, wait_for_inputs


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
    keys: torch.Tensor, values: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, tables: torch.Tensor, positions: torch.Tensor
) -> None:
    """Write keys and values [R, H, D] to token `positions` [R] of the rows whose pages [G, S, H, D] are `tables` [R, n], in one launch.

    A row's H D numbers must lie in order; rows may lie apart, as in one product of query, key and value.
    """
    num_rows, num_heads, head_dim = keys.shape
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.stride()[1:] != (head_dim, 1):
            raise ValueError(f"{name} must have strides (any, {head_dim}, 1), got {tensor.stride()}; call contiguous()")
    _write_kernel[(num_rows,)](
        keys, values, key_pages, value_pages, tables, positions, tables.stride(0), keys.stride(0), values.stride(0),
        SIZE=num_heads * head_dim, PAGE=key_pages.shape[1], SIZE_PAD=triton.next_power_of_2(num_heads * head_dim), num_warps=4,
    )  # fmt: skip


@triton.jit
def _prefetch(pages, table, length, split, head, H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr):
    """Have L2 fetch the first block of a split's keys or values."""
    BYTES: tl.constexpr = D * pages.dtype.element_ty.primitive_bitwidth // 8
    _, per_split = _blocks_per_split(length, SPLITS, BLOCK_N)
    tokens = split * per_split * BLOCK_N + tl.arange(0, BLOCK_N)
    page = tl.load(table + tokens // PAGE, mask=tokens < length, other=0).to(tl.int64)
    at = pages + ((page * PAGE + tokens % PAGE) * H + head) * D
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at.to(tl.int64), BYTES], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_prompts", "num_blocks", "row_stride", "prompt_stride"])
def _early_parts_kernel(
    queries, keys, values, key_scales, value_scales, row_tables, row_lengths, prompt_tables, prompt_lengths, starts, row_order, outputs, lses,
    num_rows, num_prompts, num_blocks, row_stride, prompt_stride, score_scale,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PROMPT_M: tl.constexpr, OWN_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D_PAD: tl.constexpr, P_PAD: tl.constexpr, PROMPT_SPLITS: tl.constexpr, OWN_SPLITS: tl.constexpr,
    QUANTISED: tl.constexpr, PRODUCT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """attention_triton's parts; lengths, tables and rows' order, which no kernel of a layer writes, are read before the kernels ahead are done."""
    let_next_start(EARLY)
    pid = tl.program_id(0)
    head = pid % H
    part_stride = num_rows.to(tl.int64) * (H * N)
    num_prompt_programs = num_blocks * H * PROMPT_SPLITS
    if pid < num_prompt_programs:
        split, block = pid // H % PROMPT_SPLITS, pid // (H * PROMPT_SPLITS)
        prompt, slot, live = _prompt_queries(block, starts, row_order, num_prompts, head, H, N, PROMPT_M, P_PAD, True)
        length = tl.load(prompt_lengths + prompt, mask=prompt < num_prompts, other=0)
        table = prompt_tables + prompt.to(tl.int64) * prompt_stride
        if EARLY:
            if length > 0:
                _prefetch(keys, table, length, split, head, H, D, PAGE, BLOCK_N, PROMPT_SPLITS)
                _prefetch(values, table, length, split, head, H, D, PAGE, BLOCK_N, PROMPT_SPLITS)
        wait_for_inputs(EARLY)
        _attend(
            queries, keys, values, key_scales, value_scales, outputs, lses, slot, live, part_stride, split, table, length, split, head, score_scale,
            H, D, PAGE, PROMPT_M, BLOCK_N, D_PAD, PROMPT_SPLITS, QUANTISED, PRODUCT,
        )  # fmt: skip
    else:
        own = pid - num_prompt_programs
        split, row = own // H % OWN_SPLITS, own // (H * OWN_SPLITS)
        within = tl.arange(0, OWN_M)
        length = tl.load(row_lengths + row)
        table = row_tables + row.to(tl.int64) * row_stride
        if EARLY:
            _prefetch(keys, table, length, split, head, H, D, PAGE, BLOCK_N, OWN_SPLITS)
            _prefetch(values, table, length, split, head, H, D, PAGE, BLOCK_N, OWN_SPLITS)
        wait_for_inputs(EARLY)
        _attend(
            queries, keys, values, key_scales, value_scales, outputs, lses, (row.to(tl.int64) * H + head) * N + within, within < N,
            part_stride, PROMPT_SPLITS + split, table, length, split, head, score_scale,
            H, D, PAGE, OWN_M, BLOCK_N, D_PAD, OWN_SPLITS, QUANTISED, PRODUCT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_prompts"])
def _early_merge_kernel(
    outputs, lses, row_lengths, prompt_lengths, starts, row_order, merged, num_rows, num_prompts,
    NUM_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, P_PAD: tl.constexpr,
    PROMPT_SPLITS: tl.constexpr, OWN_SPLITS: tl.constexpr, PARTS_PAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """attention_triton's merge, which finds out what parts there are before they are done."""
    let_next_start(EARLY)
    place, head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, P_PAD)
    ends = tl.load(starts + 1 + index, mask=index < num_prompts, other=2147483647)
    prompt = tl.sum((ends <= place).to(tl.int32), axis=0)  # num_prompts behind the last prompt's rows
    row = tl.load(row_order + place)
    prompt_length = tl.load(prompt_lengths + prompt, mask=prompt < num_prompts, other=0)
    prompt_blocks, per_prompt_split = _blocks_per_split(prompt_length, PROMPT_SPLITS, BLOCK_N)
    own_blocks, per_own_split = _blocks_per_split(tl.load(row_lengths + row), OWN_SPLITS, BLOCK_N)
    part = tl.arange(0, PARTS_PAD)
    of_prompt = (part < PROMPT_SPLITS) & (part * per_prompt_split < prompt_blocks)
    of_row = (part >= PROMPT_SPLITS) & (part < PROMPT_SPLITS + OWN_SPLITS) & ((part - PROMPT_SPLITS) * per_own_split < own_blocks)
    live = of_prompt | of_row  # what other parts hold is left over from earlier calls
    slot = (part.to(tl.int64) * num_rows + row) * NUM_HEADS + head
    dims = tl.arange(0, D_PAD)
    wait_for_inputs(EARLY)
    lse = tl.load(lses + slot, mask=live, other=float("-inf"))
    parts = tl.load(outputs + slot[:, None] * D + dims[None, :], mask=live[:, None] & (dims < D)[None, :], other=0.0)
    share = tl.exp2(lse - tl.maximum(tl.max(lse, axis=0), -3.0e38))  # -inf minus -inf would be NaN
    result = tl.sum(parts * (share / tl.maximum(tl.sum(share, axis=0), 1.0e-30))[:, None], axis=0)
    at = (row.to(tl.int64) * NUM_HEADS + head) * D + dims
    tl.store(merged + at, result.to(merged.dtype.element_ty), mask=dims < D)


@dataclass(slots=True)
class TritonStep:
    """One token of R rows through the Triton kernels: fixed shapes, lengths read on the device, fit for a CUDA graph."""

    kv: PagedKV
    batch: RowBatch
    num_rows: int
    positions: torch.Tensor  # [R], of the newest tokens in their responses, >= 0
    write_index: torch.Tensor  # [R], for pages that PagedKV must write itself
    workspace: Workspace

    def attend(self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
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
        """query [R, H N, D] -> [R, H N, D], over pages that hold the newest tokens. `early`: with programmatic dependent launch (sm_90)."""
        batch, work = self.batch, self.workspace
        keys, values = self.kv.layers[2 * layer : 2 * layer + 2]
        scales = (None, None) if self.kv.scales is None else self.kv.scales[2 * layer : 2 * layer + 2]
        num_rows, num_heads, num_prompts = *query.shape[:2], batch.prompt_tables.shape[0]
        both, parts, num_blocks = _sizes(query, keys, num_prompts, work)
        num_programs = parts["H"] * (num_blocks * both["PROMPT_SPLITS"] + num_rows * both["OWN_SPLITS"])
        of_prompts = (batch.prompt_lengths, batch.prompt_row_starts, batch.row_order)
        strides = (batch.tables.stride(0), batch.prompt_tables.stride(0))
        both["EARLY"] = early
        _early_parts_kernel[(num_programs,)](
            query, keys, values, *scales, batch.tables, batch.lengths, batch.prompt_tables, *of_prompts, work.outputs, work.lses,
            num_rows, num_prompts, num_blocks, *strides, scaling * LOG2_E,
            QUANTISED=self.kv.scales is not None, **parts, **both, num_warps=4, num_stages=3, launch_pdl=early,
        )  # fmt: skip
        out = torch.empty_like(query)
        _early_merge_kernel[(num_rows, num_heads)](
            work.outputs, work.lses, batch.lengths, *of_prompts, out, num_rows, num_prompts, NUM_HEADS=num_heads, **both,
            PARTS_PAD=triton.next_power_of_2(both["PROMPT_SPLITS"] + both["OWN_SPLITS"]), num_warps=4, launch_pdl=early,
        )  # fmt: skip
        return out

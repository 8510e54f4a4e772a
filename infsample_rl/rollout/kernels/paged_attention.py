"""Two-part attention over paged KV on CUDA, and the newest tokens' KV into the pages: launches fit for a CUDA graph.

The grids depend on shapes alone, and what a table is divided into on its tokens alone: so a row has the same bits
whatever is beside it. Letters: R rows, P prompt places, H kv heads, N query heads per kv head, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infsample_rl.rollout.kernels.attention_triton import _merge_kernel, _parts_kernel

# Small blocks: as many programs as can be on a multiprocessor at once matter more than how much each does, and a prompt
# is read, from L2, by every 16 queries (rows x N).
BLOCK_KEYS = 32  # of one inner iteration, over several pages
BLOCK_BYTES = 16384  # of keys at most: with more, registers spill (seen in ptxas for sm_80 and sm_90)
BYTES_PER_WARP = 4096  # of a block's keys: with more, two warps spill float32, and heads of 256 (ptxas)
SPLITS = 8  # of one table's tokens; what they leave is 1 / 16 of what 1,000 tokens of 4 query heads read
STORED_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
LOG2_E = 1.4426950408889634


class Workspace:
    """Parts of one call at a time, allocated once: float32 outputs [parts, R, H N, D] and log-sum-exps, flat, for any R
    up to `max_rows`."""

    def __init__(self, max_rows: int, num_query_heads: int, head_dim: int, device: torch.device | str) -> None:
        size = max_rows * 2 * SPLITS * num_query_heads
        self.outputs = torch.empty(size * head_dim, dtype=torch.float32, device=device)
        self.lses = torch.empty(size, dtype=torch.float32, device=device)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    row_tables: Tensor,
    row_lengths: Tensor,
    prompt_tables: Tensor,
    prompt_lengths: Tensor,
    prompt_row_starts: Tensor,
    scaling: float,
    *,
    workspace: Workspace,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Attention of one query per row over its prompt's tokens and its own: query [R, H N, D] -> [R, H N, D], softmax in
    float32.

    keys, values [pages, page size, H, D]: as query, or int8 with bfloat16 key_scales [pages, H, D] and value_scales
    [pages, page size, H]; a page size is a power of two >= 8. Tables int32 of page numbers [R or more, any], [P,
    any]; lengths int32 [R or more], [P] in tokens, 0 for an unused place. The rows of prompt p are starts[p] to
    starts[p + 1] - 1; those behind starts[P] have no prompt. `early`: with programmatic dependent launch (sm_90). All
    tensors are contiguous, but for the rows of tables; nothing is checked, since the tensors of every step are the
    same.
    """
    num_rows, num_heads, num_prompts = *query.shape[:2], prompt_tables.shape[0]
    both, parts, num_blocks = _sizes(query, keys, num_prompts)
    both["EARLY"] = early
    num_programs = parts["H"] * SPLITS * (num_blocks + num_rows)
    num_warps = max(2, both["BLOCK_N"] * both["D_PAD"] * query.element_size() // BYTES_PER_WARP)
    launch = {"launch_pdl": True} if early else {}
    out = torch.empty_like(query)
    _parts_kernel[(num_programs,)](
        query, keys, values, key_scales, value_scales, row_tables, row_lengths, prompt_tables, prompt_lengths,
        prompt_row_starts,
        workspace.outputs, workspace.lses, num_rows, num_prompts, num_blocks, row_tables.stride(0),
        prompt_tables.stride(0), scaling * LOG2_E,
        QUANTISED=key_scales is not None, num_warps=num_warps, num_stages=2, **parts, **both, **launch,
    )  # fmt: skip
    _merge_kernel[(num_rows, num_heads)](
        workspace.outputs, workspace.lses, row_lengths, prompt_lengths, prompt_row_starts, out, num_rows, num_prompts,
        NUM_HEADS=num_heads, **both, num_warps=4, **launch,
    )  # fmt: skip
    return out


def _sizes(query: Tensor, keys: Tensor, num_prompts: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Compile-time sizes of both kernels, those of the parts alone, and the most blocks of queries that prompts sharing
    the rows can have."""
    num_rows, num_heads, head_dim = query.shape
    page_size, num_kv_heads = keys.shape[1:3]
    group = num_heads // num_kv_heads
    width = max(16, triton.next_power_of_2(head_dim))  # matrix products take 16 or more of everything
    keys_of_block = min(BLOCK_KEYS, max(16, BLOCK_BYTES // (width * query.element_size())))
    queries_of_block = max(16, triton.next_power_of_2(group))
    both = {"D": head_dim, "D_PAD": width, "BLOCK_N": keys_of_block, "SPLITS": SPLITS}
    both["P_PAD"] = triton.next_power_of_2(num_prompts + 15)  # few different ones, so few compilations
    parts = {"H": num_kv_heads, "N": group, "PAGE": page_size, "M": queries_of_block}
    # the interpreter cannot multiply bfloat16
    parts["PRODUCT"] = tl.float32 if triton.knobs.runtime.interpret else STORED_DTYPES[query.dtype]
    return both, parts, min(num_prompts, num_rows) - 1 + triton.cdiv(num_rows * group, queries_of_block)


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
    keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, tables: Tensor, positions: Tensor
) -> None:
    """Write keys and values [R, H, D] to token `positions` [R] of the rows whose pages [G, S, H, D] are `tables` [R,
    n], in one launch.

    Rows may lie apart, as in one product of query, key and value; heads that do are copied first.
    """
    num_rows, num_heads, head_dim = keys.shape
    keys, values = (part if part.stride()[1:] == (head_dim, 1) else part.contiguous() for part in (keys, values))
    _write_kernel[(num_rows,)](
        keys, values, key_pages, value_pages, tables, positions, tables.stride(0), keys.stride(0), values.stride(0),
        SIZE=num_heads * head_dim, PAGE=key_pages.shape[1], SIZE_PAD=triton.next_power_of_2(num_heads * head_dim),
        num_warps=4,
    )  # fmt: skip

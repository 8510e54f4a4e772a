"""The newest tokens' KV into the pages of a step's rows on CUDA, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


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

"""The matrix products of a decoder layer for up to 64 rows on CUDA, in Triton, each with all that belongs to it in one
launch.

A program multiplies the rows by a block of columns (rows of the weight) over one part of K and leaves the sums in a
workspace; the last program of a block adds the parts in fixed order and finishes: two halves of the block in registers
are the two halves of a head for the rotation, or gate and up. Two runs give the same bits. Weights are read once; they
do not depend on the kernels before, so with EARLY (sm_90, programmatic dependent launch) a program starts while those
run and loads its first PRELOADS blocks into registers. Letters: R rows, M rows padded to a power of two, K inputs, N
outputs, E hidden size, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Let the next kernel start."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait until all kernels before this one are done. A kernel must not write anything earlier."""
    if EARLY:
        gdc_wait()


@triton.jit
def _row_sums(x, M: tl.constexpr, N: tl.constexpr):
    """[M], sums of the rows of x [M, N], N a power of two: of neighbours, then of neighbouring sums, and so on. tl.sum
    over a row adds in an order of the compiler's that differs with M; over two numbers there is but one."""
    if N > 1:
        return _row_sums(tl.sum(tl.reshape(x, [M, N // 2, 2]), axis=2), M, N // 2)
    else:
        return tl.reshape(x, [M])


@triton.jit
def _row_scale(
    squares, row, live, epsilon, K: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """1 / root mean square of the rows, from partial sums of squares [R, PARTS]."""
    part = tl.arange(0, PARTS_PAD)
    sums = tl.load(
        squares + row[:, None] * PARTS + part[None, :], mask=live[:, None] & (part < PARTS)[None, :], other=0.0
    )
    return tl.rsqrt(_row_sums(sums, M, PARTS_PAD) / K + epsilon)


@triton.jit
def _inputs(x, norm, scale, row, live, inner, K: tl.constexpr, PRODUCT: tl.constexpr):
    """Columns `inner` of x [R, K], or of its RMS norm where `norm` is given."""
    part = tl.load(x + row[:, None] * K + inner[None, :], mask=live[:, None], other=0.0)
    if norm is not None:  # rounded where transformers' modules round
        normed = (part.to(tl.float32) * scale[:, None]).to(x.dtype.element_ty).to(tl.float32)
        part = (normed * tl.load(norm + inner).to(tl.float32)[None, :]).to(x.dtype.element_ty)
    return part.to(PRODUCT)


@triton.jit
def _multiply(
    x, squares, norm, weight, column, partials, counters, num_rows, epsilon,
    K: tl.constexpr, SQUARE_PARTS: tl.constexpr, SQUARE_PAD: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, PRELOADS: tl.constexpr, EARLY: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, split of K): x, or its RMS norm where `norm` is given, by rows `column` [TILE] of the
    weight.

    Adds to the block's partial sums; returns whether this was the last split of the block.
    """
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    first = split * (K // SPLITS)
    within = tl.arange(0, BLOCK_K)
    weight_rows = weight + column.to(tl.int64) * K
    let_next_start(EARLY)
    preloaded = ()
    for block in tl.static_range(PRELOADS):
        inner = first + block * BLOCK_K + within
        loaded = tl.load(weight_rows[:, None] + inner[None, :], eviction_policy="evict_first")
        preloaded = preloaded + (loaded,)  # type: ignore[assignment]  # a loop that Triton unrolls
    wait_for_inputs(EARLY)
    row = tl.arange(0, M)
    live = row < num_rows
    scale = None
    if norm is not None:
        scale = _row_scale(squares, row, live, epsilon, K, SQUARE_PARTS, SQUARE_PAD, M)
    acc = tl.zeros([M, TILE], tl.float32)
    for block in tl.static_range(PRELOADS):
        inner = first + block * BLOCK_K + within
        acc = tl.dot(_inputs(x, norm, scale, row, live, inner, K, PRODUCT), tl.trans(preloaded[block]).to(PRODUCT), acc)
    for start in range(first + PRELOADS * BLOCK_K, first + K // SPLITS, BLOCK_K):
        inner = start + within
        weights = tl.load(weight_rows[:, None] + inner[None, :], eviction_policy="evict_first")
        acc = tl.dot(_inputs(x, norm, scale, row, live, inner, K, PRODUCT), tl.trans(weights).to(PRODUCT), acc)
    at = ((tile * SPLITS + split) * M + row[:, None]) * TILE + tl.arange(0, TILE)[None, :]
    tl.store(partials + at, acc, mask=live[:, None])
    tl.debug_barrier()  # all threads' sums are stored before one of them counts
    is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(counters + tile, 0)
    return is_last


@triton.jit
def _sum(partials, tile, row, live, column, M: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """Columns of a block, all its splits added up in order: [M, columns]."""
    at = partials + (tile * SPLITS * M + row[:, None]) * TILE + column[None, :]
    total = tl.load(at, mask=live[:, None], other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * M * TILE, mask=live[:, None], other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _hidden_kernel(
    x, weight, bias, hidden, squares, partials, counters, num_rows,
    K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    PRELOADS: tl.constexpr, EARLY: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """hidden [R, N] += x [R, K] @ weight.T + bias, and the sums of squares [R, N / TILE] of what is stored."""
    tile = tl.program_id(0) // SPLITS
    is_last = _multiply(
        x, None, None, weight, tile * TILE + tl.arange(0, TILE), partials, counters, num_rows, 0.0,
        K, 1, 1, M, TILE, BLOCK_K, SPLITS, PRELOADS, EARLY, PRODUCT,
    )  # fmt: skip
    if is_last:
        row, column = tl.arange(0, M), tl.arange(0, TILE)
        live = row < num_rows
        total = _sum(partials, tile, row, live, column, M, TILE, SPLITS)
        column += tile * TILE
        if bias is not None:
            total += tl.load(bias + column).to(tl.float32)[None, :]
        at = hidden + row[:, None] * N + column[None, :]
        total += tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)
        stored = total.to(hidden.dtype.element_ty)
        tl.store(at, stored, mask=live[:, None])
        total = stored.to(tl.float32)
        tl.store(squares + row * (N // TILE) + tile, _row_sums(total * total, M, TILE), mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_kernel(
    hidden, squares, norm, weight, bias, out, partials, counters, num_rows, epsilon,
    K: tl.constexpr, N: tl.constexpr, SQUARE_PARTS: tl.constexpr, SQUARE_PAD: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, PRELOADS: tl.constexpr, EARLY: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """out [R, N] = silu(gate) * up of the normed hidden states [R, K]; the weight holds N rows of gate, then N of
    up."""
    tile = tl.program_id(0) // SPLITS
    HALF: tl.constexpr = TILE // 2
    within = tl.arange(0, TILE)
    gate_and_up = tile * HALF + within % HALF + within // HALF * N
    is_last = _multiply(
        hidden, squares, norm, weight, gate_and_up, partials, counters, num_rows, epsilon,
        K, SQUARE_PARTS, SQUARE_PAD, M, TILE, BLOCK_K, SPLITS, PRELOADS, EARLY, PRODUCT,
    )  # fmt: skip
    if is_last:
        row, column = tl.arange(0, M), tl.arange(0, HALF)
        live = row < num_rows
        gate = _sum(partials, tile, row, live, column, M, TILE, SPLITS)
        up = _sum(partials, tile, row, live, HALF + column, M, TILE, SPLITS)
        column += tile * HALF
        if bias is not None:
            gate += tl.load(bias + column).to(tl.float32)[None, :]
            up += tl.load(bias + N + column).to(tl.float32)[None, :]
        result = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out + row[:, None] * N + column[None, :], result.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _heads_kernel(
    hidden, squares, norm, weight, bias, query_norm, key_norm, cos, sin, query, key_pages, value_pages, tables,
    positions, starts, table_stride,
    partials, counters, num_rows, epsilon,
    K: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, SQUARE_PARTS: tl.constexpr,
    SQUARE_PAD: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, PRELOADS: tl.constexpr,
    EARLY: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """One head (TILE = D) a block: its norm and its rotation by cos and sin [places, D] of the newest tokens, at
    starts + positions; queries go to query [R, HEADS, D], keys and values to the rows' pages.

    PAGE 0: keys and values go to key_pages and value_pages as [R, KV_HEADS, D], for pages that are written otherwise.
    """
    head = tl.program_id(0) // SPLITS
    row = tl.arange(0, M)
    live = row < num_rows
    # -1: the row has no token yet. No kernel of a step writes them, so they are read before those ahead are done.
    position = tl.maximum(tl.load(positions + row, mask=live, other=0), 0)
    place = tl.load(starts + row, mask=live, other=0) + position
    is_last = _multiply(
        hidden, squares, norm, weight, head * TILE + tl.arange(0, TILE), partials, counters, num_rows, epsilon,
        K, SQUARE_PARTS, SQUARE_PAD, M, TILE, BLOCK_K, SPLITS, PRELOADS, EARLY, PRODUCT,
    )  # fmt: skip
    if is_last:
        HALF: tl.constexpr = TILE // 2
        column = tl.arange(0, HALF)
        low = _sum(partials, head, row, live, column, M, TILE, SPLITS)
        high = _sum(partials, head, row, live, HALF + column, M, TILE, SPLITS)
        if bias is not None:
            low += tl.load(bias + head * TILE + column).to(tl.float32)[None, :]
            high += tl.load(bias + head * TILE + HALF + column).to(tl.float32)[None, :]
        if head < HEADS + KV_HEADS:
            if query_norm is not None:
                sum_of_squares = _row_sums(low * low, M, HALF) + _row_sums(high * high, M, HALF)
                scale = tl.rsqrt(sum_of_squares / TILE + epsilon)[:, None]
                norm_of = query_norm
                if head >= HEADS:
                    norm_of = key_norm
                low = low * scale * tl.load(norm_of + column).to(tl.float32)[None, :]
                high = high * scale * tl.load(norm_of + HALF + column).to(tl.float32)[None, :]
            at = place[:, None] * TILE + column[None, :]
            cos_low = tl.load(cos + at, mask=live[:, None], other=0.0).to(tl.float32)
            cos_high = tl.load(cos + at + HALF, mask=live[:, None], other=0.0).to(tl.float32)
            sin_low = tl.load(sin + at, mask=live[:, None], other=0.0).to(tl.float32)
            sin_high = tl.load(sin + at + HALF, mask=live[:, None], other=0.0).to(tl.float32)
            turned = low * cos_low - high * sin_low
            high = high * cos_high + low * sin_high
            low = turned
        if head < HEADS:
            to = query + (row * HEADS + head)[:, None] * TILE + column[None, :]
        else:
            slot = row.to(tl.int64)
            if PAGE > 0:
                page = tl.load(tables + row * table_stride + position // PAGE, mask=live, other=0).to(tl.int64)
                slot = page * PAGE + position % PAGE
            pages, kv_head = key_pages, head - HEADS
            if kv_head >= KV_HEADS:
                pages, kv_head = value_pages, kv_head - KV_HEADS
            to = pages + (slot * KV_HEADS + kv_head)[:, None] * TILE + column[None, :]
        tl.store(to, low.to(query.dtype.element_ty), mask=live[:, None])
        tl.store(to + HALF, high.to(query.dtype.element_ty), mask=live[:, None])


@triton.jit
def _embed_kernel(tokens, table, hidden, squares, E: tl.constexpr, TILE: tl.constexpr):
    """Program (row, block of columns): hidden [R, E] = table[tokens], and its sum of squares [R, E / TILE]."""
    row, tile = tl.program_id(0), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    found = tl.load(table + tl.load(tokens + row).to(tl.int64) * E + column)
    tl.store(hidden + row * E + column, found)
    wide = found.to(tl.float32)
    tl.store(squares + row * (E // TILE) + tile, tl.sum(wide * wide, axis=0))


@triton.jit
def _norm_kernel(
    hidden, squares, norm, out, epsilon,
    E: tl.constexpr, TILE: tl.constexpr, SQUARE_PARTS: tl.constexpr, SQUARE_PAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (row, block of columns): out = RMS norm of hidden [R, E]."""
    row, tile = tl.program_id(0), tl.program_id(1)
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    part, column = tl.arange(0, SQUARE_PAD), tile * TILE + tl.arange(0, TILE)
    mean = tl.sum(tl.load(squares + row * SQUARE_PARTS + part, mask=part < SQUARE_PARTS, other=0.0), axis=0) / E
    normed = (tl.load(hidden + row * E + column).to(tl.float32) * tl.rsqrt(mean + epsilon)).to(out.dtype.element_ty)
    result = normed.to(tl.float32) * tl.load(norm + column).to(tl.float32)
    tl.store(out + row * E + column, result.to(out.dtype.element_ty))

"""Two-part attention over paged KV for CUDA: the Triton kernels. paged_attention.py launches them.

A row attends to its prompt's pages, read once for all rows of the prompt, and to its own. The first kernel computes
parts: a block of queries of one kv head against a span of one page table, normalised, with its log-sum-exp (flash
decoding; the shared prompt as in Hydragen, arXiv 2402.05099). The second merges each query's parts. Lengths and tables
are only read on the device, and a program without tokens ends at once. Letters: R rows, P prompt places, H kv heads, N
query heads per kv head, D head size. Logarithms are of base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infsample_rl.rollout.kernels.triton_linear import let_next_start, wait_for_inputs


@triton.jit
def _blocks_per_split(length, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of a table with `length` tokens, and how many each split takes, so that the last ones may be empty: by
    that length alone, so that what else is in a batch changes no sum."""
    blocks = tl.cdiv(length, BLOCK_N)
    return blocks, tl.cdiv(blocks, SPLITS)


@triton.jit
def _attend(
    queries, keys, values, key_scales, value_scales, outputs, lses, slot, live, part_stride, part, table, length,
    split, head, score_scale,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr,
    SPLITS: tl.constexpr, QUANTISED: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """The M queries at `slot` where `live` against one split of a table: normalised output and log-sum-exp into `part`,
    unless the split is empty."""
    blocks, per_split = _blocks_per_split(length, SPLITS, BLOCK_N)
    first, last = split * per_split, tl.minimum((split + 1) * per_split, blocks)
    if first < last:
        dims = tl.arange(0, D_PAD)
        stored_query = live[:, None] & (dims < D)[None, :]
        query = tl.load(queries + slot[:, None] * D + dims[None, :], mask=stored_query, other=0).to(PRODUCT)
        best = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D_PAD], tl.float32)
        for block in range(first, last):
            tokens = block * BLOCK_N + tl.arange(0, BLOCK_N)
            seen = tokens < length
            pages = tl.load(table + tokens // PAGE, mask=seen, other=0).to(tl.int64)
            at = ((pages * PAGE + tokens % PAGE) * H + head)[:, None] * D + dims[None, :]
            stored = seen[:, None] & (dims < D)[None, :]
            key = tl.load(keys + at, mask=stored, other=0.0)
            if QUANTISED:  # a scale for each channel of a page
                scale_at = (pages * H + head)[:, None] * D + dims[None, :]
                key = key.to(tl.float32) * tl.load(key_scales + scale_at, mask=stored, other=0.0).to(tl.float32)
            key = key.to(PRODUCT)
            # zeros where not seen: 0 x NaN would be NaN
            value = tl.load(values + at, mask=stored, other=0.0).to(PRODUCT)
            scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * score_scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))  # finite: no block is without a seen token
            weights = tl.exp2(scores - new_best[:, None])
            shrink = tl.exp2(best - new_best)
            total = total * shrink + tl.sum(weights, axis=1)
            if QUANTISED:  # a scale for each token
                token_at = (pages * PAGE + tokens % PAGE) * H + head
                weights *= tl.load(value_scales + token_at, mask=seen, other=0.0).to(tl.float32)[None, :]
            acc = tl.dot(weights.to(PRODUCT), value, acc * shrink[:, None], input_precision="tf32x3")
            best = new_best
        slot += part.to(tl.int64) * part_stride
        tl.store(outputs + slot[:, None] * D + dims[None, :], acc / total[:, None], mask=stored_query)
        tl.store(lses + slot, best + tl.log2(total), mask=live)


@triton.jit
def _prompt_queries(
    block, starts, num_prompts, head,
    H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, P_PAD: tl.constexpr,
):  # fmt: skip
    """Block number over all prompts -> its prompt (num_prompts or more: none), slots of its M queries in [R, H N],
    which of them are live."""
    index = tl.arange(0, P_PAD)
    begins = tl.load(starts + index, mask=index < num_prompts, other=0)
    ends = tl.load(starts + 1 + index, mask=index < num_prompts, other=0)
    blocks_of = tl.cdiv((ends - begins) * N, M)
    prompt = tl.sum((tl.cumsum(blocks_of, axis=0) <= block).to(tl.int32), axis=0)
    block -= tl.sum(tl.where(index < prompt, blocks_of, 0), axis=0)
    begin = tl.sum(tl.where(index == prompt, begins, 0), axis=0)
    end = tl.sum(tl.where(index == prompt, ends, 0), axis=0)
    folded = block * M + tl.arange(0, M)  # row by row, N queries each
    row = begin + folded // N
    live = row < end
    return prompt, row.to(tl.int64) * (H * N) + head * N + folded % N, live


@triton.jit
def _prefetch(
    pages, table, length, split, head,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Have L2 fetch the first block of a split's keys or values."""
    BYTES: tl.constexpr = D * pages.dtype.element_ty.primitive_bitwidth // 8
    _, per_split = _blocks_per_split(length, SPLITS, BLOCK_N)
    tokens = split * per_split * BLOCK_N + tl.arange(0, BLOCK_N)
    page = tl.load(table + tokens // PAGE, mask=tokens < length, other=0).to(tl.int64)
    at = pages + ((page * PAGE + tokens % PAGE) * H + head) * D
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at.to(tl.int64), BYTES],
        dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_prompts", "num_blocks", "row_stride", "prompt_stride"])
def _parts_kernel(
    queries, keys, values, key_scales, value_scales, row_tables, row_lengths, prompt_tables, prompt_lengths, starts,
    outputs, lses,
    num_rows, num_prompts, num_blocks, row_stride, prompt_stride, score_scale,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr,
    D_PAD: tl.constexpr, P_PAD: tl.constexpr, SPLITS: tl.constexpr,
    QUANTISED: tl.constexpr, PRODUCT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs (block of a prompt's queries, split, kv head), then (row, split, kv head): in one launch, so that they
    fill each other's gaps.

    EARLY: launched before the kernels ahead are done (programmatic dependent launch). Lengths and tables, which no
    kernel of a layer writes, are read before they are.
    """
    let_next_start(EARLY)
    pid = tl.program_id(0)
    head = pid % H
    part_stride = num_rows.to(tl.int64) * (H * N)
    num_prompt_programs = num_blocks * H * SPLITS
    if pid < num_prompt_programs:
        split, block = pid // H % SPLITS, pid // (H * SPLITS)
        prompt, slot, live = _prompt_queries(block, starts, num_prompts, head, H, N, M, P_PAD)
        length = tl.load(prompt_lengths + prompt, mask=prompt < num_prompts, other=0)
        table = prompt_tables + prompt.to(tl.int64) * prompt_stride
        if EARLY:
            if length > 0:
                _prefetch(keys, table, length, split, head, H, D, PAGE, BLOCK_N, SPLITS)
                _prefetch(values, table, length, split, head, H, D, PAGE, BLOCK_N, SPLITS)
        wait_for_inputs(EARLY)
        _attend(
            queries, keys, values, key_scales, value_scales, outputs, lses, slot, live, part_stride, split, table,
            length, split, head, score_scale,
            H, D, PAGE, M, BLOCK_N, D_PAD, SPLITS, QUANTISED, PRODUCT,
        )  # fmt: skip
    else:
        own = pid - num_prompt_programs
        split, row = own // H % SPLITS, own // (H * SPLITS)
        within = tl.arange(0, M)
        length = tl.load(row_lengths + row)
        table = row_tables + row.to(tl.int64) * row_stride
        if EARLY:
            _prefetch(keys, table, length, split, head, H, D, PAGE, BLOCK_N, SPLITS)
            _prefetch(values, table, length, split, head, H, D, PAGE, BLOCK_N, SPLITS)
        wait_for_inputs(EARLY)
        _attend(
            queries, keys, values, key_scales, value_scales, outputs, lses,
            (row.to(tl.int64) * H + head) * N + within, within < N,
            part_stride, SPLITS + split, table, length, split, head, score_scale,
            H, D, PAGE, M, BLOCK_N, D_PAD, SPLITS, QUANTISED, PRODUCT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_prompts"])
def _merge_kernel(
    outputs, lses, row_lengths, prompt_lengths, starts, merged, num_rows, num_prompts,
    NUM_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, P_PAD: tl.constexpr,
    SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (row, query head): sum of its parts, each weighted by its share of the softmax; zeros without
    any token."""
    let_next_start(EARLY)
    row, head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, P_PAD)
    ends = tl.load(starts + 1 + index, mask=index < num_prompts, other=2147483647)
    prompt = tl.sum((ends <= row).to(tl.int32), axis=0)  # num_prompts behind the last prompt's rows
    prompt_length = tl.load(prompt_lengths + prompt, mask=prompt < num_prompts, other=0)
    prompt_blocks, per_prompt_split = _blocks_per_split(prompt_length, SPLITS, BLOCK_N)
    own_blocks, per_own_split = _blocks_per_split(tl.load(row_lengths + row), SPLITS, BLOCK_N)
    part = tl.arange(0, 2 * SPLITS)
    of_prompt = (part < SPLITS) & (part * per_prompt_split < prompt_blocks)
    of_row = (part >= SPLITS) & ((part - SPLITS) * per_own_split < own_blocks)
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

"""Two-part attention over paged KV for CUDA, in Triton: one decode query per row, two launches a call, fit for a CUDA
graph.

A row attends to its prompt's pages, read once for all rows of the prompt, and to its own. The first launch computes
parts: a block of queries of one kv head against a span of one page table, normalised, with its log-sum-exp (flash
decoding; the shared prompt as in Hydragen, arXiv 2402.05099). The second merges each query's parts. Lengths and tables
are only read on the device; the grids depend on shapes alone, and a program without tokens ends at once. Letters: R
rows, P prompt places, H kv heads, N query heads per kv head, D head size. Logarithms inside are of base 2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from infsample_rl.rollout.kernels.triton_linear import let_next_start, wait_for_inputs

# queries (rows x N) of one block: a prompt with more is read again; and keys of one inner iteration, over several pages
MAX_BLOCK = 64
BLOCK_BYTES = 16384  # of keys at most: with more, registers spill (seen in ptxas for sm_80 and sm_90)
MAX_SPLITS = 16  # of one table's tokens
STORED_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
QUANTISED_DTYPES = (torch.int8, torch.float8_e4m3fn)
SCALES = ("key_scales", "value_scales")
LOG2_E = 1.4426950408889634


class Workspace:
    """Parts of one call at a time, allocated once: float32 outputs [parts, R, H N, D] and log-sum-exps, flat, for any R
    up to `max_rows`."""

    def __init__(
        self,
        max_rows: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_own_tokens: int,
        max_prompt_tokens: int,
        device: torch.device | str,
        num_programs: int | None = None,
    ) -> None:
        """`num_programs`: what a launch should have at least to fill the device (default: two per multiprocessor; 16
        without CUDA)."""
        if num_query_heads % num_kv_heads:
            raise ValueError(
                f"num_query_heads must be a multiple of num_kv_heads={num_kv_heads}, got {num_query_heads}"
            )
        device = torch.device(device)
        if num_programs is None:
            num_programs = (
                2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
            )
        self.max_rows, self.num_query_heads, self.num_kv_heads, self.head_dim = (
            max_rows,
            num_query_heads,
            num_kv_heads,
            head_dim,
        )
        self.num_programs = num_programs
        self.most_own_splits = min(MAX_SPLITS, triton.cdiv(max_own_tokens, MAX_BLOCK))
        self.most_prompt_splits = min(MAX_SPLITS, triton.cdiv(max_prompt_tokens, MAX_BLOCK))
        size = max(num_rows * sum(self.splits(num_rows)) for num_rows in range(1, max_rows + 1)) * num_query_heads
        self.outputs = torch.empty(size * head_dim, dtype=torch.float32, device=device)
        self.lses = torch.empty(size, dtype=torch.float32, device=device)

    def splits(self, num_rows: int) -> tuple[int, int]:
        """Into how many parts a prompt's tokens and a row's own go, at most, with `num_rows` rows: functions of the
        shapes alone."""
        num_blocks = triton.cdiv(num_rows * self.num_query_heads // self.num_kv_heads, MAX_BLOCK)
        prompt_splits = triton.cdiv(self.num_programs, num_blocks * self.num_kv_heads)
        own_splits = triton.cdiv(self.num_programs, num_rows * self.num_kv_heads)
        return min(self.most_prompt_splits, prompt_splits), min(self.most_own_splits, own_splits)


@triton.jit
def _blocks_per_split(length, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of a table with `length` tokens, and how many each split takes, so that the last ones may be empty."""
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
            key = tl.load(keys + at, mask=stored, other=0.0).to(PRODUCT)
            # zeros where not seen: 0 x NaN would be NaN
            value = tl.load(values + at, mask=stored, other=0.0).to(PRODUCT)
            scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * score_scale
            if QUANTISED:  # a page's scale belongs to its columns of the scores
                scores *= tl.load(key_scales + pages * H + head, mask=seen, other=0)[None, :]
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))  # finite: no block is without a seen token
            weights = tl.exp2(scores - new_best[:, None])
            shrink = tl.exp2(best - new_best)
            total = total * shrink + tl.sum(weights, axis=1)
            if QUANTISED:
                weights *= tl.load(value_scales + pages * H + head, mask=seen, other=0)[None, :]
            acc = tl.dot(weights.to(PRODUCT), value, acc * shrink[:, None], input_precision="tf32x3")
            best = new_best
        slot += part.to(tl.int64) * part_stride
        tl.store(outputs + slot[:, None] * D + dims[None, :], acc / total[:, None], mask=stored_query)
        tl.store(lses + slot, best + tl.log2(total), mask=live)


@triton.jit
def _prompt_queries(
    block, starts, row_order, num_prompts, head,
    H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, P_PAD: tl.constexpr, ORDERED: tl.constexpr,
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
    if ORDERED:
        row = tl.load(row_order + row, mask=live, other=0)
    return prompt, row.to(tl.int64) * (H * N) + head * N + folded % N, live


@triton.jit
def _prefetch(
    pages,
    table,
    length,
    split,
    head,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
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
    row_order, outputs, lses,
    num_rows, num_prompts, num_blocks, row_stride, prompt_stride, score_scale,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PROMPT_M: tl.constexpr,
    OWN_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D_PAD: tl.constexpr, P_PAD: tl.constexpr, PROMPT_SPLITS: tl.constexpr, OWN_SPLITS: tl.constexpr,
    QUANTISED: tl.constexpr, PRODUCT: tl.constexpr, ORDERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs (block of a prompt's queries, split, kv head), then (row, split, kv head): in one launch, so that they
    fill each other's gaps.

    EARLY: launched before the kernels ahead are done (programmatic dependent launch). Lengths, tables and the order of
    rows, which no kernel of a layer writes, are read before they are.
    """
    let_next_start(EARLY)
    pid = tl.program_id(0)
    head = pid % H
    part_stride = num_rows.to(tl.int64) * (H * N)
    num_prompt_programs = num_blocks * H * PROMPT_SPLITS
    if pid < num_prompt_programs:
        split, block = pid // H % PROMPT_SPLITS, pid // (H * PROMPT_SPLITS)
        prompt, slot, live = _prompt_queries(
            block, starts, row_order, num_prompts, head, H, N, PROMPT_M, P_PAD, ORDERED
        )
        length = tl.load(prompt_lengths + prompt, mask=prompt < num_prompts, other=0)
        table = prompt_tables + prompt.to(tl.int64) * prompt_stride
        if EARLY:
            if length > 0:
                _prefetch(keys, table, length, split, head, H, D, PAGE, BLOCK_N, PROMPT_SPLITS)
                _prefetch(values, table, length, split, head, H, D, PAGE, BLOCK_N, PROMPT_SPLITS)
        wait_for_inputs(EARLY)
        _attend(
            queries, keys, values, key_scales, value_scales, outputs, lses, slot, live, part_stride, split, table,
            length, split, head, score_scale,
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
            queries, keys, values, key_scales, value_scales, outputs, lses,
            (row.to(tl.int64) * H + head) * N + within, within < N,
            part_stride, PROMPT_SPLITS + split, table, length, split, head, score_scale,
            H, D, PAGE, OWN_M, BLOCK_N, D_PAD, OWN_SPLITS, QUANTISED, PRODUCT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_prompts"])
def _merge_kernel(
    outputs, lses, row_lengths, prompt_lengths, starts, row_order, merged, num_rows, num_prompts,
    NUM_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, P_PAD: tl.constexpr,
    PROMPT_SPLITS: tl.constexpr, OWN_SPLITS: tl.constexpr, PARTS_PAD: tl.constexpr, ORDERED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (place of a row, query head): sum of its parts, each weighted by its share of the softmax; zeros without
    any token."""
    let_next_start(EARLY)
    place, head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, P_PAD)
    ends = tl.load(starts + 1 + index, mask=index < num_prompts, other=2147483647)
    prompt = tl.sum((ends <= place).to(tl.int32), axis=0)  # num_prompts behind the last prompt's rows
    row = place
    if ORDERED:
        row = tl.load(row_order + place)
    prompt_length = tl.load(prompt_lengths + prompt, mask=prompt < num_prompts, other=0)
    prompt_blocks, per_prompt_split = _blocks_per_split(prompt_length, PROMPT_SPLITS, BLOCK_N)
    own_blocks, per_own_split = _blocks_per_split(tl.load(row_lengths + row), OWN_SPLITS, BLOCK_N)
    part = tl.arange(0, PARTS_PAD)
    of_prompt = (part < PROMPT_SPLITS) & (part * per_prompt_split < prompt_blocks)
    of_row = (
        (part >= PROMPT_SPLITS)
        & (part < PROMPT_SPLITS + OWN_SPLITS)
        & ((part - PROMPT_SPLITS) * per_own_split < own_blocks)
    )
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


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_tables: torch.Tensor,
    row_lengths: torch.Tensor,
    prompt_tables: torch.Tensor,
    prompt_lengths: torch.Tensor,
    prompt_row_starts: torch.Tensor,
    scaling: float,
    *,
    workspace: Workspace,
    row_order: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query per row over its prompt's tokens and its own: query [R, H N, D] -> [R, H N, D], softmax in
    float32.

    keys, values [pages, page size, H, D]: as query, or int8 / float8_e4m3fn with float32 scales [pages, H]. Tables
    int32 of page numbers [R, any], [P, any]; lengths int32 [R], [P] in tokens, 0 for an unused place. The rows of
    prompt p are row_order[starts[p]:starts[p + 1]] (int32 [R], every row once; None: they lie in that order); those
    behind starts[P] have no prompt. Lengths beyond what the workspace was made for are right, only slower. With `out`
    nothing is allocated. Raises ValueError.
    """
    num_prompts = prompt_tables.shape[0]
    _check_pages(query, keys, key_scales, value_scales, workspace)
    _check_layout(
        query, keys, num_prompts, query=query, keys=keys, values=values, key_scales=key_scales,
        value_scales=value_scales, row_tables=row_tables,
        row_lengths=row_lengths, prompt_tables=prompt_tables, prompt_lengths=prompt_lengths,
        prompt_row_starts=prompt_row_starts,
        row_order=row_order, out=out,
    )  # fmt: skip
    launch_attention(
        query, keys, values, (key_scales, value_scales), (row_tables, row_lengths, prompt_tables, prompt_lengths,
        prompt_row_starts, row_order),
        scaling, workspace, out := torch.empty_like(query) if out is None else out, early=False,
    )  # fmt: skip
    return out


def launch_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    scaling: float,
    workspace: Workspace,
    out: torch.Tensor,
    *,
    early: bool,
) -> None:
    """`paged_attention` without its checks. `places`: row_tables to row_order. `early`: with programmatic dependent
    launch (sm_90)."""
    row_tables, row_lengths, prompt_tables, prompt_lengths, prompt_row_starts, row_order = places
    num_rows, num_heads, num_prompts = *query.shape[:2], prompt_tables.shape[0]
    both, parts, num_blocks = _sizes(query, keys, num_prompts, workspace)
    both |= {"ORDERED": row_order is not None, "EARLY": early}
    num_programs = parts["H"] * (num_blocks * both["PROMPT_SPLITS"] + num_rows * both["OWN_SPLITS"])
    launch = {"launch_pdl": True} if early else {}
    _parts_kernel[(num_programs,)](
        query, keys, values, *scales, row_tables, row_lengths, prompt_tables, prompt_lengths, prompt_row_starts,
        row_order,
        workspace.outputs, workspace.lses, num_rows, num_prompts, num_blocks, row_tables.stride(0),
        prompt_tables.stride(0), scaling * LOG2_E,
        QUANTISED=scales[0] is not None, **parts, **both, num_warps=4, num_stages=3, **launch,
    )  # fmt: skip
    _merge_kernel[(num_rows, num_heads)](
        workspace.outputs, workspace.lses, row_lengths, prompt_lengths, prompt_row_starts, row_order, out, num_rows,
        num_prompts,
        NUM_HEADS=num_heads, PARTS_PAD=triton.next_power_of_2(both["PROMPT_SPLITS"] + both["OWN_SPLITS"]), **both,
        num_warps=4, **launch,
    )  # fmt: skip


def _sizes(
    query: torch.Tensor, keys: torch.Tensor, num_prompts: int, workspace: Workspace
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Compile-time sizes of both kernels, those of the parts alone, and the most blocks of queries that prompts sharing
    the rows can have."""
    num_rows, num_heads, head_dim = query.shape
    page_size, num_kv_heads = keys.shape[1:3]
    group = num_heads // num_kv_heads
    prompt_splits, own_splits = workspace.splits(num_rows)
    width = max(16, triton.next_power_of_2(head_dim))  # matrix products take 16 or more of everything
    block = min(MAX_BLOCK, max(16, BLOCK_BYTES // (width * query.element_size())))
    queries = min(block, max(16, triton.next_power_of_2(num_rows * group)))
    both = {"D": head_dim, "D_PAD": width, "BLOCK_N": block, "PROMPT_SPLITS": prompt_splits, "OWN_SPLITS": own_splits}
    both["P_PAD"] = triton.next_power_of_2(num_prompts + 15)  # few different ones, so few compilations
    parts = {
        "H": num_kv_heads,
        "N": group,
        "PAGE": page_size,
        "PROMPT_M": queries,
        "OWN_M": max(16, triton.next_power_of_2(group)),
    }
    # the interpreter cannot multiply bfloat16
    parts["PRODUCT"] = tl.float32 if triton.knobs.runtime.interpret else STORED_DTYPES[query.dtype]
    return both, parts, min(num_prompts, num_rows) - 1 + triton.cdiv(num_rows * group, queries)


def _check_pages(
    query: torch.Tensor,
    keys: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    workspace: Workspace,
) -> None:
    """Raise ValueError for dtypes and sizes that the kernels or the workspace are not for."""
    if query.dtype not in STORED_DTYPES:
        raise ValueError(f"query must be bfloat16, float16 or float32, got {query.dtype}")
    quantised = keys.dtype in QUANTISED_DTYPES
    if (key_scales is not None, value_scales is not None) != (quantised, quantised):
        raise ValueError(
            "key_scales and value_scales must be given for int8 and float8_e4m3fn keys and for no others, keys are "
            f"{keys.dtype}"
        )
    if not quantised and keys.dtype != query.dtype:
        raise ValueError(f"keys must be of query's {query.dtype}, or int8 or float8_e4m3fn, got {keys.dtype}")
    page_size = keys.shape[1]
    if page_size < 8 or page_size & (page_size - 1):
        raise ValueError(
            f"page_size must be a power of two >= 8, got {page_size}; take {triton.next_power_of_2(max(8, page_size))}"
        )
    made_for = (workspace.num_query_heads, workspace.num_kv_heads, workspace.head_dim)
    if (query.shape[1], *keys.shape[2:]) != made_for:
        raise ValueError(
            f"workspace is for (query heads, kv heads, head_dim) = {made_for}, got {(query.shape[1], *keys.shape[2:])}"
        )
    if query.shape[0] > workspace.max_rows:
        raise ValueError(f"workspace is for max_rows={workspace.max_rows}, query has {query.shape[0]}")


def _check_layout(query: torch.Tensor, keys: torch.Tensor, num_prompts: int, /, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError for a tensor of another dtype or shape, or not contiguous; a table's rows may lie apart."""
    rows, places, scales = (query.shape[0],), (num_prompts,), (keys.shape[0], keys.shape[2])
    kinds = {"query": query.dtype, "out": query.dtype, "keys": keys.dtype, "values": keys.dtype} | dict.fromkeys(
        SCALES, torch.float32
    )
    shapes = {"query": query.shape, "out": query.shape, "keys": keys.shape, "values": keys.shape} | dict.fromkeys(
        SCALES, scales
    )
    shapes |= {
        "row_lengths": rows,
        "row_order": rows,
        "prompt_lengths": places,
        "prompt_row_starts": (num_prompts + 1,),
    }
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        table = name.endswith("tables")
        dtype = kinds.get(name, torch.int32)
        shape = ((rows if name == "row_tables" else places) + tensor.shape[1:2]) if table else tuple(shapes[name])
        if (
            tensor.dtype != dtype
            or tensor.shape != shape
            or not (tensor.stride(-1) == 1 if table else tensor.is_contiguous())
        ):
            raise ValueError(
                f"{name} must be contiguous {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}"
            )

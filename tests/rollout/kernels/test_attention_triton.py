"""The Triton kernels against float64: on CPU in Triton's interpreter, compiled for Hopper without a device, and on
CUDA.

What no row may see is NaN: unused table entries name a page of NaN, and so are tokens behind a length and an unused
workspace.
"""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from infsample_rl.rollout.kernels.attention_triton import _parts_kernel  # noqa: E402
from infsample_rl.rollout.kernels.paged_attention import Workspace, _sizes, paged_attention  # noqa: E402
from tests.gpu import GPU  # noqa: E402

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
# of a head's output, relative to its norm; an element of bfloat16 is rounded by up to 2^-9 = 0.002, on CUDA its weight
# is too
TOLERANCE = {FLOAT32: 1e-5, BFLOAT16: 8e-3, FLOAT16: 1e-3}


def make_case(
    prompts,  # tokens of every place, 0: unused
    rows,  # rows of every place
    own,  # own tokens of every row; more of them than rows: those have no prompt
    *,
    heads=(2, 2),  # kv heads, query heads each
    head_dim=16,
    page_size=16,
    dtype=FLOAT32,
    page_dtype=None,
    spread=1.0,
    device="cpu",
    seed=0,
):
    """Arguments of `paged_attention`: random pages in random order, NaN wherever nothing may be read."""
    torch.manual_seed(seed)
    lengths = [*prompts, *own]
    width = max(-(-length // page_size) for length in lengths) + 1
    needed = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(needed)) + 1  # page 0 is the NaN one
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    pages = spread * torch.randn(2, sum(needed) + 1, page_size, heads[0], head_dim)
    key_scales = (torch.rand(sum(needed) + 1, heads[0], head_dim) * 0.02 + 0.01).bfloat16()
    value_scales = (torch.rand(sum(needed) + 1, page_size, heads[0]) * 0.02 + 0.01).bfloat16()
    pages[:, 0] = float("nan")
    for table, length, taken in zip(tables, lengths, order.split(needed), strict=True):
        table[: len(taken)] = taken
        if length % page_size:
            pages[:, taken[-1], length % page_size :] = float("nan")
    if page_dtype:
        pages = (pages * 40).nan_to_num(100.0).clamp(-127, 127)  # int8 has no NaN: the largest value instead
        key_scales[0] = value_scales[0] = float("nan")
    keys, values = pages.to(page_dtype or dtype)
    workspace = Workspace(len(own), heads[0] * heads[1], head_dim, device)
    workspace.outputs.fill_(float("nan"))
    workspace.lses.fill_(float("nan"))
    case = {
        "query": torch.randn(len(own), heads[0] * heads[1], head_dim).to(dtype),
        "keys": keys.contiguous(),
        "values": values.contiguous(),
        "row_tables": tables[len(prompts) :].contiguous(),
        "row_lengths": torch.tensor(own, dtype=torch.int32),
        "prompt_tables": tables[: len(prompts)].contiguous(),
        "prompt_lengths": torch.tensor(prompts, dtype=torch.int32),
        "prompt_row_starts": torch.tensor([0, *rows]).cumsum(0).int(),
        "key_scales": key_scales if page_dtype else None,
        "value_scales": value_scales if page_dtype else None,
    }
    case = {name: tensor if tensor is None else tensor.to(device) for name, tensor in case.items()}
    return case | {"scaling": head_dim**-0.5, "workspace": workspace}


def gather(pages, scales, table, length):
    """The first `length` tokens [length, H, D] of a table, in float64."""
    used = table[: -(-length // pages.shape[1])].long()
    tokens = pages[used].double()
    if scales is not None:
        tokens = tokens * scales[used].double()
    return tokens.flatten(0, 1)[:length]


def reference(case):
    """Every row against its prompt's tokens and its own, one plain softmax over both, in float64 on the CPU."""
    case = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in case.items()}
    query, starts = case["query"].double(), case["prompt_row_starts"].tolist()
    out = torch.zeros_like(query)
    for row in range(len(query)):
        spans = [(case["row_tables"][row], int(case["row_lengths"][row]))]
        for prompt, length in enumerate(case["prompt_lengths"].tolist()):
            if starts[prompt] <= row < starts[prompt + 1]:
                spans.append((case["prompt_tables"][prompt], length))
        scales = (None, None)
        if case["key_scales"] is not None:  # of a page's channels, and of its tokens
            scales = case["key_scales"][:, None], case["value_scales"][..., None]
        keys = torch.cat([gather(case["keys"], scales[0], *span) for span in spans])
        values = torch.cat([gather(case["values"], scales[1], *span) for span in spans])
        folded = query[row].view(keys.shape[1], -1, keys.shape[2])
        weights = (torch.einsum("hnd,thd->hnt", folded, keys) * case["scaling"]).softmax(-1)
        out[row] = torch.einsum("hnt,thd->hnd", weights, values).reshape(out[row].shape)
    return out


def assert_right(out, case, tolerance=None):
    """Every head of every row is within the tolerance, its dtype's by default, relative to its norm."""
    expected = reference(case)
    assert out.dtype == case["query"].dtype and out.isfinite().all()
    error = (out.cpu().double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < (tolerance or TOLERANCE[out.dtype]), (
        f"{error.max():.1e} at (row, head) {divmod(int(error.argmax()), error.shape[1])}"
    )


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16])
def test_rows_of_prompts_of_different_lengths(interpreted, dtype):
    case = make_case((130, 0, 1, 64), (2, 0, 3, 1), (1, 16, 97, 33, 64, 2), dtype=dtype)
    assert_right(interpreted(paged_attention, **case), case)


@pytest.mark.parametrize("tokens", [30, 100, 900])
def test_one_prompt_in_one_split_and_in_many(interpreted, tokens):
    case = make_case((tokens,), (3,), (1, tokens, 30))
    assert_right(interpreted(paged_attention, **case), case)


@pytest.mark.parametrize("dtype", [pytest.param(FLOAT32, marks=pytest.mark.slow), BFLOAT16])
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(interpreted, dtype):
    own = (5, 80, 16, 150, 33, 7, 64, 1)
    case = make_case((100, 40), (5, 3), own, heads=(2, 4), dtype=dtype)
    together = interpreted(paged_attention, **case)
    for first, last, starts in ((3, 4, (0, 1, 1)), (2, 7, (0, 3, 5)), (5, 8, (0, 0, 3))):
        of_rows = {name: case[name][first:last].contiguous() for name in ("query", "row_tables", "row_lengths")}
        alone = case | of_rows | {"prompt_row_starts": torch.tensor(starts, dtype=torch.int32)}
        assert torch.equal(interpreted(paged_attention, **alone), together[first:last])


@pytest.mark.parametrize("page_size", [8, 16, 128])
def test_lengths_at_page_and_block_borders(interpreted, page_size):
    own = (1, page_size - 1, page_size, page_size + 1, 63, 64, 65, 127, 129)
    case = make_case((page_size, 64 + page_size), (5, 4), own, page_size=page_size)
    assert_right(interpreted(paged_attention, **case), case)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (2, 128), (3, 64), (4, 80), (7, 16), (17, 24), (2, 256)])
def test_any_number_of_query_heads_and_any_head_size(interpreted, group, head_dim):
    case = make_case((70, 20), (2, 1), (1, 40, 17), heads=(2, group), head_dim=head_dim)
    assert_right(interpreted(paged_attention, **case), case)


def test_prompts_with_more_queries_than_one_block_takes(interpreted):
    case = make_case((40, 17, 80), (14, 1, 12), [1 + 3 * (row % 7) for row in range(27)], heads=(1, 5))
    assert_right(interpreted(paged_attention, **case), case)


def test_idle_rows_behind_the_last_prompt_see_only_their_own(interpreted):
    case = make_case((40, 0), (2, 0), (5, 80, 1, 1, 30))
    assert_right(interpreted(paged_attention, **case), case)


def test_a_row_that_sees_no_token_gives_zeros_and_no_nan(interpreted):
    case = make_case((40, 0), (1, 2), (5, 0, 9), dtype=BFLOAT16)
    out = interpreted(paged_attention, **case)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    expected = reference(case)
    torch.testing.assert_close(out[[0, 2]].double(), expected[[0, 2]], rtol=8e-3, atol=8e-3)


def test_scores_hundreds_apart_give_no_nan(interpreted):
    case = make_case((130, 64), (2, 2), (1, 97, 33, 64), spread=300.0)
    assert_right(interpreted(paged_attention, **case), case)


def test_parts_left_by_a_longer_call_are_not_taken(interpreted):
    longer = make_case((300, 200), (3, 3), (200, 190, 130, 70, 199, 200))
    shorter = make_case((64, 1), (1, 3), (1, 2, 64, 65), seed=1) | {"workspace": longer["workspace"]}
    interpreted(paged_attention, **longer)
    assert_right(interpreted(paged_attention, **shorter), shorter)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_quantised_pages_are_read_with_the_scales_of_channels_and_tokens(interpreted, dtype):
    case = make_case((70, 20), (2, 1), (1, 40, 17), dtype=dtype, page_dtype=torch.int8)
    assert_right(interpreted(paged_attention, **case), case)


POINTERS = {FLOAT32: "*fp32", BFLOAT16: "*bf16", torch.int8: "*i8"}


@pytest.mark.parametrize(
    ("dtype", "page_dtype", "group", "head_dim", "early"),
    [
        (BFLOAT16, None, 2, 128, False),
        (BFLOAT16, None, 2, 128, True),
        pytest.param(BFLOAT16, torch.int8, 4, 128, False, marks=pytest.mark.slow),
        (BFLOAT16, torch.int8, 4, 128, True),
        pytest.param(FLOAT32, None, 3, 80, False, marks=pytest.mark.slow),
    ],
)
def test_kernel_compiles_for_hopper_and_two_programs_fit_a_multiprocessor(
    dtype, page_dtype, group, head_dim, early, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = make_case((64,), (32,), [1] * 32, heads=(1, group), head_dim=head_dim, dtype=dtype, page_dtype=page_dtype)
    both, parts, _ = _sizes(case["query"], case["keys"], 1)
    fixed = {"QUANTISED": page_dtype is not None, "EARLY": early} | both | parts
    fixed |= {} if page_dtype else {"key_scales": None, "value_scales": None}
    kinds = {"queries": POINTERS[dtype], "score_scale": "fp32"}
    kinds |= dict.fromkeys(("keys", "values"), POINTERS[page_dtype or dtype])
    kinds |= dict.fromkeys(("key_scales", "value_scales"), "*bf16") | dict.fromkeys(("outputs", "lses"), "*fp32")
    kinds |= dict.fromkeys(("row_tables", "row_lengths", "prompt_tables", "prompt_lengths", "starts"), "*i32")
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in _parts_kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    source = triton.compiler.ASTSource(_parts_kernel, signature, fixed, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 3})
    assert 2 * compiled.metadata.shared <= 227 * 1024
    assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == early
    assert "cp.async" in compiled.asm["ptx"]  # the next pages are on their way while one is multiplied


GPU_SHAPES = {  # kv heads, query heads each, head size
    "Qwen3-1.7B": (8, 2, 128),
    "Qwen3-8B": (8, 4, 128),
    "SmolLM2-135M": (3, 3, 64),
    "odd": (4, 7, 80),
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize(
    ("prompts", "num_rows"), [((512,), 1), ((512,), 4), ((4095,), 32), ((512, 0, 1, 300, 64), 64), ((1,), 200)]
)
def test_kernels_at_real_sizes_on_cuda(shape, dtype, prompts, num_rows):
    torch.manual_seed(num_rows)
    num_kv_heads, group, head_dim = GPU_SHAPES[shape]
    used = [place for place, length in enumerate(prompts) if length]
    rows = [num_rows // len(used) if place in used[:-1] else 0 for place in range(len(prompts))]
    rows[used[-1]] = max(1, num_rows - num_rows // 16 - sum(rows))  # some rows stay idle
    own = torch.randint(1, 1025, (num_rows,)).tolist()
    options = {"heads": (num_kv_heads, group), "head_dim": head_dim, "dtype": dtype}
    case = make_case(prompts, rows, own, **options, device=GPU)
    assert_right(paged_attention(**case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_quantised_pages_on_cuda(dtype):
    own = [1 + 40 * row for row in range(16)]
    case = make_case(
        (512, 300), (9, 7), own, heads=(8, 4), head_dim=128, dtype=dtype, page_dtype=torch.int8, device=GPU
    )
    assert_right(paged_attention(**case), case)


@pytest.mark.gpu
def test_one_cuda_graph_serves_any_lengths_tables_and_owners_without_a_sync():
    layout = {"heads": (8, 2), "head_dim": 128, "dtype": BFLOAT16, "device": GPU}
    most = make_case((1024, 1024), (8, 8), [1024] * 16, **layout)
    paged_attention(**most)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        paged_attention(**most)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(**most)
    others = [
        make_case((1, 700), (15, 1), list(range(1, 17)), **layout, seed=1),
        make_case((512, 0), (12, 0), [1 + 64 * row for row in range(16)], **layout, seed=2),
        make_case((1024, 1024), (8, 8), [1024] * 16, **layout, seed=3),
    ]
    for other in others:
        for name, tensor in other.items():
            if isinstance(tensor, torch.Tensor):  # smaller pools and tables fill the first places
                most[name][tuple(slice(size) for size in tensor.shape)].copy_(tensor)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_right(out, other)

"""The decoder layers in Triton against the same model in float64: on CPU in Triton's interpreter, compiled for Hopper,
and on CUDA."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from infsample_rl.rollout.engine.decoder import FusedDecoder  # noqa: E402
from infsample_rl.rollout.engine.model_runner import ModelRunner  # noqa: E402
from infsample_rl.rollout.engine.row_batch import RowBatch  # noqa: E402
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup  # noqa: E402
from tests.gpu import GPU  # noqa: E402

SIZES = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VARIANTS = ("qwen3", "qwen3 with biases", "qwen2", "llama", "llama with biases")
OWN_TOKENS = (3, 1, 9, 2, 8, 5, 7, 4)


def make_batch(runner, own_tokens, max_rows):
    """A prompt of three tokens, rows with so many of their own whose KV is written but for the newest, and idle
    rows; the samples."""
    group = PromptGroup(
        0,
        [5, 6, 7],
        list(range(len(own_tokens))),
        GroupSettings("arrival", len(own_tokens), len(own_tokens)),
        lambda index: 100 + index,
    )
    group.pages = [0]
    runner.prefill(group.prompt_ids, [0])
    rows, num_pages = [], 2
    for place, count in enumerate(own_tokens):
        sample = group.next_sample(place)
        sample.pages = [1 + num_pages * place, 2 + num_pages * place]
        sample.tokens.extend((7 * place + 5 * index) % 60 for index in range(count))
        if count > 1:
            runner.rebuild(list(sample.tokens[:-1]), 0, sample.pages, [0], 3)
        rows.append(sample)
    batch = RowBatch(max_rows, num_pages, 1, 1, runner.kv.scratch_page, runner.device)
    batch.arrange(rows)
    return batch, rows


def in_triton(runner, batch, **options):
    """Have a runner decode in Triton; the workspace of its steps."""
    from infsample_rl.rollout.kernels.paged_attention import Workspace

    runner.decoder = FusedDecoder(runner.model, **options)
    runner.decoder.use_triton()
    assert (runner.decoder.triton_layers is None) == (runner.dtype == torch.float32)
    heads = runner.model.config.num_attention_heads
    return Workspace(batch.max_rows, heads, runner.shape.head_dim, runner.device)


def run_step(model, own_tokens, kv_dtype, *, triton, **options):
    """Hidden states of a step, and the KV pool after it without the scratch page."""
    runner = ModelRunner(model, kv_dtype=kv_dtype)
    runner.allocate(1 + 2 * len(own_tokens), 8)
    batch, _ = make_batch(runner, own_tokens, len(own_tokens) + 1)
    workspace = runner.decoder = None
    if triton:
        workspace = in_triton(runner, batch, **options)
    hidden = runner.decode(batch, batch.max_rows, workspace)[: batch.num_rows]
    return hidden.double().cpu().numpy(), runner.kv.store[:, :-1].double().cpu().numpy()


def both_steps(config, state, dtype, kv_dtype="auto", own_tokens=OWN_TOKENS, device="cpu", repeats=1):
    """The step of a model of these weights in float64, by transformers' modules, in `dtype` by the same, and in `dtype`
    in Triton."""
    from transformers import AutoModelForCausalLM

    out = []
    for triton, used in ((False, torch.float64), (False, dtype), *[(True, dtype)] * repeats):
        model = (
            AutoModelForCausalLM.from_config(config, dtype=used).eval().to("cpu" if used == torch.float64 else device)
        )
        model.load_state_dict(state)
        out.append(run_step(model, own_tokens, kv_dtype, triton=triton))
    return out


def build(make_variant, variant, dtype, **changes):
    """(config, weights) of a variant, with random biases and norms."""
    model = make_variant(variant, **(SIZES | changes)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_().mul_(0.3).add_(0.0 if name.endswith("bias") else 1.0)
    return model.config, {name: tensor.double() for name, tensor in model.state_dict().items()}


def assert_as_exact_as_torch(steps):
    """Hidden states and KV written are no farther from float64's than transformers' modules in the same dtype are,
    nearly."""
    for exact, of_torch, found in zip(*steps, strict=True):
        exact, of_torch, found = map(torch.from_numpy, (exact, of_torch, found))
        scale = exact.norm()
        error, error_of_torch = (found - exact).norm() / scale, (of_torch - exact).norm() / scale
        assert found.isfinite().all()
        # over six seeds of each variant 0.7 to 1.1 times (1.22 once): which of two roundings errs more is chance
        assert error < 1.3 * error_of_torch, f"{error:.2e}, torch {error_of_torch:.2e}"


@pytest.mark.slow  # in the fast half Qwen3's are in the next
@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_in_triton_are_as_exact_as_transformers_modules(interpreted, make_variant, variant):
    assert_as_exact_as_torch(interpreted(both_steps, *build(make_variant, variant, torch.float16), torch.float16))


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_more_rows_than_one_block_of_a_product_and_quantised_pages(interpreted, make_variant, kv_dtype):
    config, state = build(make_variant, "qwen3", torch.float16, num_hidden_layers=1)
    own_tokens = (4, *[1] * 15, 2)
    steps = interpreted(both_steps, config, state, torch.float16, kv_dtype, own_tokens)
    if kv_dtype == "auto":
        assert_as_exact_as_torch(steps)
    else:  # all three round their pages, so compare the dtype's two
        torch.testing.assert_close(torch.from_numpy(steps[2][0]), torch.from_numpy(steps[1][0]), atol=3e-2, rtol=0)


def steps_of_rows(config, state, dtype, counts, device="cpu", **options):
    """Hidden states of the first rows, and the KV that they wrote, of a step of each number of rows."""
    from transformers import AutoModelForCausalLM

    out = []
    for num_rows in counts:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(device)
        model.load_state_dict(state)
        hidden, store = run_step(model, [4, *[1] * (num_rows - 1)], "auto", triton=True, **options)
        out.append((hidden[: counts[0]], store[:, : 1 + 2 * counts[0]]))
    return out


def steps_in_blocks(config, state, dtype, counts):
    """As steps_of_rows, by layers that take 16 rows at a time."""
    from infsample_rl.rollout.engine import triton_layers

    with patch.object(triton_layers, "MAX_ROWS", 16):
        return steps_of_rows(config, state, dtype, counts, in_blocks=True)


def steps_of_drafts(config, state, dtype, device="cpu"):
    """Hidden states of a row's next five tokens and the KV of its pages: of four drafted in one step, and of five
    steps."""
    from transformers import AutoModelForCausalLM

    out, drafted = [], [11, 12, 13, 14]
    for drafts in (drafted, []):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(device)
        model.load_state_dict(state)
        runner = ModelRunner(model)
        runner.allocate(5, 8)
        batch, samples = make_batch(runner, [5, 2], max_rows=8)
        workspace, hidden = in_triton(runner, batch), []
        for token in [None] if drafts else [None, *drafted]:
            if token is not None:
                samples[0].tokens.append(token)
            batch.spread(samples, [drafts, []])
            hidden += runner.decode(batch, batch.max_rows, workspace)[: 1 + len(drafts)].double().cpu().numpy().tolist()
        out.append((hidden, runner.kv.store[:, 1:3].flatten(1, 2)[:, :9].double().cpu().numpy()))
    return out


def assert_drafts_are_exact(steps):
    (drafted, pages), (alone, pages_alone) = steps
    assert len(drafted) == 5 and drafted == alone and (pages == pages_alone).all()


@pytest.mark.slow
def test_drafted_tokens_have_the_bits_of_steps_of_their_own(interpreted, make_variant):
    config, state = build(make_variant, "qwen3", torch.float16)
    assert_drafts_are_exact(interpreted(steps_of_drafts, config, state, torch.float16))


@pytest.mark.slow
def test_a_row_has_the_same_bits_in_any_company(interpreted, make_variant):
    few_heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 256}  # a product of few tiles
    config, state = build(make_variant, "qwen3", torch.float16, num_hidden_layers=1, **few_heads)
    alone, *others = interpreted(steps_of_rows, config, state, torch.float16, (2, 16, 17, 40))
    assert all((one == other).all() for found in others for one, other in zip(alone, found, strict=True))


@pytest.mark.slow
def test_more_rows_than_the_layers_take_at_once_have_the_same_bits_in_blocks(interpreted, make_variant):
    config, state = build(make_variant, "qwen3", torch.float16, num_hidden_layers=1)
    few, many = interpreted(steps_in_blocks, config, state, torch.float16, (2, 20))
    assert all((one == other).all() for one, other in zip(few, many, strict=True))


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_step_that_the_layers_do_not_take_writes_and_attends_in_triton(interpreted, make_variant, kv_dtype):
    config, state = build(make_variant, "qwen3", torch.float32, num_hidden_layers=1)
    _, wanted, found = interpreted(both_steps, config, state, torch.float32, kv_dtype)
    torch.testing.assert_close(torch.from_numpy(found[0]), torch.from_numpy(wanted[0]), atol=1e-4, rtol=0)
    tolerance = 1e-5 if kv_dtype == "auto" else 1.0  # a number of eight bits
    torch.testing.assert_close(torch.from_numpy(found[1]), torch.from_numpy(wanted[1]), atol=tolerance, rtol=0)


def test_kernels_leave_counters_at_zero_for_the_next_step(interpreted, make_variant):
    *_, first, second = interpreted(
        both_steps, *build(make_variant, "qwen3", torch.float16), torch.float16, "auto", (1, 2), "cpu", 2
    )
    assert (first[0] == second[0]).all() and (first[1] == second[1]).all()


def tried_steps(config, state, dtype, kv_dtype, most_rows):
    """What the first trial of captured steps says where they run in Triton; "" for nothing."""
    from transformers import AutoModelForCausalLM

    from infsample_rl.rollout.engine.cuda_decode import DecodeGraphs
    from infsample_rl.rollout.engine.sampler import Sampler
    from infsample_rl.rollout.engine.step_trial import try_steps

    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.load_state_dict(state)
    runner = ModelRunner(model, kv_dtype=kv_dtype)
    runner.allocate(16 + most_rows, 8)
    batch = RowBatch(most_rows, 3, 1, 8, runner.kv.scratch_page, runner.device)
    workspace, none = in_triton(runner, batch), {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    sampler = Sampler(runner.vocab_size, runner.vocab_size, **none, device=runner.device)
    with patch.object(runner, "new_workspace", lambda batch: workspace):
        graphs = DecodeGraphs(runner, batch, sampler, compiled=False)
    try:
        try_steps(runner, graphs)
    except RuntimeError as error:
        return str(error)
    return ""


def tried_faulty_steps(config, state, dtype, kv_dtype, most_rows):
    """As tried_steps, where attention leaves out the pages behind a prompt's first."""
    from infsample_rl.rollout.engine import triton_layers

    def faulty(query, keys, values, tables, lengths, prompt_tables, prompt_lengths, *others, **options):
        return attention(
            query, keys, values, tables, lengths, prompt_tables, prompt_lengths.clamp(max=8), *others, **options
        )

    attention = triton_layers.paged_attention
    with patch.object(triton_layers, "paged_attention", faulty):
        return tried_steps(config, state, dtype, kv_dtype, most_rows)


@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
def test_the_first_trial_of_steps_in_triton_finds_no_fault_but_one_that_is_there(interpreted, make_variant, kv_dtype):
    config, state = build(make_variant, "qwen3", torch.float16, num_hidden_layers=1)
    assert interpreted(tried_steps, config, state, torch.float16, kv_dtype, 4) == ""
    said = interpreted(tried_faulty_steps, config, state, torch.float16, kv_dtype, 4)
    assert said.startswith("a step of 1 rows gives other hidden states")


@pytest.mark.slow
def test_the_first_trial_goes_through_all_kernels_of_the_products(interpreted, make_variant):
    config, state = build(make_variant, "qwen3", torch.float16, num_hidden_layers=1)
    assert interpreted(tried_steps, config, state, torch.float16, "auto", 96) == ""


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"head_dim": 16}),
        (torch.bfloat16, {"head_dim": 96}),
        (torch.bfloat16, {"hidden_size": 96}),
        (torch.float16, {"intermediate_size": 80}),
    ],
)
def test_models_the_kernels_do_not_take_keep_the_other_path(make_variant, dtype, change):
    decoder = FusedDecoder(make_variant("qwen3", **(SIZES | change)).to(dtype))
    decoder.use_triton()
    assert decoder.triton_layers is None


def signature_of(kernel, fixed, dtype):
    """Triton's signature of a kernel whose pointers are of `dtype` but for the ones named here, and which of them are
    aligned."""
    kinds = dict.fromkeys(("squares", "partials"), "*fp32") | dict.fromkeys(("counters", "tables"), "*i32")
    kinds |= {"positions": "*i64", "starts": "*i64", "num_rows": "i32", "table_stride": "i32", "epsilon": "fp32"}
    signature = {name: "constexpr" if name in fixed else kinds.get(name, dtype) for name in kernel.arg_names}
    return signature, {
        (index,): [["tt.divisibility", 16]] for index, kind in enumerate(signature.values()) if kind.startswith("*")
    }


OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg", "enable_fp_fusion")
PRODUCTS = [("heads", 4), ("out", 32), ("gated", 64), ("down", 16)]


@pytest.mark.parametrize(("name", "num_rows"), PRODUCTS)
def test_products_compile_for_hopper_so_that_two_programs_fit_and_sums_have_one_order(
    name, num_rows, tmp_path, monkeypatch
):
    import triton
    import triton.language as tl

    from infsample_rl.rollout.engine import product_plans
    from infsample_rl.rollout.engine import triton_layers as layers

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    of_squares, settings = {"SQUARE_PARTS": 32, "SQUARE_PAD": 32}, product_plans.SETTINGS[name]
    kernel, plan, fixed = {
        "heads": (layers._heads_kernel, (2048, 32, 128), of_squares | {"HEADS": 16, "KV_HEADS": 8, "PAGE": 16}),
        "out": (layers._hidden_kernel, (2048, 32, 64), {"N": 2048}),
        "gated": (layers._gated_kernel, (2048, 96, 128), of_squares | {"N": 6144}),
        "down": (layers._hidden_kernel, (6144, 32, 64), {"N": 2048}),
    }[name]
    plan = product_plans.plan(settings, *plan, 132)
    sizes = plan.sizes(num_rows, early=True, product=tl.bfloat16)
    options = {option: sizes.pop(option) for option in OPTIONS}
    fixed |= sizes | {"bias": None}
    source = triton.compiler.ASTSource(
        kernel, *(lambda kinds, aligned: (kinds, fixed, aligned))(*signature_of(kernel, fixed, "*bf16"))
    )
    compiled = triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32), options=options)
    assert (2 if num_rows < 64 else 1) * compiled.metadata.shared <= 227 * 1024
    for instruction in ("griddepcontrol.wait", "griddepcontrol.launch_dependents", "st.global"):
        assert instruction in compiled.asm["ptx"]
    # Of two numbers there is one sum, and no product is fused with an addition here and not there.
    sums = re.findall(r'"tt.reduce".*?\(tensor<([0-9x]+)xf32', compiled.asm["ttgir"], re.DOTALL)
    assert sums and all(shape.endswith("x2") for shape in sums)
    assert "fma.rn" not in compiled.asm["ptx"]


GPU_SIZES = {
    "hidden_size": 1024,
    "head_dim": 128,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
QWEN3_1_7B = GPU_SIZES | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 1}
GPU_CASES = [(variant, torch.bfloat16, 40) for variant in VARIANTS] + [
    ("qwen3", torch.bfloat16, rows) for rows in (1, 16, 63)
]


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "dtype", "num_rows"), [*GPU_CASES, ("qwen3", torch.float16, 32)])
def test_layers_on_cuda_are_as_exact_as_transformers_modules_and_repeat_bit_by_bit(
    make_variant, variant, dtype, num_rows
):
    config, state = build(make_variant, variant, dtype, **GPU_SIZES)
    own_tokens = [1 + 9 * (row == 1) for row in range(num_rows)]
    *steps, again = both_steps(config, state, dtype, own_tokens=own_tokens, device=GPU, repeats=2)
    assert_as_exact_as_torch(steps)
    assert all((one == other).all() for one, other in zip(steps[2], again, strict=True))


def sums_of_rows(config, state, dtype, counts, device="cpu"):
    """What each product of the first layer gives the first rows, by name, in a step of each number of rows: numbers,
    and the sums of squares that are kept beside them."""
    from transformers import AutoModelForCausalLM

    from infsample_rl.rollout.engine.triton_layers import TritonStep

    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(device)
    model.load_state_dict(state)
    runner = ModelRunner(model)
    most = max(counts)
    runner.allocate(1 + 2 * most, 8)
    batch, _ = make_batch(runner, [1 + row % 8 for row in range(most)], most)
    workspace, found = in_triton(runner, batch), []
    layers = runner.decoder.triton_layers
    into, out, size = layers.ins[0], layers.outs[0], model.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    hidden, attended, gated = (
        torch.randn(most, width, generator=generator).to(model.device, model.dtype)
        for width in (size, out.out.shape[1], out.down.shape[1])
    )
    squares = hidden.float().square().unflatten(1, (layers.tiles, -1)).sum(-1)
    angles = layers.angles(batch, 8)
    for rows in counts:
        step = TritonStep(runner.kv, batch, rows, workspace)
        of_rows = {"heads": [layers.project(into, hidden[:rows], squares[:rows], *angles, step, 0, slice(rows))]}
        of_rows["gated"] = [layers.gate(out, hidden[:rows], squares[:rows])]
        for name, x, weight, bias in (
            ("out", attended, out.out, out.out_bias),
            ("down", gated, out.down, out.down_bias),
        ):
            of_rows[name] = [hidden[:rows].clone(), squares[:rows].clone()]
            layers.add_product(name, x[:rows], weight, bias, *of_rows[name])
        found.append({name: [each.double().cpu().numpy() for each in parts] for name, parts in of_rows.items()})
    return found


def assert_rows_are_those_of_the_largest(found):
    *others, largest = found
    for other in others:
        for name, parts in other.items():
            for part, wanted in zip(parts, largest[name], strict=True):
                assert (part == wanted[: len(part)]).all(), f"{name} of {len(part)} rows"


def test_products_give_a_row_the_same_sums_in_any_company(interpreted, make_variant):
    few_heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 256, "num_hidden_layers": 1}
    config, state = build(make_variant, "qwen3", torch.float16, **few_heads)
    assert_rows_are_those_of_the_largest(interpreted(sums_of_rows, config, state, torch.float16, (2, 17)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_on_cuda_give_a_row_the_same_sums_in_any_company(make_variant, dtype):
    config, state = build(make_variant, "qwen3", dtype, **QWEN3_1_7B)
    assert_rows_are_those_of_the_largest(sums_of_rows(config, state, dtype, (1, 2, 8, 16, 17, 32, 33, 64), GPU))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_on_cuda_has_the_same_bits_in_any_company(make_variant, dtype):
    config, state = build(make_variant, "qwen3", dtype, **GPU_SIZES)
    alone, *others = steps_of_rows(config, state, dtype, (1, 2, 16, 17, 33, 63), device=GPU)
    assert all((one == other).all() for found in others for one, other in zip(alone, found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_drafted_tokens_on_cuda_have_the_bits_of_steps_of_their_own(make_variant, dtype):
    config, state = build(make_variant, "qwen3", dtype, **GPU_SIZES)
    assert_drafts_are_exact(steps_of_drafts(config, state, dtype, device=GPU))

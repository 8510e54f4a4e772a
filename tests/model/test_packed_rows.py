"""Packed rows: the tokens, the attention and the log-probabilities are those of every sample alone."""

import copy
import dataclasses
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask
from transformers import (
    LlamaConfig,
    MambaConfig,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from infsample_rl.model import packed_attention as attention
from infsample_rl.model import row_cuts
from infsample_rl.model.architecture import check_full_attention
from infsample_rl.model.block_mask import build_block_mask, mask_function, visible_spans
from infsample_rl.model.logprobs import PackedPolicy, checkpoint_every
from infsample_rl.model.packing import pack_prompt, pack_row, pack_samples
from infsample_rl.model.shared_prompt import SharedPrompt
from tests.gpu import GPU
from tests.tiny_models import TINY_SIZES, assert_tensors_close, plain_logprobs, training_sample


def tiny():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(**TINY_SIZES, head_dim=16, initializer_range=0.2, tie_word_embeddings=True)
    ).double()


def random_groups(seed, prompt_lengths, response_lengths):
    generator = np.random.default_rng(seed)
    return [
        (generator.integers(0, 60, prompt), [generator.integers(0, 60, length) for length in lengths])
        for prompt, lengths in zip(prompt_lengths, response_lengths, strict=True)
    ]


def alone(lm, groups, temperature, valid_vocab):
    """Log-probabilities and entropies of each sample alone under transformers' own attention."""
    lm.set_attn_implementation("sdpa")
    each = [plain_logprobs(lm, prompt, ids, temperature, valid_vocab) for prompt, own in groups for ids in own]
    return tuple(map(torch.cat, zip(*each, strict=True)))


def sample(prompt_index, response, reference=True):
    return training_sample(prompt_index, [1, 2], response, advantage=len(response) / 2, reference=reference)


def test_training_samples_share_the_prompt_of_their_neighbours_only():
    packed = pack_samples([sample(0, [5]), sample(0, [6, 7]), sample(1, [8]), sample(0, [9])], "cpu")
    assert packed.row.input_ids.tolist() == [[1, 2, 5, 6, 7, 1, 2, 8, 1, 2, 9]]
    assert packed.advantages.tolist() == [0.5, 1.0, 1.0, 0.5, 0.5]
    assert packed.engine_logprobs.tolist() == [-5.0, -6.0, -7.0, -8.0, -9.0]
    assert packed.reference.logprobs.tolist() == [-10.0, -12.0, -14.0, -16.0, -18.0]
    assert pack_samples([sample(0, [5], reference=False)], "cpu").reference is None
    with pytest.raises(ValueError, match="1 of 2 samples of a row have reference log-probabilities"):
        pack_samples([sample(0, [5]), sample(0, [6], reference=False)], "cpu")
    with pytest.raises(ValueError, match="none may be empty"):
        pack_samples([sample(0, [5]), sample(0, [])], "cpu")


@pytest.mark.parametrize("kept_copies", [0.0, 100.0])
def test_packed_forward_and_backward_equal_one_sample_at_a_time(kept_copies, monkeypatch):
    monkeypatch.setattr(row_cuts, "MAX_KEPT_COPIES", kept_copies)
    lm = tiny()
    groups = random_groups(1, [7, 1, 12], [[9, 3, 10, 8, 1, 30], [2], [5, 5, 5]])
    policy = PackedPolicy(lm, valid_vocab=60, chunk_tokens=11)
    row = pack_row(groups, "cpu")
    assert row.cuts.recompute == (kept_copies == 0.0)
    weights = torch.randn(len(row.labels), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logprobs, entropy, *_ = policy(row, 0.7)
    (logprobs * weights).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    lm.zero_grad()
    expected, expected_entropy = alone(lm, groups, 0.7, 60)
    (expected * weights).sum().backward()
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy.detach(), rtol=0, atol=1e-12)
    assert not entropy.requires_grad
    expected_gradients = {name: parameter.grad for name, parameter in lm.named_parameters()}
    assert_tensors_close(gradients, expected_gradients, rtol=1e-5, atol=1e-5)  # the norms round to float32 inside


@pytest.mark.parametrize("kept_copies", [0.0, 100.0])
@pytest.mark.parametrize("recomputed", [None, "full", "selective"])
def test_a_group_in_passes_behind_its_shared_prompt_equals_one_sample_at_a_time(kept_copies, recomputed, monkeypatch):
    monkeypatch.setattr(row_cuts, "MAX_KEPT_COPIES", kept_copies)
    lm = tiny()
    for prompt_tokens, passes in ((12, [[9, 3, 10], [8], [1, 30]]), (1, [[1], [2, 1]])):
        groups = random_groups(1, [prompt_tokens], [[length for lengths in passes for length in lengths]])
        (prompt, responses), ends = groups[0], np.cumsum([len(lengths) for lengths in passes])
        expected, expected_entropy = alone(lm, groups, 0.7, 60)
        weights = torch.randn(len(expected), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        lm.zero_grad()
        (expected * weights).sum().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
        lm.zero_grad()
        changed = copy.deepcopy(lm)
        if recomputed is not None:
            checkpoint_every(changed, 1, granularity=recomputed)
        policy = PackedPolicy(changed, valid_vocab=60, chunk_tokens=11)
        row = pack_prompt(prompt, "cpu")
        policy(row, 0.7)
        found = []
        for end, lengths in zip(ends, passes, strict=True):
            part = pack_row([(prompt, responses[end - len(lengths) : end])], "cpu", row.cuts.shared)
            logprobs, entropy, *_ = policy(part, 0.7)
            done = sum(len(values) for values, _ in found)
            (logprobs * weights[done : done + len(logprobs)]).sum().backward()
            found.append((logprobs.detach(), entropy))
        # a backend's scale of its losses is in the passes' gradients already
        (3.0 * row.cuts.shared.gradient_carrier()).backward()
        torch.testing.assert_close(
            torch.cat([logprobs for logprobs, _ in found]), expected.detach(), rtol=0, atol=1e-12
        )
        torch.testing.assert_close(
            torch.cat([entropy for _, entropy in found]), expected_entropy.detach(), rtol=0, atol=1e-12
        )
        found_gradients = {name: parameter.grad for name, parameter in changed.named_parameters()}
        assert_tensors_close(found_gradients, gradients, rtol=1e-5, atol=1e-5)  # the norms round to float32 inside


def test_in_16_bits_the_gradient_of_a_shared_prompt_is_summed_in_float32():
    shared = SharedPrompt(1)
    made = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    key, value = made * 1.0, made * 0.0
    module = torch.nn.Identity()
    shared.keep(module, key, value)
    shared.end(made * 0.0)
    for number in (256.0, *[1.0] * 256):  # of which bfloat16 would lose every one behind the first
        (shared.keys_and_values(module)[0] * number).sum().backward()
    shared.gradient_carrier().backward()
    assert made.grad.item() == 512.0
    with pytest.raises(RuntimeError, match="attends twice in one pass"):
        other = SharedPrompt(1)
        for _ in range(2):
            other.keep(module, key, value)


def random_lengths(generator):
    return generator.integers(1, 15, generator.integers(1, 9)).tolist()


@pytest.mark.parametrize("is_shared", [False, True], ids=["rows of prompts", "behind a shared prompt"])
def test_attention_of_random_rows_equals_a_dense_mask_with_gradients(is_shared):
    generator = np.random.default_rng(3)
    for _ in range(10):
        shared = SharedPrompt(int(generator.integers(1, 9)) if is_shared else 0)
        if is_shared:
            cuts = pack_row(random_groups(4, [shared.num_tokens], [random_lengths(generator)]), "cpu", shared).cuts
        else:
            lengths = [random_lengths(generator) for _ in range(generator.integers(1, 4))]
            cuts = pack_row(random_groups(4, generator.integers(1, 9, len(lengths)), lengths), "cpu").cuts
        spans = visible_spans(cuts.segments, cuts.num_tokens, shared.num_tokens)
        visible = mask_function(torch.from_numpy(spans))
        keys = torch.arange(shared.num_tokens + cuts.num_tokens)
        dense = visible(torch.tensor(0), torch.tensor(0), torch.arange(cuts.num_tokens)[:, None], keys[None])
        shapes = ((1, 4, cuts.num_tokens, 8), (1, 2, len(keys), 8), (1, 2, len(keys), 8))
        query, key, value = (torch.from_numpy(generator.normal(size=shape)).requires_grad_() for shape in shapes)
        upstream = torch.from_numpy(generator.normal(size=(1, cuts.num_tokens, 4, 8)))
        (first_k, own_k), (first_v, own_v) = (
            tensor.split([shared.num_tokens, cuts.num_tokens], 2) for tensor in (key, value)
        )
        prompt = (first_k, first_v) if is_shared else None
        folded = attention.folded_attention(query, own_k, own_v, 0.4, cuts, prompt)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=dense, scale=0.4, enable_gqa=True
        ).transpose(1, 2)
        torch.testing.assert_close(folded, expected, rtol=1e-10, atol=1e-12)
        gradients = (torch.autograd.grad(output, (query, key, value), upstream) for output in (folded, expected))
        for own, other in zip(*gradients, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


def test_many_short_responses_fold_into_few_calls_and_copies_stay_below_the_row():
    lengths = list(range(40, 120, 2)) * 4
    cuts = pack_row(random_groups(5, [60], [lengths]), "cpu").cuts
    assert sum(len(fold.index) for fold in cuts.folds) == 160
    assert len(cuts.folds) <= 30
    for fold in cuts.folds:
        assert len(fold.index) * (60 + fold.index.shape[1]) <= cuts.num_tokens
        assert fold.mask.numel() < 120 * 180  # never T x T


def test_a_head_is_multiplied_in_whole_steps_and_ids_beyond_the_tokenizer_get_no_probability_and_no_gradient():
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**(TINY_SIZES | {"vocab_size": 200}), head_dim=16)).double()
    row = pack_row(random_groups(7, [5], [[6, 3]]), "cpu")
    found = []
    for valid in (100, 128):
        policy = PackedPolicy(
            model, valid_vocab=valid, chunk_tokens=4, bad_token_ids=[] if valid == 100 else range(100, 128)
        )
        logprobs, *_ = policy(row, 0.7)
        head = policy.lm.get_output_embeddings().weight
        (gradient,) = torch.autograd.grad(logprobs.sum(), head)
        assert (policy._head_rows, gradient[100:].abs().max().item()) == (128, 0.0)
        found.append((logprobs.detach(), gradient))
    for narrow, wide in zip(*found, strict=True):
        assert torch.equal(narrow, wide)
    assert PackedPolicy(model, valid_vocab=999, chunk_tokens=4).valid_vocab == 200


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Qwen2Config(use_sliding_window=True, sliding_window=4, max_window_layers=0),
            "layers of type sliding_attention",
        ),
        (MambaConfig(), "layers that keep a state"),
        (LlamaConfig(sliding_window=16), "sliding_window=16"),
        (LlamaConfig(final_logit_softcapping=1.0), "final_logit_softcapping=1.0"),
        (LlamaConfig(logits_scaling=8.0), "logits_scaling=8.0"),
        (LlamaConfig(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0"),
    ],
)
def test_models_that_mix_tokens_otherwise_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        check_full_attention(config)


def test_attention_sinks_are_refused():
    query, key = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    cuts = row_cuts.build_cuts([row_cuts.Segment(prompt=(0, 3), responses=[(3, 5)])], "cpu")
    with pytest.raises(ValueError, match="attention sinks"):
        attention.packed_attention(torch.nn.Identity(), query, key, key, None, 0.25, cuts=cuts, s_aux=torch.zeros(4))


def test_a_head_with_a_bias_is_refused():
    sizes = {name: value for name, value in TINY_SIZES.items() if name != "num_key_value_heads"}
    with pytest.raises(ValueError, match="PhiForCausalLM has a head with a bias, which is not supported"):
        PackedPolicy(PhiForCausalLM(PhiConfig(**sizes)), valid_vocab=60, chunk_tokens=8)


@pytest.mark.parametrize("is_shared", [False, True], ids=["rows of prompts", "behind a shared prompt"])
def test_block_masks_are_those_that_flex_attention_makes_of_every_pair(is_shared):
    generator = np.random.default_rng(5)
    for _ in range(10):
        num_shared = int(generator.integers(1, 400)) if is_shared else 0
        segments, end = [], 0
        for _ in range(1 if is_shared else generator.integers(1, 4)):
            prompt = (0, num_shared) if is_shared else (end, end + int(generator.integers(1, 400)))
            ends = np.cumsum([0, *generator.integers(1, 500, generator.integers(1, 6))]) + (
                0 if is_shared else prompt[1]
            )
            segments.append(row_cuts.Segment(prompt=prompt, responses=list(itertools.pairwise(ends.tolist()))))
            end = segments[-1].end
        found = build_block_mask(segments, end, "cpu", num_shared)
        mask = mask_function(torch.from_numpy(visible_spans(segments, end, num_shared)))
        wanted = create_block_mask(mask, None, None, end, num_shared + end, device="cpu")
        names = [
            f"{full}{side}_{part}"
            for full in ("", "full_")
            for side in "q kv".split()
            for part in ("num_blocks", "indices")
        ]
        for name in names:
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name
        assert (found.seq_lengths, found.BLOCK_SIZE) == (wanted.seq_lengths, wanted.BLOCK_SIZE)


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """FlexAttention as torch traces it, without a compiler behind, and with gradients."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    attention._compiled_flex_attention.cache_clear()
    yield
    torch._dynamo.reset()
    attention._compiled_flex_attention.cache_clear()


@pytest.mark.slow  # torch traces nine times
def test_one_process_compiles_flex_attention_for_rows_of_all_kinds(flex_on_cpu):
    for num_tokens, needs_gradient in itertools.product((500, 700, 2), ("", "qv", "qkv")):
        cuts = dataclasses.replace(pack_prompt(np.arange(num_tokens), "cpu").cuts, shared=None)
        masked = dataclasses.replace(cuts, block_mask=build_block_mask(cuts.segments, num_tokens, "cpu"))
        tensors = [
            torch.randn(1, heads, num_tokens, 16, requires_grad=name in needs_gradient)
            for name, heads in zip("qkv", (4, 2, 2), strict=True)
        ]
        with torch.set_grad_enabled(bool(needs_gradient)):
            found, wanted = (
                attention.packed_attention(torch.nn.Identity(), *tensors, None, 0.25, cuts=each)[0]
                for each in (masked, cuts)
            )
        torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [3, 20, 100, 127, 200])
def test_short_rows_of_grouped_heads_run_flex_attention_on_cuda(num_tokens):
    results = []
    for device in (GPU, "cpu"):
        cuts = pack_prompt(np.arange(num_tokens), device).cuts
        generator = torch.Generator().manual_seed(1)
        tensors = [torch.randn(1, heads, num_tokens, 16, generator=generator).to(device) for heads in (4, 2, 2)]
        results.append(attention.packed_attention(torch.nn.Identity(), *tensors, None, 0.25, cuts=cuts)[0].cpu())
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)  # TF32 inside the kernels


@pytest.mark.gpu
def test_flex_attention_on_cuda_equals_the_folded_form():
    groups = random_groups(6, [70, 9], [[130, 40, 41, 90], [20, 3]])
    on_gpu, on_cpu = (pack_row(groups, device).cuts for device in (GPU, "cpu"))
    assert on_gpu.block_mask is not None or GPU == "cpu"
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 8, on_cpu.num_tokens, 64), (1, 2, on_cpu.num_tokens, 64), (1, 2, on_cpu.num_tokens, 64))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    results = []
    for device, cuts in ((GPU, on_gpu), ("cpu", on_cpu)):
        q, k, v = (tensor.to(device).requires_grad_() for tensor in tensors)
        output, _ = attention.packed_attention(torch.nn.Identity(), q, k, v, None, 0.125, cuts=cuts)
        output.square().sum().backward()
        results.append([output.detach().cpu(), q.grad.cpu(), k.grad.cpu(), v.grad.cpu()])
    for gpu, cpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=2e-2, atol=2e-2)  # TF32 inside the kernels

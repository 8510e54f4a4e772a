"""The decoder of the CUDA path on CPU: the same as transformers' modules, weights joined in place, compiled once for
all layers and rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from infsample_rl.rollout.engine import attention
from infsample_rl.rollout.engine.decoder import FusedDecoder, joined
from infsample_rl.rollout.engine.model_runner import ModelRunner
from tests import engines
from tests.engines import PROMPTS, assert_logprobs_close, tokens_of

VARIANTS = ("qwen3", "qwen3 with biases", "qwen2", "llama", "llama with biases")


@torch.inference_mode()
def run(runner, decoder, tokens):
    """Last hidden states of `tokens` at position 3 after two tokens of KV, each row's own."""
    num_rows = len(tokens)
    rows, prompt = torch.arange(num_rows), [(torch.tensor([[num_rows]]), 2, None)]
    runner.kv.store.copy_(torch.randn(runner.kv.store.shape, generator=torch.Generator().manual_seed(1)))
    step = attention.GatherStep(runner.kv, rows * 8, rows[:, None], None, prompt)
    positions = torch.full((num_rows,), 3)
    if decoder is None:
        return runner._forward(tokens[:, None], positions[:, None], step)[:, 0]
    return decoder(tokens, positions, step)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_gives_what_transformers_modules_give(make_variant, variant):
    runner = ModelRunner(make_variant(variant))
    runner.allocate(9, 8)
    tokens = torch.tensor([5, 60, 7])
    wanted = run(runner, None, tokens)
    for decoder in (FusedDecoder(runner.model, joins=False), FusedDecoder(runner.model)):
        torch.testing.assert_close(run(runner, decoder, tokens), wanted, atol=2e-5, rtol=0)


def test_joined_parameters_keep_values_names_and_identity(make_variant, tmp_path):
    model = make_variant("llama with biases")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    with torch.inference_mode():  # as the runner constructs it
        FusedDecoder(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(again[name], value) for name, value in before.items())


def test_there_is_no_second_copy_and_a_second_decoder_shares_the_first_one_s(make_model):
    model = make_model()
    FusedDecoder(model)
    attention_layer, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    for group in (
        [attention_layer.q_proj, attention_layer.k_proj, attention_layer.v_proj],
        [mlp.gate_proj, mlp.up_proj],
    ):
        storages = {
            linear.weight.untyped_storage().data_ptr(): linear.weight.untyped_storage().nbytes() for linear in group
        }
        assert list(storages.values()) == [sum(linear.weight.nbytes for linear in group)]
    places = [parameter.data_ptr() for parameter in model.parameters()]
    second = FusedDecoder(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert second._ins[1].weights[0].data_ptr() == attention_layer.q_proj.weight.data_ptr()
    assert second._ins[1].weights[0].shape == (4 * 16 + 2 * 2 * 16, 64)


def test_loading_in_place_reaches_the_joined_weights(make_model):
    model, other = make_model(), make_model("qwen3", initializer_range=0.3)
    runner = ModelRunner(model)
    runner.allocate(9, 8)
    decoder = FusedDecoder(model)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
            parameter.copy_(value)
    tokens = torch.tensor([5, 60, 7])
    torch.testing.assert_close(run(runner, decoder, tokens), run(runner, None, tokens), atol=2e-5, rtol=0)


def test_neighbours_in_memory_of_other_storages_are_not_taken_for_joined():
    whole = torch.arange(12.0).view(6, 2)
    parameters = [torch.nn.Parameter(whole[2:4]), torch.nn.Parameter(whole[:2])]  # one storage, other order
    assert torch.equal(joined(parameters), torch.cat([whole[2:4], whole[:2]]))
    assert parameters[1].data_ptr() - parameters[0].data_ptr() == 16


make_engine = partial(engines.make_engine, max_new_tokens=16, prompts_at_once=2)


def compiled_engine(model, tokenizer, **settings):
    """An engine whose steps are those of CUDA, compiled for the CPU."""
    engine = make_engine(model, tokenizer, **settings)
    engine.runner.decoder = FusedDecoder(model)
    engine.pool.graphs.is_used = engine.pool.graphs.compiles = True
    torch._dynamo.reset()
    return engine


@pytest.mark.slow  # Inductor compiles C++ for some twenty seconds
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8, "bad_token_ids": [1]}], ids=str)
def test_the_compiled_step_gives_the_eager_result(make_model, make_tokenizer, settings):
    model, tokenizer = make_model(), make_tokenizer(60)
    wanted = make_engine(model, tokenizer, **settings).generate(PROMPTS, seed=3)
    engine = compiled_engine(model, tokenizer, **settings)
    found = engine.generate(PROMPTS, seed=3)
    assert tokens_of(found) == tokens_of(wanted)
    assert_logprobs_close(found, wanted, 1e-5)
    (graphs,) = engine.pool.graphs._kept.values()
    assert len([rows for rows in graphs._graphs if rows > 1]) > 2
    for function in (graphs.runner.decoder._between, graphs._draw):  # 1 row and any other number, for all layers
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(function._torchdynamo_orig_callable.__code__)
        assert 1 <= len(entries) <= 2


@pytest.mark.gpu
def test_joined_weights_leave_none_of_their_pieces_in_the_allocator(make_variant):
    sizes = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4}  # pieces of 16 MB in bfloat16
    model = make_variant("llama", **sizes).to("cuda", torch.bfloat16)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    FusedDecoder(model)
    of_layer = 2 * sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert torch.cuda.memory_reserved() - before < 0.5 * of_layer
    assert torch.cuda.max_memory_reserved() - before < 2 * of_layer

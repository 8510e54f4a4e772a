"""Requests at the edge of what is allowed, and models that decode in another way than they read."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from infsample_rl.config import RolloutConfig
from tests.engines import make_engine, tokens_of

BARRED = ("fixed_slot", "naive", "fptas")  # every slot has its own samples
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
SMALL |= {"vocab_size": 64, "pad_token_id": 0}


def engine_of(model, tokenizer, **settings):
    return make_engine(model, tokenizer, stop=None, **({"predictor": "none", "slots": 4} | settings))


@pytest.mark.parametrize("schedule", BARRED)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 16, "kv_budget_tokens": 32},  # two pages, the fewest that work, for four slots
        {"max_new_tokens": 32, "page_size": 1024, "kv_budget_tokens": 3072},
    ],
)
def test_slots_beyond_the_pool_are_left_out(make_model, make_tokenizer, schedule, settings):
    model, common = make_model(), {"group_size": 8}
    engine = engine_of(model, make_tokenizer(), schedule=schedule, **common, **settings)
    roomy = engine_of(
        model, make_tokenizer(), max_new_tokens=settings["max_new_tokens"], schedule="token_budget", **common
    )
    assert tokens_of(engine.generate([[1] * 8], 0)) == tokens_of(roomy.generate([[1] * 8], 0))


def test_part_of_an_evaluation_under_dynamic_slot(make_model, make_tokenizer):
    engine = engine_of(make_model(), make_tokenizer(), group_size=8, schedule="dynamic_slot", max_new_tokens=4)
    found = engine.generate([[1] * 3], 0, sample_indices=[[0, 2]], evaluation=True)
    assert [each.sample_index for each in found[0]] == [0, 2]
    with pytest.raises(ValueError, match="contiguous"):
        engine.generate([[1] * 3], 0, sample_indices=[[0, 2]])


def test_auto_budget_grows_with_the_longest_prompt(make_model, make_tokenizer):
    settings = {"group_size": 4, "max_new_tokens": 16, "kv_budget_bytes": "auto"}
    engine = engine_of(make_model(max_position_embeddings=1024), make_tokenizer(), **settings)
    short = engine.generate([[1] * 5], 0)
    pages = engine.runner.kv.num_pages
    assert len(engine.generate([[1] * 300], 0)[0]) == 4
    assert engine.runner.kv.num_pages > pages
    assert tokens_of(engine.generate([[1] * 5], 0)) == tokens_of(short)


@pytest.mark.parametrize("schedule", BARRED)
def test_a_prompt_that_waits_for_the_pages_of_an_idle_one_does_not_stop_all(make_model, make_tokenizer, schedule):
    """Prompt 1 has nothing for slot 1, and does not fit beside prompt 2, which starts there."""
    settings = {"group_size": 2, "slots": 3, "prompts_at_once": 4, "page_size": 1, "max_new_tokens": 1}
    settings |= {"kv_budget_tokens": 36}
    engine = engine_of(make_model(), make_tokenizer(), schedule=schedule, **settings)
    found = engine.generate([[1], [2] * 26, [3] * 25], 0, sample_indices=[[0], [0], [0, 1]])
    assert [len(group) for group in found] == [1, 1, 2]


@pytest.mark.parametrize("temperature", [1e-39, 0.0009, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_logits_cannot_be_divided_by(make_model, make_tokenizer, temperature):
    engine = engine_of(make_model(), make_tokenizer(), group_size=2, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"temperature must be 0 .* or >= 0.001"):
        engine.generate([[1]], 0, temperature=temperature)
    if 0 < temperature < 1:
        with pytest.raises(ValueError, match=r"rollout.temperature must be 0 .* or >= 0.001"):
            RolloutConfig(temperature=temperature)


def test_longrope_ends_where_its_short_factors_do(make_model, make_tokenizer):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model = make_model("llama", rope_parameters=rope | {"original_max_position_embeddings": 32})
    engine = engine_of(model, make_tokenizer(), group_size=2, max_new_tokens=12)
    engine.generate([[1] * 20], 0)
    with pytest.raises(ValueError, match="context of 32"):
        engine.generate([[1] * 21], 0)


def test_a_context_that_a_family_calls_otherwise_bounds_requests_too(make_tokenizer):
    config = AutoConfig.for_model("gpt2", vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=64, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    engine = engine_of(model, make_tokenizer(), group_size=2, max_new_tokens=32)
    engine.generate([[1] * 20], 0)
    with pytest.raises(ValueError, match="context of 64"):
        engine.generate([[1] * 60], 0)


def test_models_that_decode_in_another_way_are_refused(make_tokenizer):
    def refused(family, match, dtype=torch.float32, **settings):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SMALL | settings)), dtype=dtype).eval()
        with pytest.raises(ValueError, match=match):
            engine_of(model, make_tokenizer(), group_size=2, max_new_tokens=4)

    grouped = {"num_key_value_heads": 2, "head_dim": 16}
    refused("diffllama", "gives something else", **grouped, initializer_range=0.2)
    state = {"lru_width": 64, "attention_window_size": 64, "num_hidden_layers": 3, "head_dim": 16}
    refused("recurrent_gemma", "layers that keep a state", torch.bfloat16, **state)
    refused("nemotron", "cannot decode over a pool", **grouped)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    refused("gpt_oss", "attention sinks", **grouped, **experts, layer_types=["full_attention"] * 2)

"""LoRA adapters in a plain model: where they go, what merging gives, and what peft reads of them."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from infsample_rl.commands import merge
from infsample_rl.config import LearnerConfig, ModelConfig
from infsample_rl.model.lora import (
    ReceivedAdapters,
    adapter_parameters,
    adapters_off,
    add_adapters,
    check_lora,
    merge_weight,
    merged_parameters,
    save_adapter_folder,
    target_names,
)
from tests.configs import run_config
from tests.tiny_models import TINY_SIZES, assert_tensors_close, save_words

LEARNER = LearnerConfig(lora_rank=4, lora_alpha=8.0)
IDS = torch.tensor([[5, 9, 7, 11, 4, 2]])


def tiny(**changes):
    torch.manual_seed(3)
    sizes = TINY_SIZES | {"head_dim": 16, "initializer_range": 0.15} | changes
    return Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()


def trained(lm, learner=LEARNER, seed=0):
    """Adapters as after some updates: B is not zero."""
    adapted = add_adapters(lm, learner, seed=seed, path="base")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted


def test_all_linear_takes_every_projection_but_not_the_head():
    parts = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
    assert target_names(tiny(), ["all-linear"]) == [
        f"model.layers.{layer}.{part}" for layer in (0, 1) for part in parts
    ]
    assert target_names(tiny(), ["layers.1.self_attn.q_proj", "v_proj"]) == [
        *("model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"),
    ]


@pytest.mark.parametrize("target", ["qproj", "lm_head", "embed_tokens", "norm", "_proj", None])
def test_a_target_that_names_no_linear_layer_is_refused_with_those_there_are(target):
    there = "there are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(
        ValueError, match=f"learner.lora_targets: {target or 'nothing'} names no linear layer .*; {there}$"
    ):
        target_names(tiny(), ["q_proj", target] if target else [])


@pytest.mark.parametrize("target", ["all-linear", "c_attn"])
def test_a_model_whose_layers_are_no_linear_ones_is_refused(target):
    sizes = {"vocab_size": 8, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    lm = GPT2LMHeadModel(GPT2Config(**sizes))  # whose products are of Conv1D
    with pytest.raises(ValueError, match=f"learner.lora_targets: {target} names no linear layer .*; there are none$"):
        target_names(lm, [target])


def test_adapters_come_from_the_seed_alone_and_start_as_the_base():
    lm, twin, other = tiny(), tiny(), tiny()
    with torch.no_grad():
        before = lm(IDS).logits
    add_adapters(lm, LEARNER, seed=0, path="base")
    torch.rand(7)  # whatever was drawn before
    state = torch.get_rng_state()
    add_adapters(twin, LEARNER, seed=0, path="base")
    assert torch.equal(state, torch.get_rng_state())
    add_adapters(other, LEARNER, seed=1, path="base")
    with torch.no_grad():
        assert torch.equal(lm(IDS).logits, before)
    adapters, again, others = (dict(adapter_parameters(model.named_parameters())) for model in (lm, twin, other))
    assert len(adapters) == 28 and all(torch.equal(value, again[name]) for name, value in adapters.items())
    assert not torch.equal(
        adapters["model.layers.0.mlp.up_proj.lora_A.weight"], others["model.layers.0.mlp.up_proj.lora_A.weight"]
    )
    assert [name for name, parameter in lm.named_parameters() if parameter.requires_grad != ("lora_" in name)] == []


def test_16_bit_weights_stay_and_adapters_are_float32():
    lm = tiny().to(torch.bfloat16)
    add_adapters(lm, LEARNER, seed=0, path="base")
    assert {(parameter.requires_grad, parameter.dtype) for parameter in lm.parameters()} == {
        (True, torch.float32),
        (False, torch.bfloat16),
    }


def test_adapters_off_gives_exactly_the_base_and_leaves_everything_trained():
    lm = tiny()
    with torch.no_grad():
        base = lm(IDS).logits
        adapted = trained(lm)
        on = lm(IDS).logits
        with adapters_off(adapted):
            assert torch.equal(lm(IDS).logits, base)
            assert sum(parameter.requires_grad for parameter in lm.parameters()) == 28
        assert torch.equal(lm(IDS).logits, on) and not torch.allclose(on, base, atol=1e-3)
    assert sum(parameter.requires_grad for parameter in lm.parameters()) == 28


def test_a_merged_weight_is_rounded_once():
    weight, a, b = (
        torch.tensor([[1.0, 256.0]]).bfloat16(),
        torch.tensor([[3.0, 1.0]]).bfloat16(),
        torch.tensor([[2.0]]).bfloat16(),
    )
    assert merge_weight(weight, a, b, 0.25).tolist() == [[2.5, 256.0]]  # 256.5 is 256 in bfloat16
    assert merge_weight(weight.float(), a, b, 0.25).tolist() == [[2.5, 256.5]]


@pytest.mark.parametrize("bias", [False, True])
def test_merged_parameters_are_the_plain_models_in_its_order_and_equal_pefts_merge(bias):
    lm = tiny(attention_bias=bias)
    names = [name for name, _ in lm.named_parameters()]
    adapted = trained(lm)
    merged = dict(merged_parameters(lm.named_parameters(), 2.0))
    assert list(merged) == names
    adapters = [name for name, _ in adapter_parameters(lm.named_parameters())]
    assert len(adapters) == 28 and all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in adapters)
    theirs = dict(copy.deepcopy(adapted).merge_and_unload().named_parameters())
    assert_tensors_close(merged, theirs, rtol=0, atol=1e-6)


def test_an_engine_that_is_sent_adapters_holds_bit_for_bit_what_it_would_be_sent_merged():
    for dtype in (torch.float32, torch.bfloat16):
        engine, lm = tiny().to(dtype), tiny().to(dtype)
        untouched = {name: parameter.clone() for name, parameter in engine.named_parameters()}
        received = ReceivedAdapters(engine, LEARNER)
        trained(lm)
        lm.to(dtype)
        sent = dict(adapter_parameters(lm.named_parameters()))
        own = received.received
        assert list(own) == list(sent) and {value.dtype for value in own.values()} == {dtype}
        for factor in (3, 1):  # a version before: nothing of it stays
            for name, value in sent.items():
                own[name].copy_(value * factor)
            received.merge()
        merged = dict(merged_parameters(lm.named_parameters(), 2.0))
        for name, parameter in engine.named_parameters():
            assert torch.equal(parameter, merged[name]), name
            assert torch.equal(parameter, untouched[name]) == ("_proj" not in name)


@pytest.fixture
def saved(tmp_path):
    """A base folder, a checkpoint of adapters on it, and the model that was saved."""
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint"
    tiny().save_pretrained(base)
    tokenizer = save_words(base)
    lm = tiny()
    adapted = trained(lm)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    save_adapter_folder(checkpoint, adapted, lm.named_parameters(), tokenizer, rank=1)
    assert not checkpoint.exists()
    save_adapter_folder(checkpoint, adapted, lm.named_parameters(), tokenizer, rank=0)
    return base, checkpoint, lm


def test_peft_and_transformers_load_the_saved_folder(saved):
    from peft import AutoPeftModelForCausalLM, PeftModel

    base, checkpoint, lm = saved
    plain = AutoModelForCausalLM.from_pretrained(base)
    loaded = [PeftModel.from_pretrained(plain, checkpoint), AutoPeftModelForCausalLM.from_pretrained(checkpoint)]
    loaded.append(AutoModelForCausalLM.from_pretrained(checkpoint))
    with torch.no_grad():
        expected = lm(IDS).logits[..., :60]
        for model in loaded:
            assert torch.equal(model.eval()(IDS).logits[..., :60], expected)


def settings_for(base, **learner):
    return run_config(model={"path": str(base)}, learner=replace(LEARNER, **learner))


def test_a_checkpoint_of_other_adapters_is_refused_before_any_model_is_loaded(saved):
    base, checkpoint, _ = saved
    architecture = tiny().config
    check_lora(settings_for(base), architecture, checkpoint)
    wrong = {
        "learner.lora_rank must be 4 to go on with checkpoint .*, which holds LoRA adapters, got 0; "
        ".*python -m infsample_rl merge": {"lora_rank": 0},
        "learner.lora_rank must be 4 to go on with checkpoint .*, got 8": {"lora_rank": 8},
        "learner.lora_alpha must be 8 to go on with checkpoint .*, got 16": {"lora_alpha": 16.0},
        "lora_targets=.'q_proj'. are 2 layers, checkpoint .* has adapters on 14; only one of them has .*down_proj": {
            "lora_targets": ["q_proj"]
        },
    }
    for message, settings in wrong.items():
        with pytest.raises(ValueError, match=message):
            check_lora(settings_for(base, **settings), architecture, checkpoint)
    with pytest.raises(
        ValueError, match="learner.lora_rank must be 0 to go on with checkpoint .*, which has no adapter_config.json"
    ):
        check_lora(settings_for(base), architecture, base)


def test_the_merge_command_writes_the_weights_that_sampled(saved, tmp_path, monkeypatch):
    base, checkpoint, lm = saved
    monkeypatch.setattr("sys.argv", ["merge", str(checkpoint), str(tmp_path / "out")])
    assert merge.main() == 0
    expected = dict(merged_parameters(lm.named_parameters(), 2.0))
    for name, parameter in AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 60


def test_a_folder_that_peft_saved_is_merged_with_the_base_models_tokenizer(saved, tmp_path):
    _, checkpoint, _ = saved
    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    assert merge.main([str(checkpoint), str(tmp_path / "out")]) == 0
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 60


def test_adapters_that_transformers_puts_beside_the_weights_are_refused(saved, monkeypatch):
    _, checkpoint, _ = saved
    monkeypatch.setattr(merge, "holds_adapters", lambda _: False)  # it looks into folders, not into the hub
    told = f"CHECKPOINT={checkpoint} holds adapters alone, .* hf download {checkpoint} --local-dir FOLDER"
    with pytest.raises(ValueError, match=told):
        merge.load_policy_folder(ModelConfig(path=str(checkpoint)))


def test_the_merge_command_refuses_what_it_cannot_merge(saved, tmp_path, refused):
    base, checkpoint, _ = saved
    assert f"CHECKPOINT={base} has no adapter_config.json" in refused(merge.main, str(base), str(tmp_path / "out"))
    assert f"OUT={base} must be a new or an empty folder" in refused(merge.main, str(checkpoint), str(base))
    assert "OUT= must be a new or an empty folder" in refused(merge.main, str(checkpoint), "")
    path = checkpoint / "adapter_config.json"
    settings = json.loads(path.read_text())
    assert (settings["base_model_name_or_path"], settings["r"], settings["lora_alpha"]) == (str(base), 4, 8.0)
    for own, said in (
        ({"use_dora": True}, "use_dora"),
        ({"alora_invocation_tokens": [5, 9]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights=lora_ga"),
    ):
        path.write_text(json.dumps(settings | own))
        told = f"is not plain LoRA ({said}): merge it with peft itself"
        assert told in refused(merge.main, str(checkpoint), str(tmp_path / "out"))


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.clear(), "adapter_model.safetensors holds no adapters"),
        (lambda tensors: tensors.pop(f"{LAYER}.lora_B.weight"), f"adapts {LAYER}, but base model and adapter"),
        (lambda tensors: tensors.update({f"{LAYER}x.lora_A.weight": torch.zeros(4, 4)}), f"adapts {LAYER}x, but base"),
        (lambda tensors: tensors.update({f"{LAYER}.lora_A.weight": torch.zeros(4, 3)}), f"adapts {LAYER}, but base"),
        (lambda tensors: tensors[f"{LAYER}.lora_B.weight"].fill_(math.nan), f"the adapter of {LAYER} is not finite"),
    ],
)
def test_damaged_adapters_are_named(saved, tmp_path, refused, change, said):
    checkpoint = shutil.copytree(saved[1], tmp_path / "damaged")
    tensors = {name: tensor.clone() for name, tensor in load_file(checkpoint / "adapter_model.safetensors").items()}
    change(tensors)
    save_file(tensors, checkpoint / "adapter_model.safetensors")
    assert said in refused(merge.main, str(checkpoint), str(tmp_path / "out"))
    (checkpoint / "adapter_model.safetensors").write_bytes(b"junk")
    assert "adapter_model.safetensors cannot be read" in refused(merge.main, str(checkpoint), str(tmp_path / "out"))
    for content, wrong in (
        ("{", "cannot be read"),
        ("[]", "does not describe adapters"),
        ("{}", "it has no peft_type, r, lora_alpha"),
    ):
        (checkpoint / "adapter_config.json").write_text(content)
        assert wrong in refused(merge.main, str(checkpoint), str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, ""),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "lora_B.bias, which is no adapter of a linear layer"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head, whose weight is the embedding too"),
        ({"target_modules": ["q_proj"], "layer_replication": [(0, 2), (0, 2)]}, "layer_replication"),
        ({"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
    ],
)
def test_a_peft_folder_is_merged_as_peft_means_it_or_refused(settings, said, tmp_path):
    tiny(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.05)
    adapted.save_pretrained(tmp_path / "adapters")
    if said:
        with pytest.raises(ValueError, match=said):
            merge.load_merged(tmp_path / "adapters")
        return
    with torch.no_grad():
        torch.testing.assert_close(
            merge.load_merged(tmp_path / "adapters")(IDS).logits, adapted.eval()(IDS).logits, rtol=0, atol=1e-4
        )

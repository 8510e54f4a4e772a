"""A rank reads the slices of its own shards: bitwise the weights of the whole model, or the whole model is loaded."""

import importlib.util
import json
import re
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config

import infsample_rl
from infsample_rl.config import LearnerConfig, ModelConfig
from infsample_rl.learner.deepspeed_backend import DeepSpeedBackend
from infsample_rl.learner.policy_loading import load_policy
from infsample_rl.model.loading import load_model
from infsample_rl.model.logprobs import packed_policy
from infsample_rl.model.weight_slices import NotSliceable, check_weights, load_outline, materialize
from tests.learner_ranks import Scenario, run_ranks

KK_TINY = str(Path(infsample_rl.__file__).parent / "assets" / "kk_tiny" / "policy")
LEARNER = LearnerConfig(lr=1e-3, max_tokens_per_micro_batch=256, logprob_chunk_tokens=7)
LORA = replace(LEARNER, lora_rank=3, lora_alpha=6.0)
ZERO_3 = {"backend": "deepspeed", "zero_stage": 3}
# FSDP2, and where DeepSpeed is installed its stage 3, whose masters in 16 bits come from the files too.
SHARDED = {"fsdp": {}}
if importlib.util.find_spec("deepspeed") is not None:
    SHARDED |= {"zero 3": ZERO_3}
# Models, and what each computes in: both precisions with tied and untied heads, and from files in 16 bits.
DTYPES = {"kk_tiny": "float32", "tied": "bfloat16", "untied": "float32", "bfloat16 files": "bfloat16"}


def loaded_whole(path, dtype=torch.float32):
    """What from_pretrained gives."""
    return load_model(ModelConfig(path=path), dtype=dtype)


@pytest.fixture(scope="module")
def two_ranks(tools, tied_policy, untied_policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices")
    paths = {"kk_tiny": KK_TINY, "tied": tied_policy, "untied": untied_policy}
    paths["bfloat16 files"] = str(folder / "bfloat16")
    loaded_whole(untied_policy, torch.bfloat16).save_pretrained(paths["bfloat16 files"], max_shard_size="20KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(untied_policy) / name, paths["bfloat16 files"])
    calls = {"whole": [("found", ()), ("parameters", ())], "LoRA": [("found", ()), ("full_parameters", ())]}
    scenarios = {}
    for sharded, settings in SHARDED.items():
        for name, path in paths.items():
            learner, dtype = replace(LEARNER, **settings), DTYPES[name]
            config = tools.make_config(path, learner=learner, dtype=dtype, ranks=2)
            scenarios[sharded, name] = Scenario(config, calls["whole"])
        for name in ("tied", "untied"):
            learner = replace(LORA, **settings)
            config = tools.make_config(paths[name], learner=learner, dtype="bfloat16", ranks=2)
            scenarios[sharded, "LoRA", name] = Scenario(config, calls["LoRA"])
    return paths, run_ranks(folder, scenarios, 2)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("sharded", SHARDED)
def test_shards_read_in_slices_are_bitwise_the_whole_model(two_ranks, sharded, name):
    paths, ranks = two_ranks
    expected = dict(loaded_whole(paths[name]).named_parameters())
    for rank in ranks:
        setup, found = rank[sharded, name]
        assert setup["loaded"] == "in slices"
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("sharded", SHARDED)
def test_adapters_on_an_outline_are_those_on_the_whole_model(tools, two_ranks, sharded, name):
    paths, ranks = two_ranks
    alone = tools.run_here(tools.make_config(paths[name], learner=LORA, dtype="bfloat16"), [("full_parameters", ())])[0]
    for rank in ranks:
        setup, found = rank[sharded, "LoRA", name]
        assert setup["loaded"] == "in slices"
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[key], value) for key, value in alone.items())


@pytest.mark.parametrize("path", [KK_TINY, "tied", "untied"])
def test_an_outline_made_real_is_the_whole_model_buffers_and_ties_too(tied_policy, untied_policy, path):
    path = {"tied": tied_policy, "untied": untied_policy}.get(path, path)
    whole, (lm, slices) = loaded_whole(path), load_outline(ModelConfig(path=path), dtype=torch.float32)
    materialize(lm, "cpu")
    for name, parameter in lm.named_parameters():
        slices.read(name, parameter)
    ids = torch.arange(2, 40)[None]
    assert torch.equal(lm(ids).logits, whole(ids).logits)
    assert lm.state_dict().keys() == whole.state_dict().keys()
    assert (lm.lm_head.weight is lm.model.embed_tokens.weight) is whole.config.tie_word_embeddings
    assert all(torch.equal(found, value) for found, value in zip(lm.buffers(), whole.buffers(), strict=True))
    assert lm.generation_config.to_dict() == whole.generation_config.to_dict()
    assert not lm.training


@pytest.mark.skipif("zero 3" not in SHARDED, reason="needs deepspeed")
def test_the_buffers_of_a_partitioned_outline_are_on_the_device_of_its_parameters(tools, untied_policy, monkeypatch):
    import deepspeed

    monkeypatch.setattr(deepspeed.zero, "Init", lambda **_: None)
    config, device = tools.make_config(untied_policy, learner=LEARNER), torch.device("meta")  # for one that is no CPU
    lm, slices = load_outline(config.model, dtype=torch.float32)
    policy = packed_policy(config, lm, 60)
    backend = SimpleNamespace(names=dict(lm.named_parameters()))
    assert {buffer.device.type for buffer in policy.buffers()} == {"cpu"} and policy.masked is not None
    DeepSpeedBackend._partition(backend, policy, slices, {}, device=device, dtype=torch.float32)
    assert {buffer.device.type for buffer in policy.buffers()} == {"meta"}


def copied(path, folder, change):
    """The model of `path` at `folder`, with changed tensors."""
    shutil.copytree(path, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_head_beside_tied_embeddings_may_be_in_the_files_when_it_is_equal(tied_policy, tmp_path):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    path = copied(tied_policy, tmp_path / "equal", add)
    lm, _ = load_outline(ModelConfig(path=path), dtype=torch.float32)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    path = copied(path, tmp_path / "other", lambda tensors: tensors["lm_head.weight"].add_(1.0))
    with pytest.raises(NotSliceable, match="tied, and differ"):
        load_outline(ModelConfig(path=path), dtype=torch.float32)


def renamed(tensors):
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (renamed, "have no model.embed_tokens.weight"),
        (lambda tensors: tensors.update({"x.LayerNorm.gamma": torch.zeros(1)}), "converts x.LayerNorm.gamma"),
    ],
)
def test_files_that_transformers_would_convert_are_loaded_whole(tools, untied_policy, tmp_path, change, reason):
    path = copied(untied_policy, tmp_path / "model", change)
    config = tools.make_config(path, learner=LEARNER, ranks=2)
    policy = load_policy(config, torch.device("cpu"), None, in_slices=True)
    assert policy.slices is None
    assert policy.how.startswith("whole on every rank: ")
    assert reason in policy.how
    assert not any(parameter.is_meta for parameter in policy.lm.parameters())


def pruned(tensors):
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize("in_slices", [True, False])
def test_files_that_lack_weights_are_refused_not_completed_with_random_numbers(
    tools, untied_policy, tmp_path, in_slices
):
    path = copied(untied_policy, tmp_path / "model", pruned)
    lacks = f"model.path={path}: its files have no model.layers.1.mlp.up_proj.weight and 1 more, which its config.json"
    with pytest.raises(ValueError, match=re.escape(lacks)):
        load_policy(tools.make_config(path, learner=LEARNER, ranks=2), torch.device("cpu"), None, in_slices=in_slices)
    with pytest.raises(ValueError, match=re.escape(lacks)):
        check_weights(ModelConfig(path=path))


def test_weights_of_another_shape_than_the_config_says_are_refused(untied_policy, tmp_path):
    path = copied(untied_policy, tmp_path / "model", lambda tensors: None)
    config = Path(path, "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 40}))
    said = r"model.layers.0.mlp.down_proj.weight is \[\d+, \d+\] in its files, its config.json asks for \[\d+, 40\]"
    with pytest.raises(ValueError, match=said):
        check_weights(ModelConfig(path=path))


def test_what_files_hold_beside_the_model_is_named_and_a_head_that_is_tied_is_none_of_it(
    tied_policy, untied_policy, tmp_path, monkeypatch
):
    add = {"model.layers.9.mlp.up_proj.weight": torch.zeros(1), "extra": torch.zeros(1)}
    path = copied(untied_policy, tmp_path / "more", lambda tensors: tensors.update(add))
    said = "extra and 1 more of the files of model.path are left out: its config.json asks for no such weights"
    assert check_weights(ModelConfig(path=path)) == [said]
    monkeypatch.setattr(type(loaded_whole(path)), "_keys_to_ignore_on_load_unexpected", [r"layers\.9", "extra"])
    assert check_weights(ModelConfig(path=path)) == []
    head = {"lm_head.weight": torch.zeros(1)}
    path = copied(tied_policy, tmp_path / "both", lambda tensors: tensors.update(head))
    assert check_weights(ModelConfig(path=path)) == check_weights(ModelConfig(path=tied_policy)) == []


def test_weights_that_the_class_may_do_without_are_not_asked_for(untied_policy, tmp_path, monkeypatch):
    path = copied(untied_policy, tmp_path / "model", pruned)
    monkeypatch.setattr(type(loaded_whole(untied_policy)), "_keys_to_ignore_on_load_missing", ["norm", "up_proj"])
    assert check_weights(ModelConfig(path=path)) == []
    loaded_whole(path)  # as transformers has it


def test_tied_embeddings_may_lie_in_the_files_as_the_head(tied_policy, tmp_path):
    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    path = copied(tied_policy, tmp_path / "head", rename)
    assert check_weights(ModelConfig(path=path)) == []
    assert torch.equal(loaded_whole(path).lm_head.weight, loaded_whole(tied_policy).lm_head.weight)


def test_weights_that_only_loading_can_tell_are_left_to_it(untied_policy, tmp_path):
    for name, change in [
        ("renamed", renamed),
        ("converted", lambda tensors: tensors.update({"x.LayerNorm.gamma": torch.zeros(1)})),
    ]:
        assert check_weights(ModelConfig(path=copied(untied_policy, tmp_path / name, change))) == []


def test_a_model_that_is_no_causal_one_is_left_to_loading_which_says_so_in_a_line(tmp_path):
    T5Config(num_layers=1, d_model=8, d_ff=8, num_heads=1, d_kv=8, vocab_size=8).save_pretrained(tmp_path)
    save_file({"shared.weight": torch.zeros(8, 8)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert check_weights(ModelConfig(path=str(tmp_path))) == []
    with pytest.raises(ValueError, match="no causal language model could be loaded from this folder") as refused:
        loaded_whole(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_weights_that_are_not_there_yet_are_not_fetched_to_be_checked(monkeypatch):
    asked = []
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given: asked.append(given) or [])
    assert check_weights(ModelConfig(path="somebody/something")) == asked == []


def test_damaged_weights_are_refused_in_a_line(untied_policy, tmp_path):
    path = Path(copied(untied_policy, tmp_path / "cut", lambda _: None))
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"model.path={path}: no weights could be loaded .*not fully covered"):
        check_weights(ModelConfig(path=str(path)))


def test_a_file_of_several_that_is_not_there_is_named(untied_policy, tmp_path):
    loaded_whole(untied_policy).save_pretrained(tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"^model.path={tmp_path}: no weights could be loaded .*{gone.name}"):
        check_weights(ModelConfig(path=str(tmp_path)))


def test_bin_files_are_loaded_whole(tools, untied_policy, tmp_path):
    folder = tmp_path / "bin"
    shutil.copytree(untied_policy, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    policy = load_policy(tools.make_config(str(folder), learner=LEARNER), torch.device("cpu"), None, in_slices=True)
    assert policy.how == ("whole on every rank: it has neither model.safetensors nor model.safetensors.index.json")
    assert torch.equal(policy.lm.lm_head.weight, loaded_whole(untied_policy).lm_head.weight)

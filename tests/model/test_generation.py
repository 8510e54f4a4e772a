"""A model's own generation settings are never taken, and a line says which and how to take them."""

import json

import pytest
from transformers import GenerationConfig, Qwen3Config

from infsample_rl.config import ModelConfig, RolloutConfig
from infsample_rl.model.generation import load_generation_config, unused_generation_settings

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [151645, 151643]}


@pytest.mark.parametrize(
    ("theirs", "rollout", "said"),
    [
        (QWEN3, {"temperature": 1.0}, "to take them write rollout.temperature=0.6 rollout.top_p=0.95 rollout.top_k=20"),
        (
            QWEN3 | {"repetition_penalty": 1.05},
            {"temperature": 0.6, "top_p": 0.95},
            "to take them write rollout.top_k=20; there is no setting for repetition_penalty=1.05",
        ),
        ({"repetition_penalty": 1.1}, {}, "there is no setting for repetition_penalty=1.1"),
        ({"suppress_tokens": [5, 7]}, {}, "to take them write rollout.bad_token_ids=[5,7]"),
        (QWEN3, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}, None),
        (
            {"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.0, "max_new_tokens": 320, "eos_token_id": 3},
            {},
            None,
        ),
        ({}, {"temperature": 0.8, "top_k": 3}, None),
    ],
)
def test_settings_that_differ_are_named_with_what_to_write(theirs, rollout, said, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(theirs))
    generation = load_generation_config(ModelConfig(path=str(tmp_path)), Qwen3Config())
    line = None if said is None else f"the model's own generation settings are not used; {said}"
    assert unused_generation_settings(generation, RolloutConfig(**rollout)) == line


def test_without_a_file_the_models_config_counts_as_in_transformers(tmp_path):
    generation = load_generation_config(ModelConfig(path=str(tmp_path)), Qwen3Config(eos_token_id=7))
    assert isinstance(generation, GenerationConfig) and generation.eos_token_id == 7
    assert unused_generation_settings(generation, RolloutConfig()) is None

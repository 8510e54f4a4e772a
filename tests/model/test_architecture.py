"""One KV shape for the plan, the start table, the engine and the benchmarks, whatever a family calls its sizes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, JetMoeConfig, LlamaConfig, Qwen2Config, Qwen3Config

from benchmarks.models import kv_bytes_per_token as bytes_in_benchmarks
from infsample_rl.controller.start_table import kv_bytes_per_token as bytes_in_start_table
from infsample_rl.model.architecture import KVShape
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.rollout.engine.model_runner import ModelRunner

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("config", "num_kv_heads", "head_dim"),
    [
        (Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=16), 2, 16),
        (LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=1), 1, 8),
        (Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2), 2, 8),  # has no head_dim
        (GPTNeoXConfig(**SIZES, num_attention_heads=4), 4, 8),  # nor num_key_value_heads
        # its head_dim is called kv_channels, and is not hidden_size / num_attention_heads
        (JetMoeConfig(**SIZES, num_key_value_heads=2, kv_channels=16, num_local_experts=2), 2, 16),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_all_reckon_with_the_same_kv(config, num_kv_heads, head_dim):
    shape = KVShape(num_layers=3, num_kv_heads=num_kv_heads, head_dim=head_dim)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    token_bytes = shape.page_bytes(1, torch.bfloat16)
    assert token_bytes == 3 * 2 * num_kv_heads * head_dim * 2
    assert ModelOutline(architecture=config, valid_vocab=64).kv == shape
    assert bytes_in_start_table(config, "bfloat16") == token_bytes
    assert bytes_in_benchmarks(model) == token_bytes
    if config.model_type == "jetmoe":  # which has as many keys for each expert: no pool is wrong, since there is none
        with pytest.raises(ValueError, match="jetmoe cannot decode over a pool of KV pages"):
            ModelRunner(model)
    else:
        assert ModelRunner(model).page_bytes(1) == token_bytes

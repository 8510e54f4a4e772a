"""Recomputing activations of chosen layers: the same gradients, less kept, and one line where a model cannot."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from infsample_rl.model.logprobs import PackedPolicy, checkpoint_every
from infsample_rl.model.packing import pack_row
from infsample_rl.plan.memory_trace import MemoryTrace
from tests.tiny_models import TINY_SIZES

SIZES = TINY_SIZES | {"num_hidden_layers": 5}


# of the long one copied keys and values are too many to be kept
SHORT_PROMPT, LONG_PROMPT = (9, (20, 25)), (40, (6, 4, 5))


def run(every, granularity="full", row=SHORT_PROMPT):
    """(gradients, how often each layer's MLP was entered, bytes alive after the forward pass) of one row."""
    torch.manual_seed(0)
    lm = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.2, attention_dropout=0.5)).eval()
    calls = [0] * 5
    for number, layer in enumerate(lm.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    if every:
        checkpoint_every(lm, every, granularity=granularity)
    policy = PackedPolicy(lm, valid_vocab=60, chunk_tokens=16)
    prompt, responses = row
    packed = pack_row([(np.arange(prompt), [np.arange(length) for length in responses])], "cpu")
    with MemoryTrace(lm.parameters()) as trace:
        logprobs = policy(packed, 0.7)[0]
        trace.moment = "after"
        torch.empty(0)  # a moment is seen when something is made in it
        kept = trace.fullest["after"].total()
    logprobs.sum().backward()
    return {name: parameter.grad for name, parameter in lm.named_parameters()}, calls, kept


@pytest.mark.parametrize(
    ("every", "calls"), [(1, [2, 2, 2, 2, 2]), (2, [2, 1, 2, 1, 2]), (3, [2, 1, 1, 2, 1]), (9, [2, 1, 1, 1, 1])]
)
def test_every_nth_layer_is_computed_twice_and_gradients_are_the_same(every, calls):
    expected, once, kept_without = run(0)
    found, twice, kept = run(every)
    assert once == [1] * 5 and twice == calls
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    assert kept < kept_without


@pytest.mark.parametrize("row", [SHORT_PROMPT, LONG_PROMPT])
@pytest.mark.parametrize("every", [1, 2])
def test_selective_recomputation_keeps_products_and_gives_the_same_gradients(every, row):
    (expected, _, everything), (_, _, least) = run(0, row=row), run(every, row=row)
    found, _, kept = run(every, "selective", row)
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    assert least < kept < everything


FEW = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NOISY = {
    "in the layer itself": lambda: OPTForCausalLM(
        OPTConfig(**FEW, ffn_dim=48, word_embed_proj_dim=32, dropout=0.3, attention_dropout=0.3)
    ),
    "in parts of the layer, and before the first": lambda: Starcoder2ForCausalLM(
        Starcoder2Config(
            **FEW,
            intermediate_size=48,
            sliding_window=None,
            residual_dropout=0.3,
            embedding_dropout=0.3,
            bos_token_id=0,
            eos_token_id=1,
        )
    ),
}


@pytest.mark.parametrize("where", NOISY)
def test_dropout_and_noise_stay_off_where_layers_are_recomputed(where):
    lm = NOISY[where]().eval()
    policy, row = (
        PackedPolicy(lm, valid_vocab=64, chunk_tokens=16),
        pack_row([(np.array([5, 9, 7]), [np.array([11, 4, 8, 6])])], "cpu"),
    )
    wanted = policy(row, 1.0)[0].detach()
    checkpoint_every(lm, 1)
    found = policy(row, 1.0)[0]
    found.sum().backward()
    torch.testing.assert_close(found.detach(), wanted)


def test_a_model_whose_layers_cannot_be_recomputed_is_refused():
    lm = LlamaForCausalLM(LlamaConfig(**SIZES))
    lm.model.layers = nn.ModuleList([nn.Identity()])
    with pytest.raises(
        ValueError,
        match="learner.activation_checkpointing must be 0 for LlamaForCausalLM, got 2: its layers cannot be recomputed",
    ):
        checkpoint_every(lm, 2)

"""Recomputing activations of chosen layers: the same gradients, less kept, and one line where a model cannot."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from infsample_rl.model.activation_checkpointing import checkpoint_every
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.packing import pack_row

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}


def run(every):
    """(gradients, how often each layer's MLP was entered, bytes kept for the backward pass) of one row."""
    torch.manual_seed(0)
    lm = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.2, attention_dropout=0.5)).eval()
    calls = [0] * 5
    for number, layer in enumerate(lm.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    if every:
        checkpoint_every(lm, every)
    policy = PackedPolicy(lm, valid_vocab=60, chunk_tokens=16)
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    row = pack_row([(np.arange(9), [np.arange(20), np.arange(5, 30)])], "cpu")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = policy(row, 0.7)
    logprobs.sum().backward()
    return {name: parameter.grad for name, parameter in lm.named_parameters()}, calls, sum(kept.values())


@pytest.mark.parametrize(("every", "calls"), [(1, [2, 2, 2, 2, 2]), (2, [2, 1, 2, 1, 2]), (3, [2, 1, 1, 2, 1]), (9, [2, 1, 1, 1, 1])])
def test_every_nth_layer_is_computed_twice_and_gradients_are_the_same(every, calls):
    expected, once, kept_without = run(0)
    found, twice, kept = run(every)
    assert once == [1] * 5 and twice == calls
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    assert kept < kept_without


def test_more_recomputed_layers_keep_less():
    kept = [run(every)[2] for every in (0, 9, 2, 1)]
    assert kept == sorted(kept, reverse=True) and kept[-1] < 0.5 * kept[0]


def test_a_model_whose_layers_cannot_be_recomputed_is_refused():
    lm = LlamaForCausalLM(LlamaConfig(**SIZES))
    lm.model.layers = nn.ModuleList([nn.Identity()])
    with pytest.raises(ValueError, match="learner.activation_checkpointing must be 0 for LlamaForCausalLM, got 2: its layers cannot be recomputed"):
        checkpoint_every(lm, 2)

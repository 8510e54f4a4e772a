"""Activations of chosen layers are not kept for the backward pass but computed again there."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

# Kept by selective recomputation: what most of a layer's arithmetic gives. Compiled FlexAttention is not seen and so
# computed again.
_ATEN = torch.ops.aten
PRODUCTS = [
    *(_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default),
    *(_ATEN._scaled_dot_product_flash_attention_for_cpu.default, _ATEN._scaled_dot_product_flash_attention.default),
    *(_ATEN._scaled_dot_product_efficient_attention.default, _ATEN._scaled_dot_product_cudnn_attention.default),
]


def checkpoint_every(lm: PreTrainedModel, every: int, *, granularity: str = "full") -> None:
    """Recompute the activations of every `every`-th decoder layer, the first included, in the backward pass; 1: of all.
    Exact.

    What is kept between two of them is what their layers need: the larger `every`, the more memory and the less time.
    `granularity`: "full", of a layer only its input is kept; "selective", also the results of its matrix products and
    attention (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 5):
    norms, rotations and activation functions are cheap to compute again and about half of what a layer keeps.
    ValueError for a model whose layers cannot be recomputed. transformers recomputes layers in training mode only: they
    are in it afterwards, without what drops out or adds noise there.
    """
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not lm.supports_gradient_checkpointing:
        raise ValueError(
            f"learner.activation_checkpointing must be 0 for {type(lm).__name__}, got {every}: its layers cannot be "
            "recomputed"
        )
    selective = (
        {"context_fn": partial(create_selective_checkpoint_contexts, PRODUCTS)} if granularity == "selective" else {}
    )
    # its name in older transformers
    enable = getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
    enable({"use_reentrant": False} | selective)
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % every == 0
        layer.training = True  # not its modules: the policy that sampled had no dropout
        for name in [name for name, value in vars(layer).items() if "drop" in name and isinstance(value, float)]:
            setattr(layer, name, 0.0)  # of functional dropout in the layer itself

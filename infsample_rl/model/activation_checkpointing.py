"""Activations of chosen layers are not kept for the backward pass but computed again there."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def checkpoint_every(lm: PreTrainedModel, every: int) -> None:
    """Recompute the activations of every `every`-th decoder layer, the first included, in the backward pass; 1: of all. Exact.

    What is kept between two of them is what their layers need: the larger `every`, the more memory and the less time. ValueError for
    a model whose layers cannot. transformers recomputes in training mode only, so the model is in it afterwards.
    """
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not lm.supports_gradient_checkpointing:
        raise ValueError(f"learner.activation_checkpointing must be 0 for {type(lm).__name__}, got {every}: its layers cannot be recomputed")
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % every == 0
    lm.train()

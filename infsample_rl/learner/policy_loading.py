"""The policy that a learner rank starts from: an outline whose shards it reads itself, or the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from infsample_rl.config import Config, ModelConfig
from infsample_rl.model.loading import load_model
from infsample_rl.model.lora import add_adapters
from infsample_rl.model.weight_slices import WeightSlices, load_outline

if TYPE_CHECKING:
    from peft import PeftModel

WHOLE = "whole on every rank"  # though each keeps a shard alone; followed by the reason


class LoadedPolicy(NamedTuple):
    """The policy to train: model.path or a checkpoint in float32. With LoRA model.path in its dtype, with float32
    adapters in it."""

    lm: PreTrainedModel
    adapted: PeftModel | None  # peft's view of lm
    slices: WeightSlices | None  # what reads the weights of an outline; None: they are there
    how: str  # it was loaded, in words


def load_policy(config: Config, device: torch.device, checkpoint: str | None, *, in_slices: bool) -> LoadedPolicy:
    """`in_slices`: an outline, whose weights are on the meta device until its shards are read; the whole model where
    its files do not allow that."""
    learner = config.learner
    # With LoRA never the checkpoint, which holds adapters alone; they come with its training state.
    path, dtype = (checkpoint, torch.float32) if learner.lora_rank == 0 else (None, getattr(torch, config.model.dtype))
    if in_slices:
        lm, slices, how = load_in_slices(config.model, device, path=path, dtype=dtype)
    else:
        lm, slices, how = load_model(config.model, device, path=path, dtype=dtype), None, "whole"
    if learner.lora_rank == 0:
        return LoadedPolicy(lm, None, slices, how)
    with _weights_of_one_value(lm) if slices else contextlib.nullcontext():
        adapted = add_adapters(lm, learner, seed=config.run.seed, path=config.model.path)
    return LoadedPolicy(lm, adapted, slices, how)


def load_in_slices(
    model: ModelConfig, device: torch.device | str, *, path: str | None, dtype: torch.dtype, setting: str = "model.path"
) -> tuple[PreTrainedModel, WeightSlices | None, str]:
    """An outline, what reads its weights, and how it was loaded in words; where its files do not allow that the whole
    model, None and why. Errors as load_model's."""
    try:
        return *load_outline(model, path=path, dtype=dtype), "in slices"
    except (OSError, ValueError, KeyError) as reason:  # what is wrong with the files load_model says better
        return load_model(model, device, path=path, dtype=dtype, setting=setting), None, f"{WHOLE}: {reason}"


@contextlib.contextmanager
def _weights_of_one_value(lm: PreTrainedModel) -> Iterator[None]:
    """Inside of it the weights of an outline's linear layers take no memory and are not on the meta device, where peft
    would put the adapters too, without their values."""
    linear = [module for module in lm.modules() if isinstance(module, nn.Linear) and module.weight.is_meta]
    outlines = [module.weight for module in linear]
    for module in linear:
        weight = module.weight
        module.weight = nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape))
    yield
    for module, outline in zip(linear, outlines, strict=True):
        module.weight = outline.requires_grad_(module.weight.requires_grad)

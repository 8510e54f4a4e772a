"""Adapters into weights: python -m infsample_rl merge CHECKPOINT OUT [trust_remote_code=true]

CHECKPOINT         checkpoints/step_N of a run with learner.lora_rank > 0, or another peft folder of plain LoRA on
linear layers
OUT                a new folder: the merged model, bitwise the weights that sampled, with its tokenizer; from_pretrained
takes it
trust_remote_code  whether code that comes with the base model is run (false)

Exit codes: 0 done; 1 it failed; 2 an input is wrong.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from infsample_rl.commands.run_settings import checkpoint_folder
from infsample_rl.config import ModelConfig
from infsample_rl.config.command_line import option, parse, run_command
from infsample_rl.model.loading import load_model, load_tokenizer
from infsample_rl.model.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX, merge_weight, read_adapter_settings

# Settings merge_weight knows nothing of, and beginnings of base weights that are not those of the base model.
VARIANTS = (
    "use_dora",
    "use_rslora",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
)
OWN_BASES = ("pissa", "olora", "corda", "loftq")


@dataclass(kw_only=True)
class MergeOptions:
    """What is neither folder."""

    trust_remote_code: bool = option(False, "run code that comes with the base model")


def merge_checkpoint(checkpoint: Path, out: Path, *, trust_remote_code: bool = False) -> None:
    """Write the base model of a peft folder with its adapters merged, in the adapters' dtype. ValueError for what
    cannot be merged."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"OUT={out} must be a new or an empty folder")
    lm = load_merged(checkpoint, trust_remote_code=trust_remote_code)
    lm.save_pretrained(out)
    load_tokenizer(ModelConfig(path=str(checkpoint), trust_remote_code=trust_remote_code)).save_pretrained(out)


def load_policy_folder(model: ModelConfig, device: str) -> PreTrainedModel:
    """The model of a checkpoint, whole or of adapters, in model.dtype: what sampled."""
    folder = Path(model.path)
    if not (folder / ADAPTER_CONFIG).is_file():
        return load_model(model, device)
    merged: Any = load_merged(folder, trust_remote_code=model.trust_remote_code)
    return merged.to(device, getattr(torch, model.dtype)).eval()


def load_merged(checkpoint: Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The base model of a peft folder with its adapters merged, in the adapters' dtype. ValueError for what cannot be
    merged."""
    try:
        settings, tensors = _read_adapters(checkpoint)
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        path = settings["base_model_name_or_path"]
        lm = load_model(ModelConfig(path=path, dtype=dtype, trust_remote_code=trust_remote_code))
        _merge(lm, tensors, settings["lora_alpha"] / settings["r"])
    except _CannotMerge as error:
        raise ValueError(f"CHECKPOINT={checkpoint} {error}") from None
    return lm


class _CannotMerge(Exception):
    pass


def _read_adapters(checkpoint: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    settings = read_adapter_settings(checkpoint)
    if settings is None:
        raise _CannotMerge(f"has no {ADAPTER_CONFIG}: it holds no adapters; a run without LoRA saves whole weights")
    used = [name for name in VARIANTS if settings.get(name)]
    if str(settings.get("init_lora_weights")).startswith(OWN_BASES):
        used.append(f"init_lora_weights={settings['init_lora_weights']}")
    if settings["peft_type"] != "LORA" or settings.get("bias", "none") != "none" or used:
        kind = ", ".join(used) or settings["peft_type"]
        raise _CannotMerge(f"is not plain LoRA ({kind}): merge it with peft itself")
    try:
        tensors = load_file(checkpoint / ADAPTER_WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise _CannotMerge(f"is damaged: {ADAPTER_WEIGHTS} cannot be read: {error}") from None
    if not tensors:
        raise _CannotMerge(f"is empty: {ADAPTER_WEIGHTS} holds no adapters")
    return settings, tensors


@torch.no_grad()
def _merge(lm: PreTrainedModel, tensors: dict[str, torch.Tensor], scale: float) -> None:
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        layer = name.removesuffix(".lora_A.weight")
        weight = _weight_of(lm, layer.removeprefix(PEFT_PREFIX))
        a, b = tensors.pop(name), tensors.pop(f"{layer}.lora_B.weight", None)
        if weight is None:
            raise _CannotMerge(f"adapts {layer}, but the base model has no such layer")
        if b is None:
            raise _CannotMerge(f"adapts {layer}, but the adapter has no lora_B for it")
        if (len(b), a.shape[-1]) != tuple(weight.shape) or len(a) != b.shape[-1]:
            raise _CannotMerge(f"adapts {layer}, but the adapter does not fit it")
        if not (a.isfinite().all() and b.isfinite().all()):
            raise _CannotMerge(f"is damaged: the adapter of {layer} is not finite")
        if weight is lm.get_input_embeddings().weight:
            raise _CannotMerge(f"adapts {layer}, whose weight is the embedding too: merge it with peft itself")
        weight.copy_(merge_weight(weight, a, b, scale))
    if tensors:
        left = next(iter(tensors))
        raise _CannotMerge(f"holds {left}, which is no adapter of a linear layer: merge it with peft itself")


def _weight_of(lm: PreTrainedModel, layer: str) -> torch.Tensor | None:
    """The matrix of a layer; None where the model has no such layer, or it has no matrix."""
    try:
        weight = getattr(lm.get_submodule(layer), "weight", None)
    except AttributeError:
        return None
    return weight if weight is not None and weight.dim() == 2 else None


def _run(arguments: list[str]) -> int:
    if len(arguments) < 2 or "=" in arguments[0]:
        raise ValueError("give a checkpoint and a new folder: python -m infsample_rl merge CHECKPOINT OUT")
    checkpoint, out = arguments[:2]
    options = parse(arguments[2:], MergeOptions)
    if not out:
        raise ValueError("OUT is empty: give a new or an empty folder")
    merge_checkpoint(
        checkpoint_folder(checkpoint) or Path(checkpoint), Path(out), trust_remote_code=options.trust_remote_code
    )
    print(json.dumps({"merged": out}))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command(_run, arguments, usage=__doc__)


if __name__ == "__main__":
    sys.exit(main())

"""Adapters into weights: python -m infsample_rl merge CHECKPOINT OUT [trust_remote_code=true]

CHECKPOINT         checkpoints/step_N of a run with learner.lora_rank > 0, or another peft folder of plain LoRA on
linear layers
OUT                a new folder: the merged model, bitwise the weights that sampled, with its tokenizer; from_pretrained
takes it
trust_remote_code  whether code that comes with the base model is run (false)

Exit codes: 0 done; 1 it failed; 2 an input is wrong.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from infsample_rl.commands.run_settings import checkpoint_folder, leading
from infsample_rl.config import ModelConfig
from infsample_rl.config.command_line import option, parse, run_command
from infsample_rl.model.loading import load_model
from infsample_rl.model.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX, merge_weight, read_adapter_settings
from infsample_rl.model.tokenizer import load_tokenizer

# Settings merge_weight knows nothing of, and beginnings of base weights that are not those of the base model.
VARIANTS = ["use_dora", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save"]
VARIANTS += ["layer_replication", "alora_invocation_tokens"]
OWN_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(kw_only=True)
class MergeOptions:
    """What is neither folder."""

    trust_remote_code: bool = option(False, "run code that comes with the base model")


def load_policy_folder(model: ModelConfig) -> PreTrainedModel:
    """The model of a checkpoint, whole or of adapters, in model.dtype: what sampled. On a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not holds_adapters(model):
        lm = load_model(model, device)
        if lm._hf_peft_config_loaded:  # of a hub name: beside weights that the engine would read alone
            raise ValueError(
                f"CHECKPOINT={model.path} holds adapters alone, which are merged from a folder: hf download "
                f"{model.path} --local-dir FOLDER, and give FOLDER"
            )
        return lm
    merged: Any = load_merged(Path(model.path), trust_remote_code=model.trust_remote_code)
    return merged.to(device, getattr(torch, model.dtype)).eval()


@contextmanager
def open_policy(model: ModelConfig, engine: str) -> Iterator[tuple[ModelConfig, PreTrainedModel | None]]:
    """The checkpoint as the engine takes it: loaded, or for vLLM as a folder, into which adapters are merged."""
    if engine == "native":
        yield model, load_policy_folder(model)
    elif not holds_adapters(model):
        yield model, None
    else:
        with tempfile.TemporaryDirectory(prefix="infsample_rl_merged_") as folder:
            save_merged(Path(model.path), Path(folder), trust_remote_code=model.trust_remote_code)
            yield replace(model, path=folder), None


def holds_adapters(model: ModelConfig) -> bool:
    """Whether the checkpoint is of adapters alone."""
    return (Path(model.path) / ADAPTER_CONFIG).is_file()


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


def save_merged(checkpoint: Path, out: Path, *, trust_remote_code: bool = False) -> None:
    """Write load_merged()'s model and the checkpoint's tokenizer into a folder; peft leaves that to the base model."""
    lm = load_merged(checkpoint, trust_remote_code=trust_remote_code)
    path = str(checkpoint if (checkpoint / "tokenizer_config.json").is_file() else lm.name_or_path)
    tokenizer = load_tokenizer(ModelConfig(path=path, trust_remote_code=trust_remote_code))
    lm.save_pretrained(out)
    tokenizer.save_pretrained(out)


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
    named = lm.named_parameters(remove_duplicate=False)
    matrices = {name: parameter for name, parameter in named if parameter.dim() == 2}
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        layer = name.removesuffix(".lora_A.weight")
        weight = matrices.get(f"{layer.removeprefix(PEFT_PREFIX)}.weight")
        a, b = tensors.pop(name), tensors.pop(f"{layer}.lora_B.weight", None)
        if weight is None or b is None or (len(b), a.shape[-1]) != tuple(weight.shape) or len(a) != b.shape[-1]:
            raise _CannotMerge(f"adapts {layer}, but base model and adapter do not fit each other there")
        if not (a.isfinite().all() and b.isfinite().all()):
            raise _CannotMerge(f"is damaged: the adapter of {layer} is not finite")
        if weight is lm.get_input_embeddings().weight:
            raise _CannotMerge(f"adapts {layer}, whose weight is the embedding too: merge it with peft itself")
        weight.copy_(merge_weight(weight, a, b, scale))
    if tensors:
        left = next(iter(tensors))
        raise _CannotMerge(f"holds {left}, which is no adapter of a linear layer: merge it with peft itself")


def _run(arguments: list[str]) -> int:
    given, folder = leading(arguments, "a checkpoint and a new folder", "merge CHECKPOINT OUT", 2)
    checkpoint, out = checkpoint_folder(given) or Path(given), Path(folder)
    trust = parse(arguments[2:], MergeOptions).trust_remote_code
    if not folder or out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"OUT={folder} must be a new or an empty folder")
    save_merged(checkpoint, out, trust_remote_code=trust)
    print(f"merged: {out}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command(_run, arguments, usage=__doc__)

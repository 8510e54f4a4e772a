"""What can be said of learner.lora_* before any model is loaded: do the targets exist, does the checkpoint fit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig

from infsample_rl.config import Config
from infsample_rl.model.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX, read_adapter_settings, target_names


def check_lora(config: Config, architecture: PretrainedConfig, checkpoint: Path | None) -> str:
    """What is trained, in words. ValueError for targets the model has not, without peft, or for a checkpoint of
    something else."""
    learner = config.learner
    if learner.lora_rank == 0:
        _check_whole(checkpoint)
        return "all weights"
    if importlib.util.find_spec("peft") is None:
        raise ValueError(
            f"learner.lora_rank={learner.lora_rank} needs the package peft: pip install peft, or learner.lora_rank=0"
        )
    with torch.device("meta"):  # an outline, which takes no memory
        lm = AutoModelForCausalLM.from_config(architecture, trust_remote_code=config.model.trust_remote_code)
    layers = target_names(lm, learner.lora_targets)
    if checkpoint is not None:
        _check_adapters(config, checkpoint, layers)
    sizes = [lm.get_submodule(layer).weight.shape for layer in layers]
    count = learner.lora_rank * sum(rows + columns for rows, columns in sizes)
    kinds = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    share = count / sum(parameter.numel() for parameter in lm.parameters())
    return (
        f"LoRA of rank {learner.lora_rank} on {len(layers)} layers ({kinds}): {count:,} parameters, {share:.2%} of "
        "the model's"
    )


def _check_whole(checkpoint: Path | None) -> None:
    settings = None if checkpoint is None else read_adapter_settings(checkpoint)
    if settings is not None:
        raise ValueError(
            f"learner.lora_rank must be {settings['r']} to go on with checkpoint {checkpoint}, which holds LoRA "
            "adapters, got 0; for a new run on "
            f"its weights: python -m infsample_rl merge {checkpoint} OUT, and model.path=OUT"
        )


def _check_adapters(config: Config, checkpoint: Path, layers: list[str]) -> None:
    """The checkpoint must hold adapters of these settings, for these layers."""
    settings, learner = read_adapter_settings(checkpoint), config.learner
    if settings is None:
        raise ValueError(
            f"learner.lora_rank must be 0 to go on with checkpoint {checkpoint}, which has no {ADAPTER_CONFIG}: it "
            "holds whole weights, "
            f"got {learner.lora_rank}; for adapters on them: a new run.dir and model.path={checkpoint}"
        )
    for name, own, saved in (
        ("rank", learner.lora_rank, settings["r"]),
        ("alpha", learner.lora_alpha, settings["lora_alpha"]),
    ):
        if own != saved:
            raise ValueError(
                f"learner.lora_{name} must be {saved:g} to go on with checkpoint {checkpoint}, got {own:g}"
            )
    with safe_open(checkpoint / ADAPTER_WEIGHTS, "pt") as file:
        there = {
            key.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight") for key in file.keys() if ".lora_A." in key
        }  # noqa: SIM118
    if there != set(layers):
        raise ValueError(
            f"learner.lora_targets={learner.lora_targets} are {len(layers)} layers, checkpoint {checkpoint} has "
            f"adapters on {len(there)}; only "
            f"one of them has {', '.join(sorted(there ^ set(layers))[:3])}"
        )

"""Models and tokenizers from a Hugging Face folder or hub name. Shared by engine, learner, reference and data."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from infsample_rl.config import ModelConfig
from infsample_rl.model.hub import cached_only


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The policy's tokenizer; ValueError in one line when it cannot be had."""
    path = model.tokenizer_path or model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=model.trust_remote_code, local_files_only=cached_only(path)
        )
        # what transformers makes of a folder without a tokenizer's files
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise ValueError("it has no tokens but special ones")
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            _not_found("model.tokenizer_path" if model.tokenizer_path else "model.path", path, "tokenizer", error)
        ) from None
    return tokenizer


def load_model_config(model: ModelConfig) -> PretrainedConfig:
    """The architecture, without weights; ValueError in one line when it cannot be had."""
    try:
        config = AutoConfig.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code, local_files_only=cached_only(model.path)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(_not_found("model.path", model.path, "model config", error)) from None
    return config.get_text_config()


def load_model(
    model: ModelConfig, device: torch.device | str = "cpu", *, path: str | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The causal language model in eval mode, in `dtype` (default: model.dtype), from `path` (default: model.path),
    read straight onto `device`."""
    source, device = path or model.path, torch.device(device)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # in a log each of its states would be a line
    options: dict[str, Any] = {"dtype": dtype or getattr(torch, model.dtype)}
    options["trust_remote_code"] = model.trust_remote_code
    if device.type != "cpu":  # there the files are mapped
        options["device_map"] = {"": device}
    try:
        # With peft installed transformers also looks for adapters in the repository, and asks the hub unless told here
        # too.
        local = {"local_files_only": cached_only(source)}
        module = AutoModelForCausalLM.from_pretrained(source, **options, **local, adapter_kwargs=local)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(_not_found("model.path", source, "causal language model", error)) from None
    return module.eval()


def _not_found(setting: str, path: str, what: str, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0][:160]
    kind = (
        "folder"
        if Path(path).is_absolute() or os.path.isdir(path)
        else "hub name (a local folder of that name does not exist)"
    )
    return (
        f"{setting}={path}: no {what} could be loaded from this {kind}; give the path of a Hugging Face folder "
        f"({type(error).__name__}: {reason})"
    )

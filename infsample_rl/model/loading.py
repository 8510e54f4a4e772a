"""Models from a Hugging Face folder or hub name. Shared by engine, learner and reference."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from infsample_rl.config import ModelConfig
from infsample_rl.model.hub import cached_only, not_found


def load_model_config(model: ModelConfig, setting: str = "model.path") -> PretrainedConfig:
    """The architecture, without weights; ValueError in one line, which names the `setting` of its path, when it cannot
    be had or its weights are quantised."""
    try:
        config = AutoConfig.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code, local_files_only=cached_only(model.path)
        )
    except Exception as error:  # transformers has no error of its own for files that are damaged
        if (Path(model.path) / "adapter_config.json").is_file():
            raise ValueError(
                f"{setting}={model.path} holds adapters alone, no model: merge them into their base model by `python "
                f"-m infsample_rl merge {model.path} OUT`, then give {setting}=OUT"
            ) from None
        raise ValueError(not_found(setting, model.path, "model config", error)) from None
    _check_not_quantised(config, setting, model.path)
    return config.get_text_config()


def _check_not_quantised(config: PretrainedConfig, setting: str, path: str) -> None:
    """ValueError for weights that mean nothing without their scales, which are not read here."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else type(quantised).__name__
        what = f"its config.json has a quantization_config ({method})"
        raise ValueError(f"{setting}={path} must not be quantised, {what}: give the model in 16 or 32 bits")


def load_model(
    model: ModelConfig,
    device: torch.device | str = "cpu",
    *,
    path: str | None = None,
    dtype: torch.dtype | None = None,
    setting: str = "model.path",
) -> PreTrainedModel:
    """The causal language model in eval mode, in `dtype` (default: model.dtype), from `path` (default: model.path),
    read straight onto `device`. ValueError in one line, which names the `setting` of the path, when it cannot be had or
    its files lack a weight."""
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
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, **options, **local, adapter_kwargs=local, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ValueError(not_found(setting, source, "causal language model", error)) from None
    module, found = loaded
    _check_not_quantised(module.config, setting, source)
    if found["missing_keys"]:  # transformers gives them random numbers, and warns
        raise ValueError(lacking(setting, source, found["missing_keys"]))
    return module.eval()


def lacking(setting: str, source: str, names: Iterable[str]) -> str:
    """The line on a model whose files have no weights of these names."""
    first, *others = sorted(names)
    more = f" and {len(others)} more" if others else ""
    return f"{setting}={source}: its files have no {first}{more}, which its config.json asks for"


def build_outline(
    architecture: PretrainedConfig, dtype: torch.dtype, *, layers: int | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The causal language model on the meta device, by default with all its layers."""
    architecture = copy.deepcopy(architecture)
    if layers is not None:
        architecture.num_hidden_layers = layers
        if getattr(architecture, "layer_types", None):
            architecture.layer_types = architecture.layer_types[:layers]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(architecture, dtype=dtype, trust_remote_code=trust_remote_code)

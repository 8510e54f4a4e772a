"""LoRA (arXiv 2106.09685, equation 3): a linear layer's weight W is frozen, W + (alpha / r) B A is what it does, A and
B are trained.

Adapters are put into the model in place, so that the learner goes on with transformers' own model. What samples is a
plain model whose weights are merged: W + (alpha / r) B A in float32, rounded once. Learner and engine merge with the
same function. Shape letters: r rank, I and O a layer's input and output sizes; A is [r, I], B [O, r], W [O, I].

peft is imported inside functions: an engine that merges what it is sent runs without it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from infsample_rl.config import Config, LearnerConfig
from infsample_rl.model.loading import build_outline

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's names
NEEDED = ("peft_type", "r", "lora_alpha", "base_model_name_or_path")  # of adapter_config.json
ALL_LINEAR = "all-linear"
PEFT_PREFIX = "base_model.model."  # of a model's names in ADAPTER_WEIGHTS
# A parameter of an adapted layer as peft names it, behind the layer's name -> what it is.
_PARTS = {
    ".base_layer.weight": "weight",
    ".base_layer.bias": "bias",
    ".lora_A.default.weight": "lora_A.weight",
    ".lora_B.default.weight": "lora_B.weight",
}


def target_names(lm: PreTrainedModel, targets: list[str]) -> list[str]:
    """Full names of the linear layers that learner.lora_targets means, in the model's order; the head never is one.

    A target is a name or its last parts: q_proj, mlp.up_proj, model.layers.3.self_attn.q_proj. ValueError for one that
    names none, all-linear too.
    """
    head = lm.get_output_embeddings()
    linear = [name for name, module in lm.named_modules() if isinstance(module, nn.Linear) and module is not head]
    for target in targets or ["nothing"]:
        if not any(_is_named(name, target) for name in linear):
            there = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
            raise ValueError(
                f"learner.lora_targets: {target} names no linear layer that can have adapters; there are {there}"
            )
    return [name for name in linear if any(_is_named(name, target) for target in targets)]


def _is_named(name: str, target: str) -> bool:
    return target in (ALL_LINEAR, name) or name.endswith("." + target)


def adapter_scale(learner: LearnerConfig) -> float:
    """alpha / r."""
    return learner.lora_alpha / learner.lora_rank


def add_adapters(lm: PreTrainedModel, learner: LearnerConfig, *, seed: int, path: str) -> PeftModel:
    """Put float32 adapters into `lm`, in place, and freeze everything else; peft's view of it, for `adapters_off`.

    A is drawn from `seed` alone, so it is the same on every rank; B is zero, so the policy starts as the one at `path`.
    """
    from peft import LoraConfig, get_peft_model

    names = target_names(lm, learner.lora_targets)
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=learner.lora_rank,
        lora_alpha=learner.lora_alpha,  # type: ignore[arg-type]  # peft divides it, and takes any number
        target_modules=names,
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # adapters are drawn on the CPU
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it
        torch.manual_seed(seed)
        adapted = get_peft_model(lm, settings)
    settings.base_model_name_or_path = path
    return adapted


@contextlib.contextmanager
def adapters_off(adapted: PeftModel) -> Iterator[None]:
    """The model without its adapters: exactly the base, bit for bit."""
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    with adapted.disable_adapter():
        # peft freezes what it turns off; FSDP2 copies that flag when it first gathers a parameter, and would never
        # train it again.
        for parameter in trained:
            parameter.requires_grad_(True)
        yield


@torch.no_grad()
def merge_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale B A [O, I], a new tensor in W's dtype: computed in float32, rounded once."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)


def merged_parameters(parameters: Iterable[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor]]:
    """The plain model's (name, tensor) from those of a model with adapters, in the same order, one layer merged at a
    time."""
    held: dict[str, Tensor] = {}
    for name, tensor in parameters:
        layer, part = _split(name)
        if part is None:
            yield name, tensor
            continue
        held[part] = tensor
        if part == "lora_B.weight":  # the last of its layer
            yield (
                f"{layer}.weight",
                merge_weight(held.pop("weight"), held.pop("lora_A.weight"), held.pop("lora_B.weight"), scale),
            )
            yield from ((f"{layer}.{rest}", value) for rest, value in held.items())
            held = {}


def adapter_parameters(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(LAYER.lora_A.weight or LAYER.lora_B.weight, tensor) alone, of a model with adapters."""
    for name, tensor in parameters:
        layer, part = _split(name)
        if part in ("lora_A.weight", "lora_B.weight"):
            yield f"{layer}.{part}", tensor


def _split(name: str) -> tuple[str, str | None]:
    """(layer, part of it) for a parameter of an adapted layer, else (name, None)."""
    for suffix, part in _PARTS.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix), part
    return name, None


class ReceivedAdapters:
    """An engine's side of learner.lora_publish=adapters: `received` takes what is sent, merge() brings the model to
    it."""

    def __init__(self, model: PreTrainedModel, learner: LearnerConfig) -> None:
        """`model` holds the base weights still; those of the adapted layers are kept, in host memory."""
        self.model, self.scale = model, adapter_scale(learner)
        self.received: dict[str, Tensor] = {}  # under the names of adapter_parameters
        self.base: dict[str, Tensor] = {}
        for name in target_names(model, learner.lora_targets):
            weight: Any = model.get_submodule(name).weight
            host = weight.detach().to("cpu", copy=True)
            self.base[name] = host.pin_memory() if weight.is_cuda else host
            self.received[f"{name}.lora_A.weight"] = weight.new_zeros(learner.lora_rank, weight.shape[1])
            self.received[f"{name}.lora_B.weight"] = weight.new_zeros(weight.shape[0], learner.lora_rank)

    @torch.no_grad()
    def merge(self) -> None:
        """Write W + scale B A into the model's weights, in place: from the base each time, so that nothing adds up over
        versions."""
        for name, base in self.base.items():
            weight: Any = self.model.get_submodule(name).weight
            a, b = self.received[f"{name}.lora_A.weight"], self.received[f"{name}.lora_B.weight"]
            weight.copy_(merge_weight(base.to(weight.device, non_blocking=True), a, b, self.scale))


def save_adapter_folder(
    folder: Path,
    adapted: PeftModel,
    parameters: Iterable[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    rank: int,
) -> None:
    """Write a peft folder, which PeftModel.from_pretrained takes; `parameters` gathers on all ranks, rank 0 writes."""
    tensors = {PEFT_PREFIX + name: tensor.cpu().contiguous() for name, tensor in adapter_parameters(parameters)}
    if rank != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    settings = copy.copy(adapted.peft_config["default"])
    settings.inference_mode = True
    settings.save_pretrained(str(folder))
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)


def read_adapter_settings(folder: Path) -> dict[str, Any] | None:
    """What adapter_config.json of a checkpoint says; None when it is no checkpoint of adapters. ValueError when it does
    not describe any."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    missing = [name for name in NEEDED if not isinstance(settings, dict) or name not in settings]
    if missing:
        raise ValueError(f"{path} does not describe adapters: it has no {', '.join(missing)}")
    return settings


def check_lora(config: Config, architecture: PretrainedConfig, checkpoint: Path | None) -> str:
    """What is trained, in words. ValueError for targets the model has not, without peft, or for a checkpoint of
    something else."""
    learner = config.learner
    saved = None if checkpoint is None else read_adapter_settings(checkpoint)
    if learner.lora_rank == 0 and saved is not None:
        raise ValueError(
            f"learner.lora_rank must be {saved['r']} to go on with checkpoint {checkpoint}, which holds LoRA adapters, "
            f"got 0; for a new run on its weights: python -m infsample_rl merge {checkpoint} OUT, and model.path=OUT"
        )
    if learner.lora_rank == 0:
        return "all weights"
    if importlib.util.find_spec("peft") is None:
        raise ValueError(
            f"learner.lora_rank={learner.lora_rank} needs the package peft: pip install peft, or learner.lora_rank=0"
        )
    lm = build_outline(architecture, torch.float32, trust_remote_code=config.model.trust_remote_code)
    layers = target_names(lm, learner.lora_targets)
    if checkpoint is not None:
        _check_adapters(learner, checkpoint, saved, layers)
    count = learner.lora_rank * sum(sum(lm.get_parameter(f"{layer}.weight").shape) for layer in layers)
    kinds = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    share = count / sum(parameter.numel() for parameter in lm.parameters())
    return (
        f"LoRA of rank {learner.lora_rank} on {len(layers)} layers ({kinds}): {count:,} parameters, {share:.2%} of "
        "the model's"
    )


def _check_adapters(learner: LearnerConfig, checkpoint: Path, saved: dict[str, Any] | None, layers: list[str]) -> None:
    """The checkpoint must hold adapters of these settings, for these layers."""
    if saved is None:
        raise ValueError(
            f"learner.lora_rank must be 0 to go on with checkpoint {checkpoint}, which has no {ADAPTER_CONFIG}: it "
            f"holds whole weights, got {learner.lora_rank}; for adapters on them: a new run.dir and "
            f"model.path={checkpoint}"
        )
    for name, own, theirs in (
        ("rank", learner.lora_rank, saved["r"]),
        ("alpha", learner.lora_alpha, saved["lora_alpha"]),
    ):
        if own != theirs:
            raise ValueError(
                f"learner.lora_{name} must be {theirs:g} to go on with checkpoint {checkpoint}, got {own:g}"
            )
    with safe_open(checkpoint / ADAPTER_WEIGHTS, "pt") as file:
        names = [key for key in file.keys() if ".lora_A." in key]  # noqa: SIM118
    there = {name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight") for name in names}
    if there != set(layers):
        raise ValueError(
            f"learner.lora_targets={learner.lora_targets} are {len(layers)} layers, checkpoint {checkpoint} has "
            f"adapters on {len(there)}; only one of them has {', '.join(sorted(there ^ set(layers))[:3])}"
        )

"""Parts of a model's weights straight from its safetensors files, so that nobody has to hold the whole model to load
their own part of it.

An outline has the model's modules, its computed buffers and no weights (they are on the meta device). Whoever shards it
makes its own part real and reads the slices that belong there, each cast to the dtype the part has: bitwise the weights
that from_pretrained would load. Where that is not certain (files of another format, names or layouts that transformers
converts while loading) there is no outline, and NotSliceable says why.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from infsample_rl.config import ModelConfig
from infsample_rl.model.hub import cached_only, not_found
from infsample_rl.model.loading import build_outline, lacking

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CHUNK_ELEMENTS = 2**24  # read at a time: 64 MB in float32


class NotSliceable(ValueError):
    """The model has to be loaded whole; the message says why."""


class WeightSlices:
    """The tensors of a model's files, by the model's own parameter names."""

    def __init__(self, lm: PreTrainedModel, files: list[Path]) -> None:
        """`lm` is an outline. NotSliceable unless the files hold exactly its parameters, under its names and in its
        shapes."""
        self._files = {name: path for path in files for name in _names(path)}
        _check_names(lm, self._files)
        self._stored: dict[str, str] = {}  # parameter -> its name in the files
        for parameter, names in _names_of(lm).items():
            found = [name for name in names if name in self._files]
            if not found:
                raise NotSliceable(f"its files have no {names[0]}")
            if any(self._shape(name) != parameter.shape for name in found):
                raise NotSliceable(f"{found[0]} has another shape in its files")
            if any(not self._are_equal(found[0], other) for other in found[1:]):
                raise NotSliceable(f"{' and '.join(found)} are tied, and differ in its files")
            self._stored |= dict.fromkeys(names, found[0])

    def _shape(self, stored: str) -> torch.Size:
        with safe_open(self._files[stored], "pt") as file:
            return torch.Size(file.get_slice(stored).get_shape())

    def _rows(self, stored: str, start: int, stop: int) -> Tensor:
        with safe_open(self._files[stored], "pt") as file:
            return file.get_slice(stored)[start:stop]

    def _are_equal(self, first: str, second: str) -> bool:
        shape = self._shape(first)
        return all(
            torch.equal(self._rows(first, *part), self._rows(second, *part)) for part in _chunks(0, shape[0], shape)
        )

    @torch.no_grad()
    def read(self, name: str, parameter: Tensor) -> None:
        """Fill a parameter, or this rank's shard of one that fully_shard has sharded, a few rows at a time."""
        # peft puts an adapted layer's own weight one level deeper
        stored = self._stored[name.replace(".base_layer.", ".")]
        part, start = parameter, 0
        if isinstance(parameter, DTensor):
            _, offsets = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            part, start = parameter.to_local(), offsets[0]
        if part.numel() == 0:
            return
        if part.ndim == 0:
            with safe_open(self._files[stored], "pt") as file:
                part.copy_(file.get_tensor(stored))
            return
        for first, last in _chunks(start, start + part.shape[0], part.shape):
            part[first - start : last - start].copy_(self._rows(stored, first, last))


def _names_of(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter's names: several of one that is tied."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return names


def _names(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _shapes(path: Path) -> dict[str, list[int]]:
    with safe_open(path, "pt") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}


def _chunks(start: int, stop: int, shape: torch.Size) -> list[tuple[int, int]]:
    """Rows start to stop in runs of about CHUNK_ELEMENTS."""
    rows = max(1, CHUNK_ELEMENTS // max(1, shape[1:].numel()))
    return [(first, min(stop, first + rows)) for first in range(start, stop, rows)]


def _check_names(lm: PreTrainedModel, stored: Iterable[str]) -> None:
    """NotSliceable where transformers would convert what it reads, or needs more than parameters."""
    converted = _converted(lm, stored)
    if converted is not None:
        raise NotSliceable(f"transformers converts {converted} of its files while loading")
    buffers = lm.state_dict().keys() - dict(lm.named_parameters(remove_duplicate=False)).keys()
    if buffers:
        raise NotSliceable(f"its files hold the buffer {min(buffers)}")


def _converted(lm: PreTrainedModel, stored: Iterable[str]) -> str | None:
    """The first name that transformers would change while loading."""
    patterns = [pattern for change in get_model_conversion_mapping(lm) for pattern in change.source_patterns]
    return next((name for pattern in patterns for name in stored if re.search(pattern, name)), None)


def check_weights(model: ModelConfig, setting: str = "model.path") -> list[str]:
    """Whether model.path's safetensors files hold every weight, in its shape; ValueError in one line, which names the
    `setting` of the path, where one is damaged, or a weight is not as config.json says. Returns a warning where they
    hold more. What only loading can tell is not said, and nothing is fetched."""
    where: dict[str, Any] = {"local_files_only": True}
    try:
        lm, paths = _empty_model(model, model.path, torch.float32, where), _weight_files(model.path, where)
    except (ValueError, OSError, RuntimeError, AttributeError, KeyError, TypeError):  # a model unlike those known
        return []
    try:
        shapes = {name: shape for path in paths for name, shape in _shapes(path).items()}
    except (SafetensorError, OSError) as error:  # OSError: one of several is not there
        raise ValueError(not_found(setting, model.path, "weights", error)) from None
    groups, files, own = _names_of(lm).values(), set(shapes), lm.state_dict()
    prefixed = {name.removeprefix(f"{lm.base_model_prefix}.") for names in groups for name in names}
    if _converted(lm, files) is not None or files & (prefixed - set().union(*groups)):  # of a model without its head
        return []
    lacks = [names[0] for names in groups if not files.intersection(names)]
    missing = _without(lacks, lm._keys_to_ignore_on_load_missing)
    if missing:
        raise ValueError(lacking(setting, model.path, missing))
    for name in sorted(files.intersection(names[0] for names in groups)):  # others are tied to it
        if shapes[name] != list(own[name].shape):
            asked = f"its config.json asks for {list(own[name].shape)}"
            raise ValueError(f"{setting}={model.path}: {name} is {shapes[name]} in its files, {asked}")
    more = _without(sorted(files.difference(own)), lm._keys_to_ignore_on_load_unexpected)
    if not more:
        return []
    others = f" and {len(more) - 1} more" if more[1:] else ""
    return [f"{more[0]}{others} of the files of {setting} are left out: its config.json asks for no such weights"]


def _without(names: list[str], patterns: Iterable[str] | None) -> list[str]:
    """Those that no pattern of the model's class lets pass."""
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


def load_outline(
    model: ModelConfig, *, path: str | None = None, dtype: torch.dtype
) -> tuple[PreTrainedModel, WeightSlices]:
    """The causal language model that load_model would give, in eval mode, its parameters of `dtype` on the meta device
    and its buffers computed, and what reads its weights. NotSliceable, or an error of load_model's kinds."""
    source = path or model.path
    where: dict[str, Any] = {"local_files_only": cached_only(source)}
    lm = _empty_model(model, source, dtype, where)
    if dtype != torch.float32 and (lm._keep_in_fp32_modules or lm._keep_in_fp32_modules_strict):
        raise NotSliceable("some of its layers stay in float32")
    try:
        slices = WeightSlices(lm, _weight_files(source, where))
    except SafetensorError as error:
        raise NotSliceable(f"its files cannot be opened ({error})") from None
    _compute_buffers(lm)
    try:
        lm.generation_config = GenerationConfig.from_pretrained(source, **where)
    except OSError:  # without a file of its own it follows from the model's config, as it does already
        pass
    lm.name_or_path = source
    return lm, slices


def _empty_model(model: ModelConfig, source: str, dtype: torch.dtype, where: dict[str, Any]) -> PreTrainedModel:
    """The model of these files, its parameters and buffers on the meta device."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=model.trust_remote_code, **where)
    if _cached(source, "adapter_config.json", where) is not None:
        raise NotSliceable("its files are adapters")
    return build_outline(config, dtype, trust_remote_code=model.trust_remote_code).eval()


def _cached(source: str, name: str, where: dict[str, Any]) -> str | None:
    return cached_file(
        source,
        name,
        **where,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )


def _weight_files(source: str, where: dict[str, Any]) -> list[Path]:
    """The safetensors files that from_pretrained would take."""
    single = _cached(source, WEIGHTS, where)
    if single is not None:
        return [Path(single)]
    index = _cached(source, INDEX, where)
    if index is None:
        raise NotSliceable(f"it has neither {WEIGHTS} nor {INDEX}")
    return [Path(path) for path in get_checkpoint_shard_files(source, index, **where)[0]]


def _compute_buffers(lm: PreTrainedModel) -> None:
    """Buffers of the meta device become real, with what the model computes for those that no file holds: its own
    initialisation, which leaves parameters on the meta device alone."""
    for module in lm.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if not buffer.is_floating_point():
                    raise NotSliceable(f"no file holds its buffer {name}")
                setattr(module, name, torch.full_like(buffer, torch.nan, device="cpu"))
    with torch.random.fork_rng(devices=[]):
        lm.initialize_weights()
    for name, buffer in lm.named_buffers():
        if buffer.isnan().any():
            raise NotSliceable(f"its class does not compute the buffer {name}")


def materialize(module: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
    """Memory, of any content, on `device` for what of a module's parameters and shards is on the meta device, in its
    own dtype or `dtype`; tied ones stay tied."""
    groups = _names_of(module)
    # What FSDP2 hooks into, to take the new tensors for its shards.
    module._apply(lambda tensor: torch.empty_like(tensor, device=device, dtype=dtype) if tensor.is_meta else tensor)
    for first, *others in groups.values():
        for name in others:
            holder, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(holder), attribute, module.get_parameter(first))


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """A module's buffers on `device`, its parameters where they are."""
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device))

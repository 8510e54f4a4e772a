"""What is published and where it lies: one manifest for every transport, and whether it fits a model.

The weights are one stream of bytes, every tensor's in the order of the manifest, cut into buckets. A tensor may lie in
several buckets, and every bucket but the last has the same size, so that no transport ever holds more than a bucket or
two, however large the embedding is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from infsample_rl.types import WeightManifest

BUCKET_BYTES = 64 * 2**20  # a multiple of every element's size

Shape = tuple[str, torch.dtype, tuple[int, ...]]  # name, dtype, shape of one whole parameter


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of the manifest's entry number `entry`, at byte `offset` of a bucket."""

    entry: int
    start: int
    stop: int
    offset: int


def shapes_of(tensors: Iterable[tuple[str, Tensor]]) -> list[Shape]:
    """The shapes of what will be sent, once for a whole run: runs `tensors`, on a learner rank a collective, to its
    end."""
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]


def shapes_of_architecture(
    architecture: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> list[Shape]:
    """The parameters, tied ones once, of a model that is not built: only its outline is, on the meta device, which
    takes no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, dtype=dtype, trust_remote_code=trust_remote_code)
    return [(name, dtype, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def plan_weights(shapes: Iterable[Shape], version: int, bucket_bytes: int = BUCKET_BYTES) -> WeightManifest:
    """The manifest of these parameters: where in the stream each begins, aligned to its elements. RuntimeError for an
    empty one."""
    entries: list[tuple[str, str, tuple[int, ...], int, int]] = []
    end = 0
    for name, dtype, shape in shapes:
        if 0 in shape:
            raise RuntimeError(
                f"weights version {version}: {name} of shape {shape} has no elements; give the shapes of whole "
                "parameters"
            )
        begin = -(-end // dtype.itemsize) * dtype.itemsize
        entries.append((name, str(dtype).removeprefix("torch."), shape, *divmod(begin, bucket_bytes)))
        end = begin + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return WeightManifest(version=version, entries=entries, num_bytes=end)


def bucket_sizes(manifest: WeightManifest, bucket_bytes: int = BUCKET_BYTES) -> list[int]:
    """Bytes of every bucket of the stream."""
    full, rest = divmod(manifest.num_bytes, bucket_bytes)
    return [bucket_bytes] * full + ([rest] if rest else [])


def layout(manifest: WeightManifest, bucket_bytes: int = BUCKET_BYTES) -> list[list[Piece]]:
    """The pieces of every bucket, in order."""
    pieces: list[list[Piece]] = [[] for _ in bucket_sizes(manifest, bucket_bytes)]
    for entry, (_, dtype, shape, bucket, offset) in enumerate(manifest.entries):
        size, start, elements = getattr(torch, dtype).itemsize, 0, int(np.prod(shape, dtype=np.int64))
        while start < elements:
            stop = min(elements, start + (bucket_bytes - offset) // size)
            pieces[bucket].append(Piece(entry, start, stop, offset))
            bucket, offset, start = bucket + 1, 0, stop
    return pieces


def misfit(model: nn.Module, manifest: WeightManifest, version: int | None = None) -> str | None:
    """Why these weights cannot be loaded into `model`, or None: a wrong version, a missing, extra, differently shaped
    name, a lossy dtype.

    named_parameters() lists a tied parameter once, under its first name, which is the name it is published under.
    """
    parameters = dict(model.named_parameters())
    published = {entry[0] for entry in manifest.entries}
    missing, extra = sorted(parameters.keys() - published), sorted(published - parameters.keys())
    if version is not None and version != manifest.version:
        return f"weights version {manifest.version} came where version {version} was to come"
    if extra or missing:
        what = f"missing {missing[:3]}, " if missing else ""
        return f"weights version {manifest.version} do not fit the engine's model: {what}not in the model {extra[:3]}"
    for name, dtype, shape, _, _ in manifest.entries:
        own = parameters[name]
        if tuple(own.shape) != tuple(shape):
            return (
                f"weights version {manifest.version}: {name} has shape {tuple(shape)}, the engine's model has "
                f"{tuple(own.shape)}"
            )
        if torch.promote_types(own.dtype, getattr(torch, dtype)) != own.dtype:
            return (
                f"weights version {manifest.version}: {name} is {dtype}, the engine's model has "
                f"{str(own.dtype).removeprefix('torch.')}"
            )
        if not own.is_contiguous():
            return f"weights version {manifest.version}: the engine's {name} is not contiguous"
    return None

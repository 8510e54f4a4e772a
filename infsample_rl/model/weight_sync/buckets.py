"""The weights as one stream of bytes in buckets: what lies where, filled by the learner, copied in place by the engine.

Every tensor's bytes follow in the order of the manifest, the same for every transport. A tensor may lie in several
buckets, and every bucket but the last has the same size, so that no transport ever holds more than a bucket or two,
however large the embedding is.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infsample_rl.types import WeightManifest

BUCKET_BYTES = 64 * 2**20  # a multiple of every element's size

Shape = tuple[str, torch.dtype, tuple[int, ...]]  # name, dtype, shape of one whole parameter


class Piece(NamedTuple):
    """Elements `start` to `stop` of the manifest's entry number `entry`, at byte `offset` of a bucket."""

    entry: int
    start: int
    stop: int
    offset: int


def shapes_of(tensors: Iterable[tuple[str, Tensor]]) -> list[Shape]:
    """The shapes of what will be sent; runs `tensors`, on a learner rank a collective, to its end."""
    return [*map(_shape_of, tensors)]  # keeping none while the next one comes


def _shape_of(named: tuple[str, Tensor]) -> Shape:
    return named[0], named[1].dtype, tuple(named[1].shape)


def plan_weights(shapes: Iterable[Shape], version: int, bucket_bytes: int = BUCKET_BYTES) -> WeightManifest:
    """The manifest of these parameters: where in the stream each begins, aligned to its elements."""
    entries: list[tuple[str, str, tuple[int, ...], int, int]] = []
    end = 0
    for name, dtype, shape in shapes:
        begin = -(-end // dtype.itemsize) * dtype.itemsize
        entries.append((name, str(dtype).removeprefix("torch."), shape, *divmod(begin, bucket_bytes)))
        end = begin + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return WeightManifest(version=version, entries=entries, num_bytes=end, bucket_bytes=bucket_bytes)


def bucket_sizes(manifest: WeightManifest) -> list[int]:
    """Bytes of every bucket of the stream."""
    full, rest = divmod(manifest.num_bytes, manifest.bucket_bytes)
    return [manifest.bucket_bytes] * full + ([rest] if rest else [])


def layout(manifest: WeightManifest) -> list[list[Piece]]:
    """The pieces of every bucket, in order."""
    pieces: list[list[Piece]] = [[] for _ in bucket_sizes(manifest)]
    for entry, (_, dtype, shape, bucket, offset) in enumerate(manifest.entries):
        size, start, elements = getattr(torch, dtype).itemsize, 0, int(np.prod(shape, dtype=np.int64))
        while start < elements:
            stop = min(elements, start + (manifest.bucket_bytes - offset) // size)
            pieces[bucket].append(Piece(entry, start, stop, offset))
            bucket, offset, start = bucket + 1, 0, stop
    return pieces


def misfit(parameters: Mapping[str, Tensor], manifest: WeightManifest, version: int | None = None) -> str | None:
    """Why these weights cannot be loaded into `parameters`, or None: another version than `version`, a missing, extra
    or differently shaped name, a lossy dtype.

    named_parameters() lists a tied parameter once, under its first name, which is the name it is published under.
    """
    published = {entry[0] for entry in manifest.entries}
    missing, extra = sorted(parameters.keys() - published), sorted(published - parameters.keys())
    if version is not None and version != manifest.version:
        return f"weights version {manifest.version} came where version {version} was to come"
    if extra or missing:
        what = f"missing {missing[:3]}, " if missing else ""
        return f"weights version {manifest.version} do not fit the engine's model: {what}not in the model {extra[:3]}"
    for name, dtype, shape, _, _ in manifest.entries:
        problem = misfit_of(parameters[name], name, getattr(torch, dtype), shape)
        if problem is not None:
            return f"weights version {manifest.version}: {problem}"
    return None


def misfit_of(own: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
    """Why a tensor of this dtype and shape cannot be copied into the engine's `own`, or None."""
    if tuple(own.shape) != tuple(shape):
        return f"{name} has shape {tuple(shape)}, the engine's model has {tuple(own.shape)}"
    if torch.promote_types(own.dtype, dtype) != own.dtype:
        there, here = (str(found).removeprefix("torch.") for found in (dtype, own.dtype))
        return f"{name} is {there}, the engine's model has {here}"
    return None


def fill_buckets(
    tensors: Iterable[tuple[str, Tensor]], manifest: WeightManifest, buffers: Iterable[Tensor]
) -> Iterator[Tensor]:
    """Each bucket as soon as it is full: the filled part of the next of `buffers` (uint8 [manifest.bucket_bytes], on
    any device).

    Takes one tensor at a time, and takes all of them. RuntimeError when they are not those of the manifest, in its
    order.
    """
    source, flat = iter(tensors), torch.empty(0)
    for pieces, size, buffer in zip(layout(manifest), bucket_sizes(manifest), buffers, strict=False):
        for piece in pieces:
            if piece.start == 0:
                flat = part = torch.empty(0)  # the last one goes before the next is gathered
                flat = _next_tensor(source, manifest, piece.entry)
            part = flat[piece.start : piece.stop]
            buffer[piece.offset : piece.offset + part.nbytes].view(part.dtype).copy_(part)
        yield buffer[:size]
    extra = next(source, None)
    if extra is not None:
        raise RuntimeError(f"weights version {manifest.version}: {extra[0]} is not in the manifest")


def _next_tensor(source: Iterator[tuple[str, Tensor]], manifest: WeightManifest, entry: int) -> Tensor:
    name, dtype, shape, _, _ = manifest.entries[entry]
    got, tensor = next(source, ("nothing", torch.empty(0)))
    if (got, tensor.dtype, tuple(tensor.shape)) != (name, getattr(torch, dtype), shape):
        raise RuntimeError(
            f"weights version {manifest.version}: the manifest goes on with {name}, {dtype} {shape}; given was {got}, "
            f"{tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor.detach().reshape(-1)


def stream_buckets(tensors: Iterable[tuple[str, Tensor]], manifest: WeightManifest) -> Iterator[np.ndarray]:
    """Buckets as numpy uint8 arrays, for an object store, which copies: each is valid until the next is asked for."""
    buffer = torch.empty(min(manifest.bucket_bytes, manifest.num_bytes), dtype=torch.uint8)
    for bucket in fill_buckets(tensors, manifest, itertools.repeat(buffer)):
        yield bucket.numpy()


@torch.no_grad()
def unpack_buckets(
    parameters: Mapping[str, Tensor], manifest: WeightManifest, buckets: Iterable[Tensor | np.ndarray]
) -> None:
    """Copy every bucket, in order, into the parameters it belongs to, in place. Ask misfit() before; RuntimeError for
    too few bytes or too many."""
    for piece, part in _parts(manifest, buckets):
        name = manifest.entries[piece.entry][0]
        parameters[name].detach().view(-1)[piece.start : piece.stop].copy_(part)


def unpack_tensors(manifest: WeightManifest, buckets: Iterable[Tensor | np.ndarray]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter in the buckets by name, one at a time, in memory of its own. RuntimeError as unpack_buckets()."""
    flat = torch.empty(0)
    for piece, part in _parts(manifest, buckets):
        name, dtype, shape, *_ = manifest.entries[piece.entry]
        if piece.start == 0:
            flat = torch.empty(int(np.prod(shape, dtype=np.int64)), dtype=getattr(torch, dtype), device=part.device)
        flat[piece.start : piece.stop].copy_(part)
        if piece.stop == flat.numel():
            yield name, flat.view(shape)


def _parts(manifest: WeightManifest, buckets: Iterable[Tensor | np.ndarray]) -> Iterator[tuple[Piece, Tensor]]:
    """Every piece with its elements, which lie in a bucket: to be copied before the next is asked for."""
    source = iter(buckets)
    for number, (pieces, size) in enumerate(zip(layout(manifest), bucket_sizes(manifest), strict=True)):
        bucket = _as_tensor(next(source, torch.empty(0)))
        if len(bucket) != size:
            raise RuntimeError(
                f"weights version {manifest.version}: bucket {number} has {len(bucket)} bytes, not {size}"
            )
        for piece in pieces:
            dtype = getattr(torch, manifest.entries[piece.entry][1])
            stop = piece.offset + (piece.stop - piece.start) * dtype.itemsize
            yield piece, bucket[piece.offset : stop].view(dtype)
        del bucket  # a copy is not to live until the next one is made
    if next(source, None) is not None:  # asking also says that the last one was taken
        raise RuntimeError(f"weights version {manifest.version}: more buckets came than the manifest has")


def _as_tensor(bucket: Tensor | np.ndarray) -> Tensor:
    """The same memory as a tensor, only to be read: arrays of an object store are read-only, of which torch warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.as_tensor(bucket)

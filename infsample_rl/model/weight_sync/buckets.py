"""The stream of weights in buckets: filled by the learner, copied in place by the engine. manifest.py says what lies
where."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from infsample_rl.model.weight_sync.manifest import BUCKET_BYTES, bucket_sizes, layout, misfit
from infsample_rl.types import WeightManifest


def fill_buckets(
    tensors: Iterable[tuple[str, Tensor]],
    manifest: WeightManifest,
    buffers: Iterable[Tensor],
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[Tensor]:
    """Each bucket as soon as it is full: the filled part of the next of `buffers` (uint8 [bucket_bytes], on any
    device).

    Takes one tensor at a time, and takes all of them. RuntimeError when they are not those of the manifest, in its
    order.
    """
    source, flat = iter(tensors), torch.empty(0)
    for pieces, size, buffer in zip(
        layout(manifest, bucket_bytes), bucket_sizes(manifest, bucket_bytes), buffers, strict=False
    ):
        for piece in pieces:
            if piece.start == 0:
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
            f"{tensor.dtype} "
            f"{tuple(tensor.shape)}"
        )
    return tensor.detach().reshape(-1)


def stream_buckets(
    tensors: Iterable[tuple[str, Tensor]], manifest: WeightManifest, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[np.ndarray]:
    """Buckets as numpy uint8 arrays, for an object store, which copies: each is valid until the next is asked for."""
    buffer = torch.empty(min(bucket_bytes, manifest.num_bytes), dtype=torch.uint8)
    for bucket in fill_buckets(tensors, manifest, itertools.repeat(buffer), bucket_bytes):
        yield bucket.numpy()


@torch.no_grad()
def unpack_buckets(
    model: nn.Module, manifest: WeightManifest, buckets: Iterable[Tensor], bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Copy every bucket, in order, into the parameters it belongs to, in place. Ask misfit() before; RuntimeError for
    too few bytes or too many."""
    parameters = dict(model.named_parameters())
    source = iter(buckets)
    for number, (pieces, size) in enumerate(
        zip(layout(manifest, bucket_bytes), bucket_sizes(manifest, bucket_bytes), strict=True)
    ):
        bucket = next(source, torch.empty(0))
        if len(bucket) != size:
            raise RuntimeError(
                f"weights version {manifest.version}: bucket {number} has {len(bucket)} bytes, not {size}"
            )
        for piece in pieces:
            name, dtype_name, *_ = manifest.entries[piece.entry]
            dtype = getattr(torch, dtype_name)
            stop = piece.offset + (piece.stop - piece.start) * dtype.itemsize
            parameters[name].detach().view(-1)[piece.start : piece.stop].copy_(bucket[piece.offset : stop].view(dtype))
        del bucket  # a copy is not to live until the next one is made
    if next(source, None) is not None:  # asking also says that the last one was taken
        raise RuntimeError(f"weights version {manifest.version}: more buckets came than the manifest has")


def load_buckets(
    model: nn.Module,
    manifest: WeightManifest,
    buckets: Iterable[np.ndarray],
    version: int | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Copy numpy buckets into the model, in place, one at a time. RuntimeError for what misfit() finds."""
    problem = misfit(model, manifest, version)
    if problem is not None:
        raise RuntimeError(problem)
    unpack_buckets(model, manifest, map(_as_tensor, buckets), bucket_bytes)


def _as_tensor(bucket: np.ndarray) -> Tensor:
    """The same memory as a tensor, only to be read: arrays of an object store are read-only, of which torch warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(bucket)

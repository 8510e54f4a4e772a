"""A safetensors file written a tensor at a time, in any order: whoever gathers a model larger than its memory saves it.

The names, dtypes and shapes are known before, so every tensor's place is. The file is byte for byte what
safetensors.torch.save_file writes: where tensors begin decides how matrix products round on a CPU that maps them. The
header is written last; a file that was cut short has none, and cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from infsample_rl.model.weight_sync.buckets import Shape

# of the format, those that come first in a file first
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def num_bytes(shape: Shape) -> int:
    """Of the tensor."""
    return shape[1].itemsize * int(np.prod(shape[2], dtype=np.int64))


class TensorFile:
    """One file of these tensors; close() makes it readable."""

    def __init__(self, path: Path, shapes: Iterable[Shape]) -> None:
        """OSError as of any file, ValueError for a dtype that is not in DTYPES."""
        order = list(DTYPES)
        for name, dtype, _ in (shapes := list(shapes)):
            if dtype not in DTYPES:
                raise ValueError(f"{name}: a tensor of {dtype} cannot be saved")
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, int] = {}
        end = 0
        for name, dtype, shape in sorted(shapes, key=lambda each: (order.index(each[1]), each[0])):
            self._places[name], begin = end, end
            end += num_bytes((name, dtype, shape))
            entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        length = -(-len(header) // 8) * 8
        self._header = length.to_bytes(8, "little") + header.ljust(length)
        self._missing = set(self._places)
        self._file = path.open("wb")

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor, of the dtype and shape that were given, in its place."""
        self._missing.remove(name)
        if tensor.numel() > 0:
            data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            self._file.seek(len(self._header) + self._places[name])
            self._file.write(data.numpy().data)

    def close(self) -> None:
        """Write the header. RuntimeError when a tensor is missing."""
        with self._file as file:
            if self._missing:
                raise RuntimeError(f"{file.name}: {min(self._missing)} was not written")
            file.seek(0)
            file.write(self._header)


def in_files(shapes: Iterable[Shape], file_bytes: int) -> Iterator[list[Shape]]:
    """The tensors of one file after another: a file that has `file_bytes` takes no more."""
    held: list[Shape] = []
    for shape in shapes:
        held.append(shape)
        if sum(map(num_bytes, held)) >= file_bytes:
            yield held
            held = []
    if held:
        yield held

"""Peak memory of this process (Linux) or of the CUDA device."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

MALLCTL = getattr(ctypes.CDLL(None), "mallctl", None)  # jemalloc's, where it is loaded


class PeakMemory:
    """Bytes taken since construction, which belongs after the imports and before the model is loaded.

    CPU: the highest resident set (VmHWM) less what was resident at construction; `with_mapped=False` leaves out mapped
    files and shared memory (code, Ray's object store), but not weights, which lie in the mapped file as long as nothing
    changes them, and count whole. CUDA: what the device has lent to whoever uses it, context, kernels, graphs and
    unused pieces included; `with_mapped=False`: max_memory_allocated, what tensors of this process took.
    """

    def __init__(self, device: torch.device, *, with_mapped: bool = True) -> None:
        self.device = device
        self._with_mapped = with_mapped
        self._before = 0 if device.type == "cuda" else self._resident_bytes("VmRSS")

    def _resident_bytes(self, field: str) -> int:
        if self._with_mapped:
            return status_bytes(field)
        return status_bytes(field) - status_bytes("RssFile") - status_bytes("RssShmem") + mapped_weights_bytes()

    def reset(self) -> None:
        """Forget the peak so far, e.g. that of loading. Where the kernel does not allow it the peak stays, and is too
        high."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with contextlib.suppress(PermissionError):
            Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The most bytes held at a time since `reset`."""
        if self.device.type == "cuda" and self._with_mapped:
            free, total = torch.cuda.mem_get_info(self.device)
            given_back = torch.cuda.max_memory_reserved(self.device) - torch.cuda.memory_reserved(self.device)
            return total - free + given_back
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(0, self._resident_bytes("VmHWM") - self._before)

    def held_bytes(self) -> int:
        """What is held now."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return max(0, self._resident_bytes("VmRSS") - self._before)


@cache
def process_memory(device_type: str) -> PeakMemory:
    """The one PeakMemory of this process, of what it allocates itself, made at the first call: what a worker holds
    before it loads a model is its idle footprint: interpreter, libraries, tokenizer."""
    return PeakMemory(torch.device(device_type), with_mapped=False)


def return_freed_memory() -> None:
    """Give what tensors have left in jemalloc, where it is loaded, back to the system: pieces of one row's sizes serve
    the next one's ill."""
    if MALLCTL is not None:
        MALLCTL(b"arena.4096.purge", None, None, None, ctypes.c_size_t(0))  # 4096: MALLCTL_ARENAS_ALL


def give_pages_back(tensor: Tensor) -> None:
    """Let the system have the memory of a tensor's storage on the CPU until it is written again: zeros, whole pages of
    it at least."""
    if sys.platform != "linux":
        return
    storage = tensor.untyped_storage()
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(max(0, whole)), mmap.MADV_DONTNEED)


def mapped_weights_bytes() -> int:
    """Bytes of mapped safetensors files; pages that were written to since are not among them, they are the process's
    own."""
    total, is_weights = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split(maxsplit=1)
        if not name.endswith(":"):  # a mapping's first line: its addresses, ..., and its file
            is_weights = line.endswith(".safetensors")
        elif is_weights and name in ("Size:", "Anonymous:"):
            total += int(values[0].split()[0]) * 1024 * (1 if name == "Size:" else -1)
    return total


def status_bytes(field: str) -> int:
    """A field in kB of /proc/self/status, such as VmRSS or VmHWM, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory cannot be measured here")

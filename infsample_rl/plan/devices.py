"""GPUs by name: how much memory they have, how fast they read it and compute.

Figures are of the vendor's data sheets (SXM form where there are several): memory as nvidia-smi shows it, bandwidth of
that memory, dense bf16 arithmetic with float32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from infsample_rl.config import Config
from infsample_rl.rollout.engine.kv_cache import free_bytes

GIB = 2**30
# what CUDA, cuBLAS and NCCL take of a GPU beside torch's tensors, and what fragments; not part of a process's sum
CUDA_RESERVE = GIB
HOST_RESERVE = 0.02  # of the memory: what the allocator rounds up, and stacks
HOST_BANDWIDTH, HOST_FLOPS = 15e9, 1e11  # of 2 cores with AVX-512, as benchmarks.engine reads them


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a process may use. Bytes, bytes per second, operations per second."""

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    multiprocessors: int = 0

    @property
    def usable_bytes(self) -> int:
        """Of the memory, what torch's tensors may take."""
        return self.memory_bytes - (CUDA_RESERVE if self.multiprocessors else int(HOST_RESERVE * self.memory_bytes))


# name: MiB, bytes/s of its memory, operations/s, multiprocessors
_FIGURES = {
    "a100-40gb": (40_960, 1.555e12, 312e12, 108),
    "a100-80gb": (81_920, 2.039e12, 312e12, 108),
    "h100": (81_559, 3.35e12, 989e12, 132),
    "h200": (143_771, 4.8e12, 989e12, 132),
    "b200": (183_359, 8.0e12, 2250e12, 148),
    "l4": (23_034, 0.30e12, 121e12, 58),
    "l40s": (46_068, 0.864e12, 362e12, 142),
    "rtx3090": (24_576, 0.936e12, 71e12, 82),
    "rtx4090": (24_564, 1.008e12, 165e12, 128),
}
DEVICES = {
    name: Device(name=name, memory_bytes=mib * 2**20, bandwidth=bandwidth, flops=flops, multiprocessors=processors)
    for name, (mib, bandwidth, flops, processors) in _FIGURES.items()
}


def gigabytes(num_bytes: float) -> str:
    """1.5e9 -> "1.50 GB"; 2.4e6 -> "2.4 MB"."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def host() -> Device:
    """This machine's memory, as far as it is free; speeds as measured on 2 cores."""
    return Device(
        name="host memory",
        memory_bytes=free_bytes(torch.device("cpu")),
        bandwidth=HOST_BANDWIDTH,
        flops=HOST_FLOPS,
    )


def gpu_of(config: Config) -> Device | None:
    """The GPU that cluster.device_type names, else the one found here; None: neither."""
    if config.cluster.device_type is not None:
        return DEVICES[config.cluster.device_type]
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    sizes = {"memory_bytes": found.total_memory, "multiprocessors": found.multi_processor_count}
    return replace(device_like(found.name, found.total_memory), name=found.name, **sizes)


def device_like(name: str, memory_bytes: int) -> Device:
    """The known GPU that one found here is: device_like("NVIDIA L40S", 46 * 2**30).name -> "l40s". An A100 where none
    is like it."""
    said = name.lower().replace(" ", "")
    kinds = {known.split("-")[0] for known in DEVICES}
    kind = max((kind for kind in kinds if kind in said), key=len, default="a100")
    alike = [device for known, device in DEVICES.items() if known.split("-")[0] == kind]
    return min(alike, key=lambda device: abs(device.memory_bytes - memory_bytes))

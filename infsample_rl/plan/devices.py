"""GPUs by name: memory, how fast they read it, how fast they talk to each other.

Figures are of the vendor's data sheets (SXM form where there are several): memory as nvidia-smi shows it, bandwidth of
that memory, dense bf16 arithmetic with float32 sums, and one direction of NVLink, or of PCIe 4.0 x16 where a card has
no NVLink.
"""

from __future__ import annotations

from dataclasses import dataclass

from infsample_rl.config import Config
from infsample_rl.rollout.engine.kv_cache import free_bytes

GIB = 2**30
# what CUDA, cuBLAS and NCCL take of a GPU beside torch's tensors, and what fragments; not part of a process's sum
CUDA_RESERVE = GIB
# 2 cores with AVX-512: read by bench.engine; by Ray's object store (docs/learner.md)
HOST_BANDWIDTH, HOST_LINK, HOST_FLOPS = 15e9, 1.1e9, 1e11


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a process may use. Bytes, bytes per second, operations per second."""

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    link: float
    multiprocessors: int = 0

    @property
    def usable_bytes(self) -> int:
        """Of the memory, what torch's tensors may take."""
        return self.memory_bytes - (CUDA_RESERVE if self.multiprocessors else 0)


def _gpu(name: str, mib: int, bandwidth: float, flops: float, link: float, multiprocessors: int) -> Device:
    return Device(
        name=name,
        memory_bytes=mib * 2**20,
        bandwidth=bandwidth,
        flops=flops,
        link=link,
        multiprocessors=multiprocessors,
    )


DEVICES = {
    device.name: device
    for device in (
        _gpu("a100-40gb", 40_960, 1.555e12, 312e12, 300e9, 108),
        _gpu("a100-80gb", 81_920, 2.039e12, 312e12, 300e9, 108),
        _gpu("h100", 81_559, 3.35e12, 989e12, 450e9, 132),
        _gpu("h200", 143_771, 4.8e12, 989e12, 450e9, 132),
        _gpu("b200", 183_359, 8.0e12, 2250e12, 900e9, 148),
        _gpu("l4", 23_034, 0.30e12, 121e12, 31.5e9, 58),
        _gpu("l40s", 46_068, 0.864e12, 362e12, 31.5e9, 142),
        _gpu("rtx3090", 24_576, 0.936e12, 71e12, 31.5e9, 82),
        _gpu("rtx4090", 24_564, 1.008e12, 165e12, 31.5e9, 128),
    )
}


def host() -> Device:
    """This machine's memory, as far as it is free; speeds as measured on 2 cores."""
    import torch

    return Device(
        name="host memory",
        memory_bytes=free_bytes(torch.device("cpu")),
        bandwidth=HOST_BANDWIDTH,
        flops=HOST_FLOPS,
        link=HOST_LINK,
    )


def gpu_of(config: Config) -> Device | None:
    """The GPU that cluster.device_type names, else the one found here; None: neither."""
    if config.cluster.device_type is not None:
        return DEVICES[config.cluster.device_type]
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    like = device_like(found.name, found.total_memory)
    return Device(
        name=found.name,
        memory_bytes=found.total_memory,
        bandwidth=like.bandwidth,
        flops=like.flops,
        link=like.link,
        multiprocessors=found.multi_processor_count,
    )


def device_like(name: str, memory_bytes: int) -> Device:
    """The known GPU that one found here is: device_like("NVIDIA L40S", 46 * 2**30).name -> "l40s". An A100 where none
    is like it."""
    said = name.lower().replace(" ", "")
    kinds = {known.split("-")[0] for known in DEVICES}
    kind = max((kind for kind in kinds if kind in said), key=len, default="a100")
    alike = [device for known, device in DEVICES.items() if known.split("-")[0] == kind]
    return min(alike, key=lambda device: abs(device.memory_bytes - memory_bytes))

"""How fast this machine reads memory."""

from __future__ import annotations

import statistics
import time

import torch


def read_bandwidth(num_bytes: int, device: torch.device, repeats: int = 9) -> float:
    """Bytes per second of a read-only sum over a buffer of `num_bytes`, median of `repeats`, with torch's current
    threads."""
    buffer = torch.zeros(max(1, num_bytes // 4), dtype=torch.float32, device=device)
    seconds = []
    for _ in range(repeats + 1):  # the first warms up
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        buffer.sum().item()
        seconds.append(time.perf_counter() - started)
    return buffer.numel() * 4 / statistics.median(seconds[1:])

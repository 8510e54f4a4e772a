"""The least time a decode may take: every step reads the weights once and the KV it attends to, at the memory's
bandwidth."""

from __future__ import annotations

import statistics
import time

import torch


def kv_bytes_read(lengths: list[int], running_steps: int, prompt_tokens: int, kv_bytes_per_token: int) -> int:
    """Least KV bytes a run reads: the prompt once per running step, and for token t of a sample its t - 1 earlier ones.

    A lower bound for every engine, also for those that read the prompt once per row.
    """
    return kv_bytes_per_token * (running_steps * prompt_tokens + sum(length * (length - 1) // 2 for length in lengths))


def roofline_seconds(running_steps: int, weight_bytes_read: int, kv_bytes: int, bandwidth: float) -> float:
    """Seconds to read the weights once per running step and `kv_bytes` in all, at `bandwidth` bytes per second."""
    return (running_steps * weight_bytes_read + kv_bytes) / bandwidth


def fit_step_time(seconds: dict[int, float]) -> tuple[float, float]:
    """c0, c1 of seconds = c0 + c1 x rows, by least squares over {rows: seconds of one step}. Needs two different row
    counts."""
    if len(seconds) < 2:
        raise ValueError(f"rows must have at least two different counts to fit c0 and c1, got {sorted(seconds)}")
    c1, c0 = statistics.linear_regression(list(seconds), list(seconds.values()))
    return c0, c1


def read_bandwidth(num_bytes: int, device: torch.device, repeats: int = 9) -> float:
    """Bytes per second of a read-only sum over a buffer of `num_bytes`, median of `repeats`, with torch's current
    threads."""
    buffer = torch.zeros(max(1, num_bytes // 4), dtype=torch.float32, device=device)
    seconds = []
    for _ in range(repeats + 1):  # the first warms up
        started = time.perf_counter()
        buffer.sum().item()  # waits for a GPU
        seconds.append(time.perf_counter() - started)
    return buffer.numel() * 4 / statistics.median(seconds[1:])

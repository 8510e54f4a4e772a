"""The matrix products of a computation on the CPU, and the seconds they take alone: no learner here is faster; and what
a GPU does in one."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")
REPEATS = 5  # of which the fastest counts
SIDE = 8192  # of the matrices of a GPU's product


class Operand(NamedTuple):
    """What decides how fast a product of it is."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def filled(self) -> Tensor:
        """A tensor of this kind, of random numbers."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype).normal_()


class MatrixProducts(TorchDispatchMode):
    """Counts the products that run inside, backward passes included; attention's own are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[Operand, Operand]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            left, right = [argument for argument in args if isinstance(argument, Tensor)][-2:]
            self.counts[_operand(left), _operand(right)] += 1
        return func(*args, **(kwargs or {}))

    def seconds_alone(self) -> float:
        """Of all that were counted, one after another, each kind at its fastest on operands that lie in the caches."""
        return sum(count * _fastest(*operands) for operands, count in self.counts.items())


def matrix_flops(device: torch.device, repeats: int = 10) -> float | None:
    """FLOP a second of a bf16 product of large matrices; None on a CPU."""
    if device.type != "cuda":
        return None
    left, right = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(3 + repeats):
        if number == 3:  # warmed up
            start.record()
        left @ right
    end.record()
    torch.cuda.synchronize(device)
    return 2 * SIDE**3 * repeats / (start.elapsed_time(end) / 1000)


def _operand(tensor: Tensor) -> Operand:
    return Operand(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _fastest(left: Operand, right: Operand) -> float:
    first, second, seconds = left.filled(), right.filled(), list[float]()
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        first @ second
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])

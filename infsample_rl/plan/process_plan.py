"""A process and what it will hold, line by line. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessPlan:
    """What every process of a role holds at its fullest moment, its idle footprint (interpreter, libraries, CUDA
    context) apart.

    Example: ProcessPlan(role="learner", count=2, gpus=1.0, lines={"weights": 16_000_000, "gradients": 16_000_000})
    """

    role: str
    count: int
    gpus: float  # of one of them; 0: its tensors are in host memory
    lines: Mapping[str, int]  # name -> bytes where it computes
    host_lines: Mapping[str, int] = field(default_factory=dict)  # of a process on a GPU: bytes it keeps in host memory

    @property
    def sum_bytes(self) -> int:
        """The predicted peak: the sum of the lines and nothing else."""
        return sum(self.lines.values())

    def record(self) -> dict[str, Any]:
        """As plan.json has it."""
        return {
            "role": self.role,
            "count": self.count,
            "gpus": self.gpus,
            "lines": [{"name": name, "bytes": size} for name, size in self.lines.items()],
            "sum_bytes": self.sum_bytes,
            "host_lines": [{"name": name, "bytes": size} for name, size in self.host_lines.items()],
        }

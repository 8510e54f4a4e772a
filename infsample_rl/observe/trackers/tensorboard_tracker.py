"""TensorBoard: scalars, in run_dir/tensorboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TensorboardTracker:
    """A writer; points after `start_step` that an earlier start wrote are hidden."""

    def __init__(self, run_dir: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run_dir / "tensorboard", purge_step=start_step + 1 if start_step > 0 else 0)
        self.said: list[str] = []
        self.place = ""

    def log(self, step: int, values: dict[str, float], samples: list[dict[str, Any]]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()

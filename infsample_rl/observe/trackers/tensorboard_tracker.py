"""TensorBoard: scalars, in run_dir/tensorboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TensorboardTracker:
    """A writer; a new run hides what an earlier one wrote there."""

    name = "TensorBoard"

    def __init__(self, run_dir: Path, start_step: int) -> None:
        self._folder = run_dir / "tensorboard"
        self._writer = self._open(None if start_step else 0)
        self.said: list[str] = []
        self.place = ""

    def _open(self, purge_step: int | None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self._folder, purge_step=purge_step)

    def log(self, step: int, values: dict[str, float], samples: list[dict[str, Any]]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(step + 1 if step else 0)  # hides points that are there from this step on

    def close(self, *, failed: bool) -> None:
        self._writer.close()

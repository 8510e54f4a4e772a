"""What W&B, TensorBoard and MLflow have in common: the calls of a tracker, and the id under which it keeps a run."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Protocol

COMPLETION_COLUMNS = [
    "step", "prompt_index", "sample_index", "prompt", "response", "reward", "components", "advantage", "length",
    "finish_reason", "policy_version",
]  # fmt: skip


class Tracker(Protocol):
    """One place where a run is looked at. A call may come from one thread only; none may end the run."""

    place: str  # where it is to be seen, a line for the user; "": nothing to say
    said: list[str]  # warnings for the user since they were last taken

    def log(self, step: int, values: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Metrics of a step that have a value, and samples with the keys COMPLETION_COLUMNS."""

    def close(self, *, failed: bool) -> None:
        """Send what is left, and end."""


def kept_id(path: Path, start_step: int) -> str | None:
    """The id that a tracker gave this run: kept in the run folder, so that a resumed run (start_step > 0) goes on under
    it."""
    return path.read_text(encoding="utf-8").strip() or None if start_step > 0 and path.exists() else None


def new_id(path: Path) -> str:
    """A new id, kept in `path`."""
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id

"""Where else a run's metrics go: W&B, TensorBoard and MLflow behind the same few calls, each imported only when it is
used."""

from __future__ import annotations

import threading
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from infsample_rl.config import Config


class Tracker(Protocol):
    """One place where a run is looked at. A call may come from one thread only; one that raises ends the tracking, not
    the run."""

    name: str  # of the place, for the user
    place: str  # where it is to be seen, a line for the user; "": nothing to say
    said: list[str]  # warnings for the user since they were last taken

    def log(self, step: int, values: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Metrics of a step that have a value, and samples as completions.jsonl has them."""

    def rewind(self, step: int) -> None:
        """Steps after `step` come again: hide what was logged of them, where the place can."""

    def close(self, *, failed: bool) -> None:
        """Send what is left, and end."""


def kept_id(path: Path, start_step: int) -> str | None:
    """The id that a tracker gave this run: kept in the run folder, so that a resumed run (start_step > 0) goes on under
    it."""
    return path.read_text(encoding="utf-8").strip() or None if start_step > 0 and path.exists() else None


def check_trackers(config: Config) -> str:
    """ValueError for a tracker that cannot be had. The mode of W&B: online, offline or disabled."""
    from infsample_rl.observe.trackers.mlflow_tracker import check_mlflow
    from infsample_rl.observe.trackers.wandb_tracker import check_project, wandb_mode

    if config.logging.mlflow is not None:
        check_mlflow(config.logging.mlflow)
    mode = wandb_mode(config.logging.wandb)
    if mode != "disabled":
        check_project(config.logging.wandb_project)
    return mode


def reach_trackers(config: Config) -> None:
    """ValueError for a server that a run needs and that does not answer; W&B's is none, it goes offline."""
    from infsample_rl.observe.trackers.mlflow_tracker import reach_mlflow

    if config.logging.mlflow is not None:
        reach_mlflow(config.logging.mlflow)


def import_ahead(config: Config) -> None:
    """Import W&B in a thread, where it is used: beside Ray's start, which is waited for, it takes next to no time."""
    from infsample_rl.observe.trackers.wandb_tracker import wandb_mode

    if wandb_mode(config.logging.wandb) != "disabled":
        threading.Thread(target=import_module, args=("wandb",)).start()


def start_trackers(config: Config, run_dir: Path, start_step: int) -> list[Tracker]:
    """Those that the settings ask for. ValueError for one that cannot be had; nothing is written before all settings
    are looked at."""
    from infsample_rl.observe.trackers.mlflow_tracker import MlflowTracker
    from infsample_rl.observe.trackers.tensorboard_tracker import TensorboardTracker
    from infsample_rl.observe.trackers.wandb_tracker import WandbTracker

    mode, logging = check_trackers(config), config.logging
    run_dir.mkdir(parents=True, exist_ok=True)
    trackers: list[Tracker] = []
    if logging.tensorboard:
        trackers.append(TensorboardTracker(run_dir, start_step))
    if logging.mlflow is not None:
        trackers.append(MlflowTracker(config, run_dir, kept_id(run_dir / "mlflow_id", start_step)))
    if mode != "disabled":
        trackers.append(WandbTracker(config, run_dir, mode, kept_id(run_dir / "wandb_id", start_step)))
    return trackers

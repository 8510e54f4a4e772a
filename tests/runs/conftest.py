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
def command(tiny_qwen3, sums_file, reward_file) -> Callable[..., list[str]]:
    """The command of two steps of 3 prompts x G = 4 in a folder, with changes to the settings."""
    settings = [
        f"model.path={tiny_qwen3}",
        f"data.source={sums_file}",
        "data.eval_source=null",
        "data.max_prompt_tokens=64",
        f"reward.functions=[{{name: '{reward_file}:vowels'}}]",
        "data.prompts_per_step=3",
        "rollout.group_size=4",
        "rollout.slots=2",
        "rollout.micro_group_size=1",
        "rollout.max_new_tokens=48",
        "learner.max_tokens_per_micro_batch=128",
        "learner.lr=1e-3",
        "learner.warmup_steps=0",
        "run.checkpoint_every=0",
        "run.steps=2",
        "cluster.rollout_workers=1",
        "cluster.learner_ranks=1",
        "logging.wandb=disabled",
    ]

    def of(folder: Path, *changes: str) -> list[str]:
        return [sys.executable, "-m", "infsample_rl.main", *settings, f"run.dir={folder}", *changes]

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

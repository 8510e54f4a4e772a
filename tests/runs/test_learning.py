"""The shipped small experiments learn. Minutes long: in `make test-all` only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# the same command, with every group's advantages in another order
SHUFFLED = """
import random, sys
from infsample_rl import main
from infsample_rl.controller import groups

dice, given = random.Random(0), groups.group_advantages
groups.group_advantages = lambda rewards, kind: dice.sample(given(rewards, kind), len(rewards))
sys.exit(main.main())
"""


def held_out_rise(run_dir: Path, *program: str) -> float:
    """Held-out accuracy after 12 steps less that of the start."""
    arguments = ["run.steps=12", "run.eval_every=0", f"run.dir={run_dir}", "logging.wandb=disabled"]
    subprocess.run([sys.executable, *program, *arguments], check=True, cwd=run_dir.parent, timeout=600)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    assert 0.2 <= accuracy[0] <= 0.6
    return accuracy[-1] - accuracy[0]


@pytest.mark.slow
def test_held_out_accuracy_rises_in_twelve_steps(tmp_path):
    assert held_out_rise(tmp_path / "run", "-m", "infsample_rl.main") > 0.15  # five standard errors of 200 problems


@pytest.mark.slow
def test_it_does_not_rise_when_advantages_are_shuffled(tmp_path):
    assert held_out_rise(tmp_path / "run", "-c", SHUFFLED) < 0.1


@pytest.mark.slow
def test_a_policy_learns_to_listen_to_its_environment(tmp_path):
    """Held-out numbers are in nothing that it was ever trained on."""
    arguments = ["+experiment=guess_tiny", f"run.dir={tmp_path / 'run'}", "logging.wandb=disabled"]
    subprocess.run([sys.executable, "-m", "infsample_rl.main", *arguments], check=True, cwd=tmp_path, timeout=600)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    assert accuracy[-1] > 1.6 * accuracy[0] > 0.1  # doubled, less two standard errors of 512 games
    assert rows[-1]["environment/turns_mean"] > 2

"""scripts/compare_runs.py draws and lists every run it is given, whatever a run lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_runs.py"


def test_runs_of_one_name_and_without_a_reward_are_all_listed(tmp_path):
    figures = {"response/length_mean": 40.0, "response/tokens": 320, "timing/step": 2.0, "timing/rollout": 1.0}
    for name, reward in (("first", 0.5), ("second", None)):
        run = tmp_path / name / "run"
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "reward/mean": reward} | figures) + '\n{"step": 2, "rew'
        )
    runs = [tmp_path / "first" / "run", tmp_path / "second" / "run"]
    done = subprocess.run(
        [sys.executable, SCRIPT, "--out", tmp_path / "curves.png", *runs], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2:] == [
        "| first/run | - | 0.50 -> 0.50 | 40 -> 40 | 2.0 | 320 |",
        "| second/run | - | - | 40 -> 40 | 2.0 | 320 |",
    ]
    assert (tmp_path / "curves.png").stat().st_size > 0

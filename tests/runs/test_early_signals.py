"""SIGTERM, Ctrl-C and wrong input in the first seconds of the real command, whatever it and its threads are doing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
ENDS = {
    signal.SIGTERM: (0, "ended by SIGTERM before the run began: nothing has been written"),
    signal.SIGINT: (130, "interrupted before the run began: nothing has been written"),
}
# Seconds since it listens: imports, Ray's processes, checks beside them, what the driver imports, workers that start.
MOMENTS = (0.0, 0.2, 0.5, 0.8, 1.2, 1.6, 2.0, 2.5, 3.0, 3.6, 4.2, 5.0, 6.0)
END_S = 15.0
MARK = "INFSAMPLE_RL_TEST_OF_EARLY_SIGNALS"


def wait_until_it_listens(process: subprocess.Popen[str]) -> None:
    """What comes before is Python's own start, which ends as every process does."""
    while True:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
        if all(caught >> number - 1 & 1 for number in ENDS):
            break
        assert process.poll() is None
        time.sleep(0.005)


def running(mark: str) -> list[psutil.Process]:
    """Every process that the command has started, whoever its parent is by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # it has ended, or is another user's
            pass
    return found


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", ENDS)
def test_a_start_ends_at_once_and_leaves_nothing(command, tmp_path: Path, short_path, number, moment):
    run, sessions = tmp_path / "run", Path(short_path) / "ray"
    own = {MARK: str(run), "RAY_TMPDIR": short_path}
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(
            command(run, "run.steps=100000"), stdout=said, stderr=said, env=os.environ | own, text=True
        )
        try:
            wait_until_it_listens(process)
            time.sleep(moment)
            process.send_signal(number)
            code = process.wait(timeout=END_S)
            deadline = time.monotonic() + END_S
            while (left := running(str(run))) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            process.kill()
            for other in running(str(run)):
                other.kill()
    text = (tmp_path / "said").read_text()
    assert code == ENDS[number][0] and not left, text
    if not run.exists():  # on a quick machine the last moments are in the run
        assert text.splitlines()[-1] == ENDS[number][1] or "interrupted; go on" in text
        while text.splitlines()[-1] == ENDS[number][1] and sessions.exists() and os.listdir(sessions):
            assert time.monotonic() < deadline, os.listdir(sessions)
            time.sleep(0.1)
    else:
        assert "ended by SIGTERM before" not in text and ("stopped after step" in text or "interrupted; go on" in text)


WITHOUT_RAY = """
import runpy, sys, time
from infsample_rl.cluster import local_ray
local_ray.start_local = lambda *given: time.sleep(600)
runpy.run_module("infsample_rl.main", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("reward.functions=[none.py:f]", "reward.functions: no file"),
        ("data.source=none.jsonl", "none.jsonl: there is no such file"),
        ("reward.functions=[reward.py:f]", "needs the column 'levle', which no row of data.source="),
        (
            "reward.functions=[reward.py:f] data.source=rows.jsonl data.eval_source=held.jsonl",
            "'levle', which no row of data.eval_source=",
        ),
        ("rollout.engine=vllm rollout.vllm_python=./none", "is no interpreter"),
    ],
)
def test_wrong_input_is_told_though_ray_never_starts(tmp_path, setting, said):
    (tmp_path / "reward.py").write_text("def f(completions, levle):\n    return [0.0] * len(completions)\n")
    row = {"question": "1 + 1", "answer": 2}
    (tmp_path / "held.jsonl").write_text(json.dumps(row))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"levle": 1}))
    command = [sys.executable, "-c", WITHOUT_RAY, "run.dir=run", *setting.split()]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1] and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_wrong_input_leaves_no_ray(command, tmp_path, short_path):
    run, sessions = tmp_path / "run", Path(short_path) / "ray"
    own = {MARK: str(run), "RAY_TMPDIR": short_path}
    older = sessions / "session_2025-01-01_00-00-00_000000_1"
    older.mkdir(parents=True)
    done = subprocess.run(
        command(run, "data.max_prompt_tokens=1"), env=os.environ | own, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stderr.count("error: ") == 1, done.stderr
    deadline = time.monotonic() + END_S
    while running(str(run)) or os.listdir(sessions) != [older.name]:
        assert time.monotonic() < deadline, (running(str(run)), os.listdir(sessions))
        time.sleep(0.1)

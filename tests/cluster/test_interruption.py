"""What ends a run in order, and when."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from infsample_rl.cluster import connection
from infsample_rl.cluster import interruption as interruption_module
from infsample_rl.cluster.connection import RayProcesses
from infsample_rl.cluster.interruption import LOOK_S, Interruption, Terminated, run_unless_failed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr(interruption_module.time, "monotonic", lambda: now[0])
    return now


def test_what_is_gone_ends_the_run_at_the_next_look(clock):
    interruption, gone, looks = Interruption(), [None], []

    def find_failure():
        looks.append(clock[0])
        return gone[0]

    interruption.end_when(find_failure)
    interruption.check()
    gone[0] = "Ray's raylet has not answered"
    interruption.check()  # too soon for another look
    clock[0] += LOOK_S
    with pytest.raises(Terminated):
        interruption.check()
    assert interruption.failure == interruption.reason == "Ray's raylet has not answered" and looks == [
        100.0,
        100.0 + LOOK_S,
    ]
    clock[0] += 5
    assert interruption.seconds_left(30) == 25.0


def test_what_must_not_be_left_half_done_holds_a_failure_back_as_it_does_sigterm(clock):
    interruption = Interruption()
    interruption.end_when(lambda: "gone")
    with interruption.held(10):
        interruption.check()
        clock[0] += 9
        interruption.check()
        clock[0] += 1
        with pytest.raises(Terminated):
            interruption.check()


def test_after_sigterm_nothing_else_is_the_reason(clock):
    interruption = Interruption()
    interruption.end_when(lambda: "gone")
    interruption._request()
    with pytest.raises(Terminated):
        interruption.check()
    assert interruption.reason == "SIGTERM" and interruption.failure is None


def test_a_process_of_ray_is_gone_once_it_takes_no_connection_for_its_time(monkeypatch):
    control, now = socket.create_server(("127.0.0.1", 0)), [0.0]
    host, port = control.getsockname()
    processes = RayProcesses.__new__(RayProcesses)
    processes._silent_since, processes._processes = {}, [("the control service", (host, port), 20.0)]
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert processes.failure() is None
    control.close()
    assert processes.failure() is None
    now[0] = 19.0
    assert processes.failure() is None
    again = socket.create_server((host, port))  # it was started again: its time begins anew
    assert processes.failure() is None
    again.close()
    now[0] = 30.0
    assert processes.failure() is None
    now[0] = 50.0
    assert processes.failure() == f"the control service has not answered at 127.0.0.1:{port} for 20 s"


def failing_after(seconds):
    time.sleep(seconds)
    raise ValueError("a setting is wrong")


def test_a_start_is_left_at_once_when_what_runs_beside_it_fails():
    with ThreadPoolExecutor(1) as beside:
        task, began = beside.submit(failing_after, 0.2), time.monotonic()
        run_unless_failed(task, lambda: time.sleep(60))
        assert time.monotonic() - began < 30 and isinstance(task.exception(), ValueError)
        run_unless_failed(task, lambda: time.sleep(60))  # it has failed already
        assert time.monotonic() - began < 30
        for _ in range(200):  # it fails before the work, in it, at its end or after it
            task = beside.submit(failing_after, 0.0)
            run_unless_failed(task, lambda: None)
            with pytest.raises(ValueError, match="a setting is wrong"):
                task.result()
        done = []
        run_unless_failed(beside.submit(time.sleep, 0), lambda: done.append(time.sleep(0.1)))
        assert done == [None], "what succeeds leaves nothing"


def test_ctrl_c_is_nobody_elses():
    with pytest.raises(KeyboardInterrupt):
        run_unless_failed(Future(), lambda: signal.raise_signal(signal.SIGINT))


@pytest.mark.slow
def test_a_refused_command_leaves_no_process_of_ray(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    (tmp_path / "own.py").write_text("def own(completions, gold, **_):\n    return [0.0] * len(completions)\n")
    command = [sys.executable, "-m", "infsample_rl.main", "data.source=own.jsonl", "reward.functions=[own.py:own]"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "INFSAMPLE_TEST_RUN": str(tmp_path)}
    refused = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    said = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert refused.returncode == 2 and len(said) == 1 and "needs the column 'gold'" in said[0]
    assert not (tmp_path / "runs").exists()
    until = time.monotonic() + 60  # the fork server ends once it has imported what it was importing
    while (left := of_run(tmp_path)) and time.monotonic() < until:
        time.sleep(0.5)
    assert left == []


def of_run(folder):
    """Names of the processes that have this run's environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("INFSAMPLE_TEST_RUN") == str(folder):
                found.append(process.name())
        except psutil.Error:
            continue
    return found

"""SIGTERM and Ctrl-C in the first seconds of the real command, whatever it and its threads are doing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

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
def test_a_start_ends_at_once_and_leaves_nothing(command, tmp_path: Path, number, moment):
    run = tmp_path / "run"
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(
            command(run, "run.steps=100000"), stdout=said, stderr=said, env=os.environ | {MARK: str(run)}, text=True
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
    else:
        assert "ended by SIGTERM before" not in text and ("stopped after step" in text or "interrupted; go on" in text)

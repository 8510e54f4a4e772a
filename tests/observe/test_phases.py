"""What a process is doing: recorded for its owner, told when asked, and readable from outside."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from infsample_rl.cluster.interruption import Interruption
from infsample_rl.observe.phases import current, phase, phase_of, report_phases, status, watch_log
from infsample_rl.types import Phase

linux = pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="process names are read from /proc")


def take_phases() -> list[Phase]:
    return report_phases("rollout", 0, "here").phases


@pytest.fixture(autouse=True)
def nothing_recorded():
    take_phases()


def test_phases_nest_and_the_outer_one_is_current_again():
    with phase("decode"):
        with phase("prefill"):
            assert current()[0] == "prefill"
        assert current()[0] == "decode"
    name, since = current()
    inner, outer = take_phases()
    assert (inner.name, outer.name, name) == ("prefill", "decode", "idle")
    assert outer.start <= inner.start <= inner.end <= outer.end <= since
    assert take_phases() == []


def test_a_decorated_function_is_a_phase_also_when_it_raises():
    @phase("backward")
    def fail():
        assert current()[0] == "backward"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [found.name for found in take_phases()] == ["backward"] and current()[0] == "idle"


def test_threads_are_kept_apart():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with phase("forward"):
            inside.set()
            leave.wait()

    with phase("decode"):
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait()
        assert current()[0] == "forward"  # the one that began last
    assert current()[0] == "forward"
    leave.set()
    thread.join()
    decode, forward = take_phases()
    assert (decode.name, forward.name) == ("decode", "forward") and decode.thread != forward.thread


def test_a_phase_that_is_not_over_is_not_reported_as_settled():
    with phase("decode"):
        assert report_phases("rollout", 3, "here").phases == []
    assert [found.name for found in report_phases("rollout", 3, "here").phases] == ["decode"]


CHILD = """
import sys, time
from infsample_rl.observe.phases import phase
with phase("backward"):
    print("in", flush=True)
    sys.stdin.readline()
print("out", flush=True)
sys.stdin.readline()
"""


@linux
def test_the_phase_of_a_stopped_process_is_read_from_outside():
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "in\n"
        os.kill(child.pid, signal.SIGSTOP)
        assert phase_of(child.pid) == "backward"
        os.kill(child.pid, signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "out\n" and phase_of(child.pid) == "idle"
    finally:
        child.kill()
        child.communicate()
    assert phase_of(child.pid) is None


@linux
def test_a_forked_child_has_phases_and_a_name_of_its_own():
    with phase("reward"):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            with phase("child"):
                os.write(write, f"{current()[0]} {phase_of(os.getppid())} {phase_of(os.getpid())}".encode())
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read, 100) == b"child reward child"
        os.close(read), os.close(write)
    assert [found.name for found in take_phases()] == ["reward"]


def test_phase_last_log_line_and_the_place_a_thread_waits_at_are_told():
    watch_log()
    logging.getLogger("infsample_rl.test").warning("about to wait")
    begun, done = threading.Event(), Interruption()

    def work() -> None:
        with phase("decode"):
            begun.set()
            done.sleep(1.0)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    found = status()
    assert found.pid == os.getpid() and found.phase == "decode" and 0 <= found.phase_s < 30
    assert found.last_line == "infsample_rl.test: about to wait"
    assert "interruption.py" in found.stack and "in sleep" in found.stack
    thread.join()

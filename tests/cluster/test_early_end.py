"""SIGTERM and Ctrl-C before there is a run end the process at once, wherever it is, with all that it started."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import psutil
import pytest

from infsample_rl.cluster.early_end import ending_at_once, take_over
from infsample_rl.cluster.interruption import Interruption

ENDS = {
    signal.SIGTERM: (0, "ended by SIGTERM before the run began: nothing has been written\n"),
    signal.SIGINT: (130, "interrupted before the run began: nothing has been written\n"),
}
# The main thread is in a callback, where what a handler raises is dropped, and holds a lock for which a thread waits
# that is joined at the end. Below it is what ignores signals, and a session of its own.
WAITS = {
    "in Python": "time.sleep(600)",
    "in other code, which no handler interrupts": "[ctypes.CDLL(None).sleep(600) for _ in range(9)]",
}
SCRIPT = """
import ctypes, subprocess, threading, time, weakref
from infsample_rl.cluster.early_end import ending_at_once

class Thing: pass

def wait(_):
    print("in the callback", flush=True)
    {waits}

with ending_at_once():
    subprocess.Popen(["sh", "-c", "trap '' TERM INT; setsid sleep 600 & echo; wait"])
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=lock.acquire).start()
    thing = Thing()
    reference = weakref.ref(thing, wait)
    del thing
"""


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("number", ENDS)
def test_a_signal_ends_a_process_that_could_not_end_itself_and_all_below_it(number, waits):
    script = SCRIPT.format(waits=WAITS[waits])
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    below: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(2)) == ["\n", "in the callback\n"]
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        _, left = psutil.wait_procs(below, timeout=60)
    finally:
        process.kill()
        for child in below:
            if child.is_running():
                child.kill()
    assert (process.returncode, said) == ENDS[number]
    assert len(below) == 2 and not left


@pytest.fixture
def before():
    """The handlers, which the test may change."""
    handlers = [signal.getsignal(number) for number in ENDS]
    yield handlers
    for number, handler in zip(ENDS, handlers, strict=True):
        signal.signal(number, handler)


def test_the_handlers_are_the_callers_again_after_the_block(before):
    with ending_at_once():
        assert not set(before) & {signal.getsignal(number) for number in ENDS}
    assert [signal.getsignal(number) for number in ENDS] == before


def test_the_thread_ends_with_the_block(before):
    with ending_at_once():
        thread = next(thread for thread in threading.enumerate() if thread.name == "early end")
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_run_takes_both_signals_over_and_keeps_sigterm_beyond_the_block(before):
    with ending_at_once():
        (interruption := Interruption()).install()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    assert interruption.requested_at is not None, "a second one, after the run, must not end it otherwise"


def test_a_job_in_a_shells_background_stays_deaf_to_ctrl_c(before):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ending_at_once():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        take_over(lambda *_: None)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN

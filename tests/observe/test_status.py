"""A worker says where it stands from another thread than the one that works."""

from __future__ import annotations

import logging
import os
import threading

from infsample_rl.cluster.interruption import Interruption
from infsample_rl.observe.phases import phase
from infsample_rl.observe.status import status, watch_log


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

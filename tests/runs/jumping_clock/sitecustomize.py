"""With this file's folder on PYTHONPATH the wall clock of a run's own processes jumps by two hours every second. A
process that has asked for the time leaves a file with its number beside this one."""

import os
import sys
import time
from pathlib import Path

true_time, born, marked = time.time, time.monotonic(), set()


def jumping_time() -> float:
    """time.time(), an hour late or an hour early in turn."""
    if os.getpid() not in marked:
        marked.add(os.getpid())
        Path(__file__).with_name(str(os.getpid())).touch()
    late = int(time.monotonic() - born) % 2 == 0
    return true_time() + (3600.0 if late else -3600.0)


# the driver, and what Ray's workers are or are forked from; not Ray's own services, whose logs and heartbeats are not
# ours
if any(name.endswith(("default_worker.py", "fork_server.py", "-m")) for name in sys.orig_argv):
    time.time = jumping_time

"""With this folder on PYTHONPATH the wall clock of a run's own processes jumps by two hours every second."""

import sys
import time

true_time, born = time.time, time.monotonic()


def jumping_time() -> float:
    """time.time(), an hour late or an hour early in turn."""
    late = int(time.monotonic() - born) % 2 == 0
    return true_time() + (3600.0 if late else -3600.0)


# the driver, and Ray's workers; not Ray's own services, whose logs and heartbeats are not ours
if any(name.endswith(("default_worker.py", "-m")) for name in sys.orig_argv):
    time.time = jumping_time

"""Waits for what other threads and processes do, and ends to processes."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil


def wait_until(condition: Callable[[], Any], seconds: float = 60.0, said: str = "it never came") -> None:
    """Until the condition holds, at most so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{said} within {seconds:g} s"
        time.sleep(0.02)


def end(process: subprocess.Popen, seconds: float = 30) -> None:
    """SIGTERM to a process and, when it does not end, SIGKILL to it and all below it: never to anything that we did not
    start."""
    if process.poll() is not None:
        return
    tree = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def has_ended(pid: int) -> bool:
    """A process that has; a zombie has too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True

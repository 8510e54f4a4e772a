"""Waits for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], seconds: float = 60.0, said: str = "it never came") -> None:
    """Until the condition holds, at most so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{said} within {seconds:g} s"
        time.sleep(0.02)

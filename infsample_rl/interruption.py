"""SIGTERM, as job managers send it before they kill: the run stops where it waits next and keeps what is finished."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator


class Terminated(BaseException):
    """SIGTERM has come. As KeyboardInterrupt it is no Exception: what recovers from errors must not take it for one."""


def raise_on_sigterm() -> None:
    """Before anything runs that must be ended in order: SIGTERM raises Terminated wherever the main thread stands."""
    signal.signal(signal.SIGTERM, _raise)


def _raise(*_: object) -> None:
    raise Terminated


class Interruption:
    """Turns SIGTERM into Terminated at the next check(). The handler itself does nothing else, so it cannot break a call in two."""

    def __init__(self) -> None:
        self.requested_at: float | None = None  # time.monotonic()
        self._held_s = 0.0  # seconds after SIGTERM in which check() does not raise

    def install(self) -> None:
        """Take SIGTERM over, in the main thread."""
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, *_: object) -> None:
        self.requested_at = self.requested_at or time.monotonic()

    def check(self) -> None:
        """Raise Terminated if SIGTERM has come, outside held()."""
        if self.requested_at is not None and time.monotonic() - self.requested_at >= self._held_s:
            raise Terminated

    def sleep(self, seconds: float) -> None:
        """Sleep, but not on after SIGTERM: check()."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.5))

    @contextlib.contextmanager
    def held(self, for_s: float) -> Iterator[None]:
        """What must not be left half done: an optimizer step and all that belongs to it. `for_s`: at most so long after SIGTERM."""
        before, self._held_s = self._held_s, max(self._held_s, for_s)
        try:
            yield
        finally:
            self._held_s = before

    def seconds_left(self, grace_s: float) -> float:
        """Of the time between SIGTERM and the end."""
        return grace_s if self.requested_at is None else grace_s - (time.monotonic() - self.requested_at)

"""What ends a run in order, where it waits next, so that it keeps what is finished: SIGTERM, as job managers send it
before they kill, and the loss of what nothing can bring back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from infsample_rl.cluster.early_end import take_over

SLICE_S = 0.5  # how long a wait lasts before it is looked whether the run is to end
LOOK_S = 2.0  # how often it is looked whether something that cannot be brought back is gone


class Terminated(BaseException):
    """The run is to end now; no Exception, so that what recovers from errors does not take it for one."""


class Interruption:
    """Turns SIGTERM into Terminated at the next check(); the handler does nothing else, it breaks no call in two."""

    def __init__(self) -> None:
        self.requested_at: float | None = None  # time.monotonic()
        self.failure: str | None = None  # what is gone, where that and not SIGTERM ends the run
        self._held_s = 0.0  # seconds after the request in which check() does not raise
        self._find_failure: Callable[[], str | None] = lambda: None
        self._looked = -LOOK_S

    def install(self) -> None:
        """Take SIGTERM over, in the main thread."""
        take_over(self._request)

    def _request(self, *_: object) -> None:
        self.requested_at = self.requested_at or time.monotonic()

    def end_when(self, find_failure: Callable[[], str | None]) -> None:
        """Let check() ask every LOOK_S what is gone, and end the run once that is something."""
        self._find_failure = find_failure

    @property
    def reason(self) -> str:
        """Why the run ends."""
        return self.failure or "SIGTERM"

    def check(self) -> None:
        """Raise Terminated if SIGTERM has come or something is gone, outside held()."""
        if self.requested_at is None and time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            self.failure = self._find_failure()
            self.requested_at = None if self.failure is None else self._looked
        if self.requested_at is not None and time.monotonic() - self.requested_at >= self._held_s:
            raise Terminated

    def sleep(self, seconds: float) -> None:
        """Sleep, but not on once the run is to end: check()."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, SLICE_S))

    @contextlib.contextmanager
    def held(self, for_s: float) -> Iterator[None]:
        """What must not be left half done, as an optimizer step, for at most `for_s` seconds after the request."""
        before, self._held_s = self._held_s, max(self._held_s, for_s)
        try:
            yield
        finally:
            self._held_s = before

    def seconds_left(self, grace_s: float) -> float:
        """Of the time between the request and the end."""
        return grace_s if self.requested_at is None else grace_s - (time.monotonic() - self.requested_at)

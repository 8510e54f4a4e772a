"""What a process is doing, and what it has done: named phases with their times, and where its threads stand.

    with phase("backward"):
        ...

On Linux the name of the phase is also the process's name (/proc/PID/comm): `top` shows it, and phase_of(pid) reads it
from outside even of a process that is stopped or hangs. A phase costs about 5 microseconds, a third of it for writing
the name twice (docs/observability.md).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from infsample_rl.types import Phase, WorkerPhases, WorkerStatus

KEPT = 20_000  # finished phases a process keeps until they are taken; older ones are dropped
IDLE = "idle"  # the name between phases
NAME_BYTES = 15  # Linux cuts a process's name here
_PACKAGE = str(Path(__file__).resolve().parents[1])
_FRAMES = 6  # of a thread, the innermost


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase of this process, for a block or a whole function. Phases nest: at its end the outer one is the current
    one again."""
    opened = _recorder.begin(name)
    try:
        yield
    except Exception as error:
        if "__notes__" not in error.__dict__:  # the innermost phase says where it was
            error.add_note(f"in phase {name}")
        raise
    finally:
        _recorder.end(*opened)


class _Recorder:
    """Phases of one process: those that are open, the newest last, and those that have ended."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: list[tuple[str, float]] = []  # of all threads together: name, since when
        self._ended: deque[Phase] = deque(maxlen=KEPT)
        self._threads: dict[int, int] = {}  # threading.get_ident() -> number
        self._idle_since = time.time()
        self._comm: int | None = None  # this process's name, kept open, which makes a write three times cheaper
        with contextlib.suppress(OSError):  # there is no /proc
            self._comm = os.open("/proc/self/comm", os.O_WRONLY | os.O_CLOEXEC)

    def begin(self, name: str) -> tuple[str, float]:
        with self._lock:
            self._open.append((name, time.time()))
            self._show()
            return self._open[-1]

    def end(self, name: str, start: float) -> None:
        with self._lock:
            now = max(start, time.time())  # the clock may be set back
            self._open.remove((name, start))
            thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
            self._ended.append(Phase(name, start, now, thread))
            if not self._open:
                self._idle_since = now
            self._show()

    def current(self) -> tuple[str, float]:
        with self._lock:
            return self._open[-1] if self._open else (IDLE, self._idle_since)

    def take(self) -> list[Phase]:
        with self._lock:
            taken = list(self._ended)
            self._ended.clear()
            return taken

    def _show(self) -> None:
        if self._comm is not None:
            os.write(self._comm, self.current()[0].encode()[:NAME_BYTES])


def current() -> tuple[str, float]:
    """The innermost phase this process is in, and the time.time() since which it is; between phases ("idle", since
    when)."""
    return _recorder.current()


def report_phases(role: str, index: int, node: str) -> WorkerPhases:
    """Phases that have ended since the last call, in the order of their ends (an inner phase comes before the one
    around it), signed with the worker they are of."""
    return WorkerPhases(role, index, node, _recorder.take())


def phase_of(pid: int) -> str | None:
    """The phase another process is in, running or stopped; None if it has ended or names cannot be read here.

    A process that has never been in a phase has the name it was started with.
    """
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return None


class _LastLine(logging.Handler):
    """Keeps the newest log record's text."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = f"{record.name}: {record.getMessage()}"


_last_line = _LastLine(logging.INFO)


def watch_log() -> None:
    """Keep this process's last log line from now on, for status()."""
    if _last_line not in logging.getLogger().handlers:
        logging.getLogger().addHandler(_last_line)


def status() -> WorkerStatus:
    """What this process says when the driver asks why nothing moves; from any of its threads, also while another
    computes or waits."""
    name, since = current()
    return WorkerStatus(
        pid=os.getpid(),
        node=socket.gethostname(),
        phase=name,
        phase_s=max(0.0, time.time() - since),
        last_line=_last_line.text,
        stack=_stack(),
    )


def _stack() -> str:
    """The innermost frames of every thread that is in this package, this one left out."""
    texts = []
    for ident, frame in sys._current_frames().items():
        frames = traceback.extract_stack(frame)
        if ident != threading.get_ident() and any(entry.filename.startswith(_PACKAGE) for entry in frames):
            lines = (f"{Path(entry.filename).name}:{entry.lineno} in {entry.name}: {entry.line}" for entry in frames)
            texts.append("\n".join(deque(lines, maxlen=_FRAMES)))
    return "\n\n".join(texts)


def _start_anew() -> None:
    """In a forked child: its parent's phases are not its own, and the open name is still its parent's."""
    global _recorder
    if _recorder._comm is not None:
        os.close(_recorder._comm)
    _recorder = _Recorder()


_recorder = _Recorder()
os.register_at_fork(after_in_child=_start_anew)

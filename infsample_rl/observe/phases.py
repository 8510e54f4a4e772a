"""What a process is doing, and what it has done: named phases with their times, and where its threads stand.

    with phase("backward"):
        ...

On Linux the name of the phase is also the process's name (/proc/PID/comm): `top` shows it, and phase_of(pid) reads it
from outside even of a process that is stopped or hangs. A phase costs about 5 microseconds, a third of it for writing
the name twice (docs/observability.md).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import ContextDecorator
from pathlib import Path

from infsample_rl.types import Phase, WorkerPhases, WorkerStatus

KEPT = 20_000  # finished phases a process keeps until they are taken; older ones are dropped
IDLE = "idle"  # the name between phases
NAME_BYTES = 15  # Linux cuts a process's name here
_PACKAGE = str(Path(__file__).resolve().parents[1])
_FRAMES = 6  # of a thread, the innermost


class phase(ContextDecorator):  # noqa: N801 -- reads as a statement: with phase("decode")
    """A phase of this process, for a block or a whole function. Phases nest: at its end the outer one is the current
    one again."""

    def __init__(self, name: str):
        self.name = name

    def _recreate_cm(self) -> phase:
        return phase(self.name)  # a decorated function may run in several threads

    def __enter__(self) -> phase:
        self._start = _recorder.begin(self)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        _recorder.end(self, self._start)
        if isinstance(error, Exception) and "__notes__" not in error.__dict__:  # the innermost phase says where it was
            error.add_note(f"in phase {self.name}")


class _Recorder:
    """Phases of one process: those that are open, the newest last, and those that have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[tuple[phase, float]] = []  # of all threads together
        self._ended: deque[Phase] = deque(maxlen=KEPT)
        self._threads: dict[int, int] = {}  # threading.get_ident() -> number
        self._idle_since = time.time()
        self._comm = _open_comm()

    def begin(self, opened: phase) -> float:
        with self._lock:
            now = time.time()
            self._open.append((opened, now))
            self._show(opened.name)
            return now

    def end(self, opened: phase, start: float) -> None:
        with self._lock:
            now = max(start, time.time())  # the clock may be set back
            self._open.remove((opened, start))
            thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
            self._ended.append(Phase(opened.name, start, now, thread))
            if not self._open:
                self._idle_since = now
            self._show(self._open[-1][0].name if self._open else IDLE)

    def current(self) -> tuple[str, float]:
        with self._lock:
            return (self._open[-1][0].name, self._open[-1][1]) if self._open else (IDLE, self._idle_since)

    def take(self) -> tuple[list[Phase], float]:
        with self._lock:
            taken = list(self._ended)
            self._ended.clear()
            return taken, min([start for _, start in self._open], default=time.time())

    def _show(self, name: str) -> None:
        if self._comm is not None:
            os.write(self._comm, name.encode()[:NAME_BYTES])


def current() -> tuple[str, float]:
    """The innermost phase this process is in, and the time.time() since which it is; between phases ("idle", since
    when)."""
    return _recorder.current()


def report_phases(role: str, index: int, node: str) -> WorkerPhases:
    """Phases that have ended since the last call, in the order of their ends (an inner phase comes before the one
    around it), signed with the worker they are of."""
    phases, until = _recorder.take()
    return WorkerPhases(role, index, node, phases, until)


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
            texts.append(
                "\n".join(
                    f"{Path(entry.filename).name}:{entry.lineno} in {entry.name}: {entry.line}"
                    for entry in frames[-_FRAMES:]
                )
            )
    return "\n\n".join(texts)


def _open_comm() -> int | None:
    """This process's name, to be written; kept open, which makes a write three times cheaper. None where there is no
    /proc."""
    try:
        return os.open("/proc/self/comm", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _start_anew() -> None:
    """In a forked child: its parent's phases are not its own, and the open name is still its parent's."""
    global _recorder
    inherited = _recorder._comm
    if inherited is not None:
        os.close(inherited)
    _recorder = _Recorder()


_recorder = _Recorder()
os.register_at_fork(after_in_child=_start_anew)

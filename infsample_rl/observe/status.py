"""What a worker says of itself when the driver asks why nothing moves: where its threads stand and what it logged
last."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from infsample_rl.observe.phases import current
from infsample_rl.types import WorkerStatus

_PACKAGE = str(Path(__file__).resolve().parents[1])
_FRAMES = 6  # of a thread, the innermost


class _LastLine(logging.Handler):
    """Keeps the newest log record's text."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = f"{record.name}: {record.getMessage()}"


_last_line = _LastLine(logging.INFO)


def watch_log() -> None:
    """Keep this process's last log line from now on."""
    if _last_line not in logging.getLogger().handlers:
        logging.getLogger().addHandler(_last_line)


def status() -> WorkerStatus:
    """Of this process, from any of its threads, also while another computes or waits."""
    phase, since = current()
    seconds = max(0.0, time.time() - since)
    return WorkerStatus(
        pid=os.getpid(),
        node=socket.gethostname(),
        phase=phase,
        phase_s=seconds,
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

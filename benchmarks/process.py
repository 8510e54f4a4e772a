"""One process per measurement, in a process group of its own that is ended with it. Standard library only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any


def measure(
    command: list[str],
    spec: dict[str, Any],
    *,
    threads: int,
    timeout_s: float,
    environment: dict[str, str] | None = None,
) -> Any:
    """What `command SPEC RESULT` writes to the file RESULT, both JSON. RuntimeError, with its last words, when it fails
    or takes too long."""
    with tempfile.TemporaryDirectory() as scratch:
        result, log = Path(scratch) / "result.json", Path(scratch) / "log"
        counts = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, json.dumps(spec), str(result)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | counts | (environment or {}),
                start_new_session=True,
            )
            try:
                status = process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"took longer than timeout_s={timeout_s:g}; last words: {last_line(log)}") from None
            finally:
                _end_group(process)
        if status != 0 or not result.exists():
            raise RuntimeError(f"ended with status {status}: {last_line(log)}")
        return json.loads(result.read_text())


def measure_here(what: str, workload: dict[str, Any], settings: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """One measurement of `benchmarks.measure` with this interpreter."""
    command = [sys.executable, "-m", "benchmarks.measure"]
    spec = {"what": what, "workload": workload, "settings": settings}
    return measure(command, spec, threads=workload["threads"], timeout_s=timeout_s)


def end_with_terminate() -> None:
    """Make SIGTERM end this process as Ctrl-C does, so that the measurement under way is ended too."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def _end_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)  # vLLM's workers outlive their parent
    except ProcessLookupError:
        pass  # all of the group has ended
    process.wait()

"""One process per measurement, in a process group of its own that is ended with it. Standard library only.

Started as `-m benchmarks.process MODULE.FUNCTION SPEC RESULT` this module is that process: it calls FUNCTION(SPEC) of
benchmarks.MODULE and writes what that returns to the file RESULT, both as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# glibc by itself keeps freed tensors of up to 32 MB, in pieces that grow with the number of rows: memory nobody uses
# would be counted.
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

Record = dict[str, Any]
Point = tuple[str, Callable[[list[Record]], Record]]  # what is said of it, and what measures it


def measure(
    name: str,
    spec: dict[str, Any],
    *,
    threads: int,
    timeout_s: float,
    environment: dict[str, str] | None = None,
    python: str = sys.executable,
) -> Any:
    """What the function benchmarks.NAME, as memory.measure_here, makes of `spec` in a process of its own, of the
    interpreter `python`, from any working directory. Errors as run_script()."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = ["env", f"PYTHONPATH={path}", python, "-m", "benchmarks.process", name]
    return run_script(command, spec, threads=threads, timeout_s=timeout_s, environment=environment or {})


def run_script(
    command: list[str], spec: dict[str, Any], *, threads: int, timeout_s: float, environment: dict[str, str]
) -> Any:
    """What `command SPEC RESULT` writes to the file RESULT, both JSON.

    RuntimeError, with its last words, when it fails or takes longer than `timeout_s` seconds.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result, log = Path(scratch) / "result.json", Path(scratch) / "log"
        counts = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, json.dumps(spec), str(result)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | counts | environment,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"took longer than timeout_s={timeout_s:g}; last words: {_last_line(log)}") from None
            finally:
                _end_group(process)
        if status != 0 or not result.exists():
            raise RuntimeError(f"ended with status {status}: {_last_line(log)}")
        return json.loads(result.read_text())


def measure_points(points: Iterable[Point], *, as_json: bool) -> tuple[list[Record], bool]:
    """The records of all points, each measured given those before it, and whether one failed: one that cannot run here,
    for want of memory perhaps, must not hide the others."""
    found: list[Record] = []
    failed = False
    for said, point in points:
        print(f"{said} ...", file=sys.stderr, flush=True)
        try:
            found.append(point(found))
        except RuntimeError as error:
            print(f"{said} failed: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        if as_json:
            print(json.dumps(found[-1]), flush=True)
    return found, failed


def terminate_group(process: subprocess.Popen, *, wait_s: float = 10.0) -> None:
    """End a process and its group, with time to end the measurement under way, which has a session of its own."""
    until = time.monotonic() + wait_s
    with contextlib.suppress(ProcessLookupError):  # all of the group has ended
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < until:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    _end_group(process)


def end_with_terminate() -> None:
    """Make SIGTERM end this process as Ctrl-C does, so that the measurement under way is ended too."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def _end_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of the group has ended
        os.killpg(process.pid, signal.SIGKILL)  # vLLM's workers outlive their parent
    process.wait()


if __name__ == "__main__":
    name, spec, result = sys.argv[1:]
    module, _, function = name.partition(".")
    found = getattr(importlib.import_module(f"benchmarks.{module}"), function)(json.loads(spec))
    Path(result).write_text(json.dumps(found))

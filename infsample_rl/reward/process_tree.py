"""The processes below this one: finding them, and ending them whatever they do against it. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

SWEEP_LIMIT_S = 10.0
_LINUX = sys.platform.startswith("linux")


def descendants(pid: int) -> list[int]:
    """Process ids of everything below `pid` (Linux). A chain of them may be longer than Python's stack is deep."""
    found, parents = dict[int, None](), [pid]
    while parents:
        children = _children(parents.pop())
        parents += [child for child in children if child not in found]
        found |= dict.fromkeys(children)
    return list(found)


def _children(pid: int) -> list[int]:
    try:
        tasks = [task.path for task in os.scandir(f"/proc/{pid}/task")]
        return [int(child) for task in tasks for child in Path(task, "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []  # it has ended


def end_orphans(child: int) -> None:
    """SIGKILL to what has become this process's child beside the one it forked, and to all below."""
    for orphan in _children(os.getpid()):
        for pid in [orphan, *descendants(orphan)] if orphan != child else []:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def end_everything(child: int) -> None:
    """SIGKILL to every process below this one until none is left; elsewhere than on Linux to the process group of
    `child`, the nearest there is."""
    deadline = time.monotonic() + SWEEP_LIMIT_S
    while time.monotonic() < deadline:
        for pid in descendants(os.getpid()) if _LINUX else [-child]:
            try:
                os.kill(pid, signal.SIGKILL)
                if _LINUX and os.getpgid(pid) != os.getpgrp():
                    os.killpg(os.getpgid(pid), signal.SIGKILL)  # all at once: what forks without end outruns one by one
            except (ProcessLookupError, PermissionError):
                pass
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return  # none is left
        time.sleep(0.002)

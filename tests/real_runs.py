"""What a run by the real command left, for the tests of tests/runs."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import NamedTuple

import psutil

from infsample_rl.commands.disturbance import Target, send
from infsample_rl.observe.phases import phase_of

Row = dict[str, float]


class Run(NamedTuple):
    """What a run left."""

    rows: list[Row]  # of metrics.jsonl
    log: str  # run.log
    folder: Path


def same_everywhere(row: Row) -> Row:
    """What no arrangement may change: samples, rewards and the update, but not how long environments took."""
    own = ("reward", "response", "learner", "environment", "step")
    return {name: value for name, value in row.items() if name.split("/")[0] in own and "waited" not in name}


def children(pid: int, name: str) -> list[int]:
    """Processes that a process has started, of those whose command begins so; none where one ends meanwhile."""
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children() if " ".join(child.cmdline()).startswith(name)]
    return []


def kill_a_decoding_worker(command: list[str], run: Path, *, child: str | None = None) -> None:
    """Start a run, kill its rollout worker while it decodes, or the child of it that is called so, and wait for the
    end."""
    target = Target(command, run)
    try:
        killed = False
        while target.driver.poll() is None and not killed:
            at_work = (pid for pid, roles in target.processes() if "rollout" in roles and phase_of(pid) == "decode")
            victims = at_work if child is None else (each for pid in at_work for each in children(pid, child))
            killed = any(send(pid, signal.SIGKILL) for pid in victims)
        assert killed and target.driver.wait(timeout=300) == 0
    finally:
        target.end()
    assert "started again" in (run / "run.log").read_text()

"""A run whose processes are killed, stopped and starved from outside: its target, and what hits it in which phase."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from infsample_rl.observe.phases import phase_of
from infsample_rl.observe.records import read_records

MARK = "INFSAMPLE_RL_CHAOS"  # in the environment of every process of a run
ROLES = {  # what a process does, by the class that Ray titles it with
    "RolloutCalls": ("rollout",),
    "RewardCalls": ("reward",),
    "ReferenceCalls": ("reference",),
    "ReferenceRankCalls": ("reference rank",),
    "LearnerCalls": ("learner",),
    "ColocatedCalls": ("rollout", "learner"),
}
ENVIRONMENTS = ("environment", "environments")  # by their names, as processes of a phase: a trajectory's, its maker
PHASES = [  # what a process can be hit in: (role, phase)
    *(("rollout", name) for name in ("decode", "prefill", "sync", "learn")),
    ("reward", "reward"),
    *((role, "reference") for role in ("reference", "reference rank")),
    *(("learner", name) for name in ("setup", "forward", "backward", "optimizer", "sync", "save")),
    *((name, name) for name in ENVIRONMENTS),
    *(("driver", name) for name in ("start", "sample", "update", "publish", "learn", "save", "evaluate")),
]
AT_ALL_TIMES = [("rollout", "decode"), ("learner", "backward"), ("driver", "sample")]


class Cell(NamedTuple):
    """What is done to a process of a role in a phase."""

    kind: str  # a key of KINDS
    role: str
    phase: str


KINDS = {  # what is done, and in which phases of which roles
    "kill": PHASES,
    "stop": PHASES,  # SIGSTOP, and SIGCONT some seconds later
    "kill two": AT_ALL_TIMES,  # it and another process at once
    "kill, kill": AT_ALL_TIMES,  # another while it is being replaced
    "kill the node": [("driver", "sample"), ("driver", "update")],  # its raylet; the run ends and is started again
    "tear": [("driver", "sample")],  # kill the driver, and cut a file of its newest checkpoint short
    "fill": [("learner", "save"), ("rollout", "decode")],  # for some seconds it cannot write to a file
}
CELLS = [Cell(kind, *at) for kind, places in KINDS.items() for at in places]
AIM_S = 40.0  # how long what has not been hit yet is waited for before all begins anew
QUIET_S = 2.0  # longest random pause before a hit
STOP_S = 15.0  # longest stop
FULL_S = 5.0
SECOND_S = 3.0  # longest time between a kill and the one during the replacement


@dataclass
class Hit:
    """A disturbance that took place."""

    cell: Cell
    step: int  # steps finished before it
    at: float  # time.monotonic()
    seconds: float | None = None  # until the next step was finished


class Target:
    """The disturbed run: its processes, found by a mark in their environment, and the driver, started again when it is
    dead."""

    def __init__(self, command: list[str], run_dir: Path) -> None:
        self._command, self.run_dir = command, run_dir
        self._mark = secrets.token_hex(8)
        self.starts = 0
        self.may_fail = False  # its raylet was killed: it ends by itself, with exit code 1
        self.start()

    def start(self) -> None:
        """Start the driver; it goes on from its last checkpoint."""
        self.starts += 1
        self.may_fail = False
        environment = {**os.environ, MARK: self._mark}
        with (self.run_dir.parent / f"start_{self.starts}.log").open("w") as self._log:
            self.driver = subprocess.Popen(
                self._command, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def runs(self) -> bool:
        """Whether the run has not ended; a driver that was killed is started again. RuntimeError if it failed by
        itself."""
        code = self.driver.poll()
        if code == -signal.SIGKILL or (code == 1 and self.may_fail):
            self.start()
        elif code not in (None, 0):
            raise RuntimeError(f"the disturbed run failed with exit code {code}: see {self._log.name}")
        return code != 0

    def processes(self) -> list[tuple[int, tuple[str, ...]]]:
        """(pid, roles) of every worker that lives, and of the driver while it does."""
        lives = self.driver.poll() is None  # else another process may have its id
        found: list[tuple[int, tuple[str, ...]]] = [(self.driver.pid, ("driver",))] if lives else []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            title = self._title(pid)
            if roles := next((roles for name, roles in ROLES.items() if f"ray::{name}" in title), ()):
                found.append((pid, roles))
            elif (name := phase_of(pid)) in ENVIRONMENTS and self._is_below(pid):
                found.append((pid, (name,)))
        return found

    def _is_below(self, pid: int) -> bool:
        """Whether it was started by a process of this run, whose mark it has not: isolated, it has few variables."""
        while pid > 1 and not self._title(pid):
            pid = parent_of(pid)
        return pid > 1

    def raylet(self) -> int | None:
        """The process that is the node to Ray."""
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return next((pid for pid in pids if self._title(pid).split("\0")[0].endswith("/raylet")), None)

    def _title(self, pid: int) -> str:
        """A process's command line, or "" if it is not of this run."""
        try:
            if self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            pass  # it has ended, or is another user's
        return ""

    def steps_done(self) -> int:
        """Steps in metrics.jsonl."""
        return max((record["step"] for record in read_records(self.run_dir / "metrics.jsonl")), default=0)

    def end(self) -> None:
        """Kill what is left of the run."""
        for pid, _ in self.processes():
            send(pid, signal.SIGKILL)


class Disturber:
    """Hits a run's processes, evenly over its steps, until there were enough."""

    def __init__(self, target: Target, *, steps: int, kills: int, seed: int) -> None:
        self.target, self.steps, self.kills = target, steps, kills
        self.dice, self.hits = random.Random(seed), list[Hit]()
        self._left = list(CELLS)  # not hit since all began anew
        self._later: list[tuple[float, int, signal.Signals]] = []  # (when, process, what it is sent)

    def run(self) -> list[Hit]:
        """Hit until there were enough, then let the run end. RuntimeError if it ends before, or fails."""
        while len(self.hits) < self.kills:
            self._wait(self.dice.uniform(0, QUIET_S))
            if not self.target.runs():
                raise RuntimeError("the disturbed run has ended before all kills: give more steps, or fewer kills")
            if self.target.steps_done() >= self._due() and (hit := self._hit()) is not None:
                self.hits.append(hit)
                print(f"{len(self.hits)}: {' '.join(hit.cell)}, step {hit.step + 1}", file=sys.stderr, flush=True)
        while self.target.runs() or self._later:
            self._wait(0.2)
        return self.hits

    def _due(self) -> int:
        """Steps to be finished before the next hit: the hits are spread over all steps."""
        return len(self.hits) * self.steps // self.kills

    def _wait(self, seconds: float) -> None:
        """Time passes: signals that are due are sent, and what steps took after hits is noted."""
        until = time.monotonic() + seconds
        while True:
            now, done = time.monotonic(), self.target.steps_done()
            for hit in self.hits:
                if hit.seconds is None and done > hit.step:
                    hit.seconds = now - hit.at
            for entry in [entry for entry in self._later if entry[0] <= now]:
                self._later.remove(entry)
                send(entry[1], entry[2])
            if now >= until:
                return
            time.sleep(min(0.05, until - now))

    def _hit(self) -> Hit | None:
        """Wait until some process is in a phase that has not been hit yet, or, when kills are late, in any, and hit
        it."""
        deadline, looked = time.monotonic() + AIM_S, 0.0
        processes: list[tuple[int, tuple[str, ...]]] = []
        cells, step = self._left, self.target.steps_done()
        while time.monotonic() < deadline:
            if time.monotonic() - looked > 0.2:
                if not self.target.runs():
                    return None
                self._wait(0)
                processes, looked, step = self.target.processes(), time.monotonic(), self.target.steps_done()
                self.dice.shuffle(processes)
                if step > self._due() + 1:
                    cells = CELLS
            for pid, roles in processes:
                phase = phase_of(pid)
                here = [cell for cell in cells if cell.role in roles and cell.phase == phase]
                if here and self._do(cell := self._rarest(here), pid, processes):
                    if cell in self._left:
                        self._left.remove(cell)
                    self._left = self._left or list(CELLS)
                    return Hit(cell, step, time.monotonic())
            time.sleep(0.0005)
        self._left = list(CELLS)  # what is left of them does not occur
        return None

    def _rarest(self, cells: list[Cell]) -> Cell:
        """One of those that were hit least: a phase that comes seldom is not spent on what has been hit in it."""
        hits = Counter(hit.cell for hit in self.hits)
        least = min(hits[cell] for cell in cells)
        return self.dice.choice([cell for cell in cells if hits[cell] == least])

    def _do(self, cell: Cell, pid: int, processes: list[tuple[int, tuple[str, ...]]]) -> bool:
        """Whether it could be done."""
        now = time.monotonic()
        if cell.kind == "stop":
            self._later.append((now + self.dice.uniform(1, STOP_S), pid, signal.SIGCONT))
            return send(pid, signal.SIGSTOP)
        if cell.kind == "kill the node":
            raylet = self.target.raylet()
            self.target.may_fail = raylet is not None and send(raylet, signal.SIGKILL)
            return self.target.may_fail
        if cell.kind == "fill":
            return self._fill(pid)
        if not send(pid, signal.SIGKILL):
            return False
        others = [other for other, roles in processes if other != pid and roles[0] not in ENVIRONMENTS]
        if cell.kind == "kill two" and others:
            send(self.dice.choice(others), signal.SIGKILL)
        elif cell.kind == "kill, kill" and others:
            when = now + self.dice.uniform(0.2, SECOND_S)
            self._later.append((when, self.dice.choice(others), signal.SIGKILL))
        elif cell.kind == "tear":
            self.target.driver.wait()
            tear(self.target.run_dir)
        return True

    def _fill(self, pid: int) -> bool:
        """Let a process write to no file for FULL_S."""
        try:
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        except (ProcessLookupError, PermissionError):
            return False
        self._wait(FULL_S)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        return True


def parent_of(pid: int) -> int:
    """0: it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def send(pid: int, number: signal.Signals) -> bool:
    """Whether the process was there to get the signal."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def tear(run_dir: Path) -> None:
    """Cut the largest file of the newest checkpoint to half, where there is an older one to go on from."""
    checkpoints = sorted((run_dir / "checkpoints").glob("step_*"))
    if len(checkpoints) > 1:
        files = [path for path in checkpoints[-1].rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)

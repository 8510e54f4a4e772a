"""Kill parts of a run at random, by SIGKILL from outside, and compare it with the same run undisturbed.

python -m infsample_rl.chaos steps=8 kills=10 seed=0 [SETTING=VALUE ...]

The run is the embedded default with short steps, run.deterministic=true and a reference worker; further settings are
those of infsample_rl.main. Every kill waits a random time, then hits a process in a phase drawn at random, all of them
before one comes again (rollout, reward and reference workers, learner ranks, the driver, which is then started again).
Where the run is further than the kills it hits at once, in whatever phase, so that all kills come before its end. Exit
1 if the runs differ in a weight, a reward or a sample, 2 for a bad argument.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from infsample_rl.config.command_line import option, parse_with_settings, print_table, run_command
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
PHASES = [  # what is aimed at: (role, phase)
    *(("rollout", name) for name in ("decode", "prefill", "sync")),
    ("reward", "reward"),
    ("reference", "reference"),
    *(("learner", name) for name in ("forward", "backward", "optimizer", "sync", "save")),
    *(("driver", name) for name in ("sample", "update", "publish", "save")),
]
AIM_S = 40.0  # how long a phase is waited for before another is drawn
QUIET_S = 6.0  # longest random pause before a kill
SETTINGS = """
    +experiment=kk_tiny run.deterministic=true run.eval_prompts=0 run.checkpoint_every=2 logging.wandb=disabled
    data.prompts_per_step=4 rollout.group_size=8 rollout.slots=4 rollout.max_new_tokens=48 rollout.micro_group_size=2
    objective.kl=k3 objective.kl_coef=0.01 learner.max_tokens_per_micro_batch=512
    cluster.max_restarts=1000 cluster.progress_timeout_s=120
""".split()


class Kill(NamedTuple):
    """One SIGKILL."""

    role: str
    phase: str
    step: int  # steps finished when it hit


@dataclass(kw_only=True)
class ChaosOptions:
    """What is no setting of a run."""

    steps: int = option(8, "steps of the run", low=1)
    kills: int = option(10, "processes killed", low=1)
    seed: int = option(0, "of what is killed when", low=0)


class Target:
    """The disturbed run: its processes, found by a mark in their environment, and the driver, started again when it is
    dead."""

    def __init__(self, command: list[str], run_dir: Path) -> None:
        self._command, self._run_dir = command, run_dir
        self._mark = secrets.token_hex(8)
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Start the driver; it goes on from its last checkpoint."""
        self.starts += 1
        self._log = (self._run_dir.parent / f"start_{self.starts}.log").open("w")
        environment = {**os.environ, MARK: self._mark}
        self.driver = subprocess.Popen(
            self._command, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def processes(self) -> list[tuple[int, tuple[str, ...]]]:
        """(pid, roles) of every worker that lives, and the driver."""
        found: list[tuple[int, tuple[str, ...]]] = [(self.driver.pid, ("driver",))]
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            if roles := self._roles_of(pid):
                found.append((pid, roles))
        return found

    def _roles_of(self, pid: int) -> tuple[str, ...]:
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if not title.startswith("ray::") or self._mark.encode() not in Path(f"/proc/{pid}/environ").read_bytes():
                return ()
        except OSError:
            return ()
        return next((roles for name, roles in ROLES.items() if name in title), ())

    def steps_done(self) -> int:
        """Steps in metrics.jsonl."""
        return max((record["step"] for record in read_records(self._run_dir / "metrics.jsonl")), default=0)

    def end(self) -> None:
        """Kill what is left of the run."""
        for pid, _ in self.processes():
            _kill(pid)
        self._log.close()


def disturb(target: Target, options: ChaosOptions) -> list[Kill]:
    """Kill until there were enough, then let the run end. RuntimeError if it ends before, or fails."""
    dice, kills, phases = random.Random(options.seed), list[Kill](), list[tuple[str, str]]()

    def is_late() -> bool:
        """Whether a larger share of the steps has passed than of the kills; all kills are due in the last step."""
        return len(kills) * (options.steps - 1) < options.kills * target.steps_done() or options.steps == 1

    while len(kills) < options.kills:
        pause = time.monotonic() + dice.uniform(0, QUIET_S)
        while time.monotonic() < pause and _runs(target) and not is_late():
            time.sleep(0.05)
        phases = phases or dice.sample(PHASES, len(PHASES))  # each is aimed at once before one comes again
        hit = _hit(target, phases.pop(), is_late, dice)
        if hit is None:
            continue
        kills.append(Kill(*hit, target.steps_done()))
        print(f"kill {len(kills)}: {hit[0]} in {hit[1]}, step {kills[-1].step + 1}", flush=True)
        if kills[-1].role == "driver":
            target.driver.wait()
            target.start()
    while _runs(target):
        time.sleep(0.2)
    return kills


def _runs(target: Target) -> bool:
    code = target.driver.poll()
    if code not in (None, 0, -signal.SIGKILL):
        raise RuntimeError(f"the disturbed run failed with exit code {code}: see {target._log.name}")
    return code is None


def _hit(
    target: Target, aim: tuple[str, str], is_late: Callable[[], bool], dice: random.Random
) -> tuple[str, str] | None:
    """Wait until some process is in the phase aimed at, or, when it is late, in any, and kill it: its role and phase;
    None if none came."""
    deadline, looked, aims = time.monotonic() + AIM_S, 0.0, [aim]
    processes: list[tuple[int, tuple[str, ...]]] = []
    while time.monotonic() < deadline:
        if not _runs(target):
            raise RuntimeError("the disturbed run has ended before all kills: give more steps")
        if time.monotonic() - looked > 0.2:
            processes, looked = target.processes(), time.monotonic()
            dice.shuffle(processes)
            aims = PHASES if is_late() else [aim]
        for pid, roles in processes:
            phase = phase_of(pid)
            for role in roles:
                if phase is not None and (role, phase) in aims:
                    return (role, phase) if _kill(pid) else None
        time.sleep(0.0005)
    return None


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def differences(undisturbed: Path, disturbed: Path) -> list[str]:
    """What differs between two runs, in words: weights of the last checkpoint, and metrics that are not times or counts
    of restarts."""
    found, runs = [], (undisturbed, disturbed)
    checkpoints = [sorted((run / "checkpoints").glob("step_*"))[-1] for run in runs]
    if checkpoints[0].name != checkpoints[1].name:
        found.append(f"the last checkpoints are {checkpoints[0].name} and {checkpoints[1].name}")
    for path in sorted(checkpoints[0].rglob("*.safetensors")):
        name = path.relative_to(checkpoints[0])
        if path.read_bytes() != (checkpoints[1] / name).read_bytes():
            found.append(f"{name} differs")
    rows = [{record["step"]: record for record in read_records(run / "metrics.jsonl")} for run in runs]
    if list(rows[0]) != list(rows[1]):
        found.append(f"metrics.jsonl has steps {list(rows[0])} and {list(rows[1])}")
    for step in rows[0].keys() & rows[1].keys():
        names = [name for name in rows[0][step] if name.split("/")[0] in ("reward", "response", "learner")]
        found += [f"step {step}: {name} differs" for name in names if rows[0][step][name] != rows[1][step].get(name)]
    return found


def _run(arguments: list[str]) -> int:
    options, settings = parse_with_settings(arguments, ChaosOptions)
    folder = Path(tempfile.mkdtemp(prefix="chaos_"))
    runs = [folder / name / "run" for name in ("undisturbed", "disturbed")]
    for run in runs:
        run.parent.mkdir()
    train = [sys.executable, "-m", "infsample_rl.main", *SETTINGS, f"run.steps={options.steps}", *settings]
    commands = [[*train, f"run.dir={run}"] for run in runs]
    started = time.monotonic()
    plain = subprocess.run(commands[0], capture_output=True, text=True)
    if plain.returncode != 0:
        print(f"chaos: the undisturbed run failed: {plain.stderr.strip() or plain.stdout[-2000:]}", file=sys.stderr)
        return plain.returncode
    seconds = [time.monotonic() - started]
    target = Target(commands[1], runs[1])
    try:
        kills = disturb(target, options)
    finally:
        target.end()
    seconds.append(time.monotonic() - started - seconds[0])
    found = differences(*runs)
    hits = Counter(f"{kill.role}/{kill.phase}" for kill in kills)
    print_table(
        [{"name": name, "kills": count} for name, count in sorted(hits.items())], {"name": "", "kills": "kills"}
    )
    print(
        f"{len(kills)} kills, {target.starts} starts of the driver; {seconds[0]:.0f} s undisturbed, "
        f"{seconds[1]:.0f} s with kills"
    )
    print(*(found or ["the same weights, rewards and samples, bit for bit"]), f"in {folder}", sep="\n")
    return 1 if found else 0


def main(arguments: list[str] | None = None) -> int:
    """Run both, compare, report; returns the exit code."""
    return run_command(_run, arguments, usage=__doc__)


if __name__ == "__main__":
    sys.exit(main())

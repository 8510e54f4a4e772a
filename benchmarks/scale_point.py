"""One point of the scale benchmark: python -m benchmarks.scale_point SPEC RESULT, both JSON.

The real driver and the real Cluster train for some steps with fake workers; what each step cost this process is taken
at its begin.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from benchmarks.fake_actors import fake_actors
from benchmarks.fake_workers import Pace
from infsample_rl.cluster.cluster import Cluster
from infsample_rl.config import Config
from infsample_rl.config.loading import load_config
from infsample_rl.controller.driver import Completions, Driver
from infsample_rl.controller.startup import Start, prepare
from infsample_rl.controller.step_metrics import Metrics

GROUP_SIZE, NEW_TOKENS = 32, 1024
HOST = "Host"  # as Ray titles the processes of fake_actors.py
WARM_UP_STEPS = 1


@dataclasses.dataclass(frozen=True)
class Moment:
    """What this process has used up to a moment. Seconds and counts since its start."""

    wall_s: float
    waited_s: float  # in ray.wait, the time Ray itself works there included
    thread_s: float  # CPU of the thread that drives
    process_s: float  # CPU of all threads of this process, Ray's included
    stolen_s: float  # of all cores, that other guests of the machine had instead: it counts as CPU of whoever ran
    micro_groups: int


class MeasuredDriver(Driver):
    """Notes what was used when a step begins, so that a step's share has everything in it: metrics, logs, timeline."""

    def __init__(self, config: Config, start: Start):
        super().__init__(config, start)
        self.moments: list[Moment] = []
        self.memory: dict[str, int] = {}

    def train_step(self) -> tuple[Metrics, Completions]:
        """As Driver.train_step."""
        self.moments.append(self._moment())
        return super().train_step()

    def _moment(self) -> Moment:
        counts = self.cluster.monitor.counts()
        return Moment(
            time.monotonic(),
            counts.waited_s,
            time.thread_time(),
            time.process_time(),
            stolen_seconds(),
            counts.micro_groups,
        )

    def save(self) -> None:
        """The run's last act: it counts to no step."""
        self.moments.append(self._moment())
        pids = worker_pids()
        self.memory = {
            "driver_bytes": rss_bytes(os.getpid()),
            "worker_bytes": sum(map(private_bytes, pids)),
            "worker_processes": len(pids),
        }
        super().save()


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds, micro-groups and bytes of a step with spec["workers"] rollout workers."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a cluster of this process alone
    with tempfile.TemporaryDirectory() as scratch:
        config = make_config(spec, Path(scratch))
        driver = MeasuredDriver(config, prepare(config))
        per_process = -(-spec["workers"] // spec["processes"])
        actors = fake_actors(Pace(spec["step_seconds"], 0.0), workers_per_process=per_process)
        driver.cluster = Cluster(config, total_steps=driver.total_steps, note=driver.log.note, actors=actors)
        started = time.monotonic()
        driver.run()
        metrics = [json.loads(line) for line in (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()]
        trace_bytes = (Path(scratch) / "run" / "trace.json").stat().st_size
    moments = driver.moments[WARM_UP_STEPS:]
    steps = [
        {name: after - before for name, before, after in _changes(*pair)}
        for pair in zip(moments, moments[1:], strict=False)
    ]
    median = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    last = metrics[-1]
    return {
        "workers": spec["workers"],
        "learner_ranks": config.cluster.learner_ranks,
        "start_s": moments[0].wall_s - started,
        "step_s": median["wall_s"],
        "driver_busy_s": median["wall_s"] - median["waited_s"],
        "driver_thread_cpu_s": median["thread_s"],
        "driver_process_cpu_s": median["process_s"],
        "micro_groups": median["micro_groups"],
        "micro_groups_per_driver_s": median["micro_groups"] / median["thread_s"],
        "driver_share": median["thread_s"] / median["wall_s"],
        "stolen_share": median["stolen_s"] / (median["wall_s"] * (os.cpu_count() or 1)),
        "beyond_decoding_s": median["wall_s"] - spec["step_seconds"],
        "object_store_bytes": last["response/tokens"] * 8 + last["weight_sync/bytes"],
        "trace_bytes": trace_bytes,
        **driver.memory,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "ray": ray.__version__,
    }


def _changes(before: Moment, after: Moment) -> list[tuple[str, float, float]]:
    pair = dataclasses.asdict(before), dataclasses.asdict(after)
    return [(name, pair[0][name], pair[1][name]) for name in pair[0]]


def make_config(spec: dict[str, Any], scratch: Path) -> Config:
    """A prompt of G = 32 samples of 1,024 tokens for every rollout worker; a learner rank for every eight."""
    prompts = scratch / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"question": f"{number} + 1 = ?", "answer": "0"}) + "\n" for number in range(64))
    )
    model = scratch / "model"
    _copy_with_longer_context(Path(load_config([]).model.path), model)
    settings = {
        "model.path": model,
        "data.source": prompts,
        "data.eval_source": "null",
        "data.prompts_per_step": spec["workers"],
        "data.max_prompt_tokens": 64,
        "rollout.group_size": GROUP_SIZE,
        "rollout.max_new_tokens": NEW_TOKENS,
        "rollout.slots": spec["micro_group_size"],
        "rollout.predictor": "none",
        "learner.max_tokens_per_micro_batch": 16 * 1024,
        "learner.grad_sync": "last_row",
        "cluster.rollout_workers": spec["workers"],
        "cluster.learner_ranks": max(1, spec["workers"] // 8),
        "cluster.reward_workers": max(1, spec["workers"] // 32),
        "cluster.cpus_per_worker": 0,
        "run.dir": scratch / "run",
        "run.steps": WARM_UP_STEPS + spec["steps"],
        "run.checkpoint_every": 0,
        "run.eval_prompts": 0,
        "logging.wandb": "disabled",
        "logging.completions_per_step": 0,
    }
    return load_config([f"{name}={value}" for name, value in settings.items()])


def _copy_with_longer_context(policy: Path, folder: Path) -> None:
    """The policy that comes with the package ends at 1,024 tokens; nothing here ever runs it."""
    folder.mkdir()
    for path in policy.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))


def stolen_seconds() -> float:
    """Seconds of all cores since the machine started that its hypervisor gave to others; 0 where that is not told."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return _kilobytes(Path(f"/proc/{pid}/status"), "VmRSS")


def private_bytes(pid: int) -> int:
    """A process's memory with its share of what it shares."""
    return _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss")


def worker_pids() -> list[int]:
    """Processes below this one that fake workers are in."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it has ended
    return [
        pid for pid in parents if os.getpid() in _ancestors(pid, parents) and _title(pid).startswith(f"ray::{HOST}")
    ]


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    found: set[int] = set()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return found


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]
    except OSError:
        return ""


def _kilobytes(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(sys.argv[1]))))

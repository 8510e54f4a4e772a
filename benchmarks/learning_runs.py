"""Training runs of several sides, each at the learning rate that it ends highest with (of equal ones at that which is
higher over all evaluations), and what they learn by when.

Every side tries the same learning rates, once each, on held-out problems of their own; then every seed trains with the
best. A run that has ended is kept in a file: what was cut off, or is asked for more seeds, goes on from there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.figures import new_figure, save
from infsample_rl.observe.records import read_records
from infsample_rl.observe.versions import versions

SEARCH_SEED = 100  # of the runs that try a learning rate
COLUMNS = {"side": "side", "lr": "lr", "seed": "seed", "first": "held out, first", "last": "last", "seconds": "s"}
Record = dict[str, Any]  # a Run's fields; rewards and seconds of every step; held_out: [step, accuracy] pairs


@dataclass(frozen=True)
class Run:
    """One training run of one side."""

    side: str
    lr: float
    seed: int
    part: str  # of the problems that is evaluated: tuning, where a learning rate is searched, or held_out

    @property
    def name(self) -> str:
        """That of its file and of its folder."""
        return f"{self.side.replace('=', '')}_lr{self.lr:g}_seed{self.seed}_{self.part}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is trained, and where it is kept."""

    folder: Path
    settings: dict[str, Any]  # what all runs that are compared have in common
    train: Callable[[Run], Record]  # rewards, seconds and held_out; RuntimeError with its last words when it fails

    def run(self, sides: Sequence[str], lrs: Sequence[float], seeds: Sequence[int]) -> tuple[list[Record], bool]:
        """Every run that ended, and whether all did. ValueError for a folder with runs of other settings or
        code."""
        found, asked = list[Record](), 0
        for side in sides:
            tried = list(filter(None, (self._outcome(Run(side, lr, SEARCH_SEED, "tuning")) for lr in lrs)))
            asked += len(lrs) + len(seeds)
            found += tried
            if tried:
                best = max(tried, key=ends_and_mean)["lr"]
                found += filter(None, (self._outcome(Run(side, best, seed, "held_out")) for seed in seeds))
        return found, len(found) == asked

    def _outcome(self, run: Run) -> Record | None:
        """What a run gave, from its file where it has ended before; None when it failed."""
        path = self.folder / f"{run.name}.json"
        if path.exists():
            record = json.loads(path.read_text())
            if record["settings"] != self._common:
                raise ValueError(f"out={self.folder}: {path.name} is of other settings or code; give another folder")
            return record
        print(f"{run.name} ...", file=sys.stderr, flush=True)
        try:
            record = asdict(run) | self.train(run)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{run.name} failed: {error}", file=sys.stderr, flush=True)
            return None
        path.write_text(json.dumps(record | {"settings": self._common}) + "\n")
        return record

    @cached_property
    def _common(self) -> dict[str, Any]:
        return self.settings | {"commit": versions()["commit"]}


def ends_and_mean(record: Record) -> tuple[float, float]:
    """A run's last accuracy, and its mean over all evaluations."""
    accuracies = [accuracy for _, accuracy in record["held_out"]]
    return accuracies[-1], mean(accuracies)


def measured(records: Iterable[Record]) -> list[Record]:
    """Those that were not to find a learning rate."""
    return [record for record in records if record["part"] != "tuning"]


def train_by_command(arguments: Sequence[str], run_dir: Path, timeout_s: float) -> Record:
    """A run by the real command; it goes on where it was cut. RuntimeError with its last words when it fails."""
    command = [sys.executable, "-m", "infsample_rl.main", *arguments, f"run.dir={run_dir}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
    rows = list(read_records(run_dir / "metrics.jsonl"))
    steps = [row for row in rows if row["step"] > 0]
    return {
        "rewards": [row["reward/mean"] for row in steps],
        "seconds": [row["timing/step"] for row in steps],
        "held_out": [[row["step"], row["eval/accuracy"]] for row in rows if row.get("eval/accuracy") is not None],
    }


def row_of(record: Record) -> Record:
    """A run in the table."""
    accuracies = [accuracy for _, accuracy in record["held_out"]]
    shown = {
        "first": f"{accuracies[0]:.3f}",
        "last": f"{accuracies[-1]:.3f}",
        "seconds": f"{sum(record['seconds']):.0f}",
    }
    seed = "search" if record["part"] == "tuning" else record["seed"]
    return {"side": record["side"], "lr": f"{record['lr']:g}", "seed": seed} | shown


def last_accuracy(records: Sequence[Record], side: str) -> str:
    """The side's last accuracy: its mean and its range over the seeds."""
    last = [record["held_out"][-1][1] for record in records if record["side"] == side]
    return f"{side}: last {mean(last):.3f} [{min(last):.3f}, {max(last):.3f}] over {len(last)} seeds"


def over_seconds(record: Record) -> list[tuple[float, float]]:
    """(seconds of the steps so far, accuracy) of every evaluation."""
    passed = [0.0, *accumulate(record["seconds"])]
    return [(passed[step], accuracy) for step, accuracy in record["held_out"]]


def draw(records: Sequence[Record], colours: dict[str, str], path: Path) -> Path:
    """Reward over steps, held-out accuracy over steps and over seconds, of every side that has a colour; the mean over
    seeds, and their range."""
    figure, ((rewards, steps, seconds),) = new_figure(12, 3.6, columns=3)
    for side, colour in colours.items():
        own = [record for record in records if record["side"] == side]
        if not own:
            continue
        label = f"{side}, {len(own)} seeds"
        paint(rewards, range(1, len(own[0]["rewards"]) + 1), [record["rewards"] for record in own], colour, label)
        values = [[accuracy for _, accuracy in record["held_out"]] for record in own]
        paint(steps, [step for step, _ in own[0]["held_out"]], values, colour, label)
        times = zip(*[[after for after, _ in over_seconds(record)] for record in own], strict=True)
        paint(seconds, [mean(each) for each in times], values, colour, label)
    for axes, across, up in (
        (rewards, "step", "reward"),
        (steps, "step", "held out"),
        (seconds, "seconds", "held out"),
    ):
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.25)
    if records:
        rewards.legend(fontsize=8)
    return save(figure, path)


def paint(axes: Any, across: Iterable[float], runs: list[list[float]], colour: str, label: str) -> None:
    """The mean of a side's runs, and the range of all."""
    columns, across = list(zip(*runs, strict=True)), list(across)
    axes.plot(across, [mean(column) for column in columns], color=colour, label=label)
    axes.fill_between(across, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.2)

"""Disturb a run from outside, and compare it with the same run undisturbed.

python -m infsample_rl.chaos [+experiment=NAME] [SETTING=VALUE ...] steps=12 kills=10 seed=0

The run is that of infsample_rl.main with the same settings, the default experiment without any; W&B is off. Processes
of every kind are killed, stopped for seconds, kept from writing, killed two at once or one after another, in phases
drawn at random, each before one comes again, evenly over all steps. A driver that is dead is started again.

  json=true   one JSON object on stdout instead of the table

Exit 1 if the runs differ in a weight, a reward, a length, a loss or a kept completion, bit for bit or, where the run
is not deterministic (run.deterministic), as with rollout.engine=vllm, by more than rounding; 2 for a bad argument. What
is killed when depends on the machine too: `seed` alone does not repeat it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from infsample_rl.commands.disturbance import CELLS, Disturber, Hit, Target
from infsample_rl.config.command_line import option, parse_with_settings, print_table, run_command
from infsample_rl.config.loading import load_config
from infsample_rl.observe.records import read_records

PLACE = ("step", "prompt_index", "sample_index")  # of a kept completion
COMPARED = ("reward", "response", "learner")  # metrics that neither time nor restarts may change
ROUNDING = 1e-3  # of a figure, and a tenth of it absolutely, in a run that is not deterministic


@dataclass(kw_only=True)
class ChaosOptions:
    """What is no setting of a run."""

    steps: int = option(12, "steps of the run", low=1)
    kills: int = option(10, "disturbances", low=1)
    seed: int = option(0, "of what is hit when", low=0)
    json: bool = option(False, "print one JSON object")


def differences(undisturbed: Path, disturbed: Path, *, exact: bool = True) -> list[str]:
    """What differs between two runs, in words: weights of the last checkpoint, metrics that are not times or counts of
    restarts, kept completions. Unless `exact`, what rounding may do is no difference, nor is the completions' order."""
    found, runs = [], (undisturbed, disturbed)
    checkpoints = [sorted((run / "checkpoints").glob("step_*"))[-1] for run in runs]
    if checkpoints[0].name != checkpoints[1].name:
        found.append(f"the last checkpoints are {checkpoints[0].name} and {checkpoints[1].name}")
    for path in sorted(checkpoints[0].rglob("*.safetensors")):
        name = path.relative_to(checkpoints[0])
        if not _same_tensors(path, checkpoints[1] / name, exact):
            found.append(f"{name} differs")
    rows = [{record["step"]: record for record in read_records(run / "metrics.jsonl")} for run in runs]
    if list(rows[0]) != list(rows[1]):
        found.append(f"metrics.jsonl has steps {list(rows[0])} and {list(rows[1])}")
    for step in rows[0].keys() & rows[1].keys():
        names = [name for name in rows[0][step] if name.split("/")[0] in COMPARED]
        found += [
            f"step {step}: {name} differs"
            for name in names
            if not _same(rows[0][step][name], rows[1][step].get(name), exact)
        ]
    kept = [list(read_records(run / "completions.jsonl")) for run in runs]
    if not exact:
        kept = [sorted(own, key=lambda record: [record[name] for name in PLACE]) for own in kept]
    if not _same(kept[0], kept[1], exact):
        steps = sorted(
            {
                record["step"]
                for own, other in (kept, kept[::-1])
                for record in own
                if not any(_same(record, another, exact) for another in other)
            }
        )
        found.append(f"completions.jsonl differs in steps {steps}" if steps else "completions.jsonl has another order")
    return found


def _same(value: Any, other: Any, exact: bool) -> bool:
    """Whether two values of JSON are equal or, unless `exact`, differ in their floats by rounding alone."""
    if exact or type(value) is not type(other):
        return bool(value == other)
    if isinstance(value, float):
        return math.isclose(value, other, rel_tol=ROUNDING, abs_tol=ROUNDING / 10)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_same(value[name], other[name], exact) for name in value)
    if isinstance(value, list):
        return len(value) == len(other) and all(_same(*pair, exact) for pair in zip(value, other, strict=True))
    return bool(value == other)


def _same_tensors(path: Path, other: Path, exact: bool) -> bool:
    """Whether two safetensors files are the same or, unless `exact`, hold tensors that differ by rounding alone."""
    if exact or path.read_bytes() == other.read_bytes():
        return path.read_bytes() == other.read_bytes()
    from safetensors.torch import load_file

    own, others = load_file(path), load_file(other)
    return own.keys() == others.keys() and all(
        tensor.allclose(others[name], rtol=0, atol=ROUNDING / 10) for name, tensor in own.items()
    )


def table_of(hits: list[Hit], step_s: float) -> list[dict[str, Any]]:
    """A row of every kind, role and phase that was hit: how often, and the seconds that a hit cost: those until the
    next step was finished, less those of a step of the undisturbed run."""
    rows = []
    for cell in CELLS:
        seconds = [hit.seconds for hit in hits if hit.cell == cell]
        known = [max(0.0, each - step_s) for each in seconds if each is not None]
        if seconds:
            lost = round(fmean(known), 1) if known else None
            rows.append({**cell._asdict(), "hits": len(seconds), "seconds_lost": lost})
    return rows


def _run(arguments: list[str]) -> int:
    options, settings = parse_with_settings(arguments, ChaosOptions)
    if fixed := [each for each in settings if each.lstrip("+").partition("=")[0] in ("run.dir", "run.steps")]:
        raise ValueError(f"{fixed[0]} has no part here: give steps=N; each of both runs has a folder of its own")
    exact = load_config(settings).is_deterministic
    folder = Path(tempfile.mkdtemp(prefix="chaos_"))
    runs = [folder / name / "run" for name in ("undisturbed", "disturbed")]
    for run in runs:
        run.parent.mkdir()
    own = [*settings, "logging.wandb=disabled", f"run.steps={options.steps}"]
    commands = [[sys.executable, "-m", "infsample_rl.main", *own, f"run.dir={run}"] for run in runs]
    started = time.monotonic()
    plain = subprocess.run(commands[0], capture_output=True, text=True)
    if plain.returncode != 0:
        print(f"chaos: the undisturbed run failed: {plain.stderr.strip() or plain.stdout[-2000:]}", file=sys.stderr)
        return plain.returncode
    seconds = [time.monotonic() - started]
    steps = [record.get("timing/step") for record in read_records(runs[0] / "metrics.jsonl")]  # none of an evaluation
    step_s = fmean(seconds for seconds in steps if seconds is not None)
    target = Target(commands[1], runs[1])
    try:
        hits = Disturber(target, steps=options.steps, kills=options.kills, seed=options.seed).run()
    finally:
        target.end()
    seconds.append(time.monotonic() - started - seconds[0])
    found, table = differences(*runs, exact=exact), table_of(hits, step_s)
    missed = [" ".join(cell) for cell in CELLS if all(hit.cell != cell for hit in hits)]
    if options.json:
        times = dict(zip(("undisturbed_s", "disturbed_s"), seconds, strict=True))
        record = {"kills": len(hits), "starts": target.starts, "seed": options.seed, "step_s": step_s, **times}
        print(json.dumps(record | {"table": table, "missed": missed, "differences": found, "folder": str(folder)}))
    else:
        columns = {"kind": "", "role": "process", "phase": "phase", "hits": "hits", "seconds_lost": "s lost each"}
        print_table(table, columns)
        print("not hit: " + (", ".join(missed) or "none"))
        print(
            f"{len(hits)} kills, {target.starts} starts of the driver; {seconds[0]:.0f} s undisturbed, "
            f"{seconds[1]:.0f} s with kills"
        )
        how = "bit for bit" if exact else "up to rounding"
        print(*(found or [f"the same weights, rewards and samples, {how}"]), f"in {folder}", sep="\n")
    return 1 if found else 0


def main(arguments: list[str] | None = None) -> int:
    """Run both, compare, report; returns the exit code."""
    return run_command(_run, arguments, usage=__doc__)

"""The end of a run: a short summary from metrics.jsonl."""

from __future__ import annotations

import shlex
from pathlib import Path
from statistics import fmean
from typing import Any

from infsample_rl.config import Config
from infsample_rl.observe.records import read_records
from infsample_rl.observe.screen import duration

FILES = {  # what a run folder may hold, in the order it is listed
    "report.html": "all of it on one page, for a browser: open it first",
    "config.yaml": "every setting of this run",
    "metrics.jsonl": "one JSON object a step",
    "warnings.jsonl": "what was noticed, with the step",
    "completions.jsonl": "samples with their rewards",
    "samples.jsonl": "who decoded when, of a few prompts a step",
    "lengths.jsonl": "lengths of all samples, as simulate takes them",
    "trace.json": "who did what when, for ui.perfetto.dev",
    "plan.json": "memory that was planned",
    "versions.json": "of Python, packages and machine",
    "run.log": "what was printed, with times",
    "checkpoints": "to resume from, and to load with transformers",
    "wandb": "W&B files; to upload those of offline runs: wandb sync DIR/offline-run-*",
    "tensorboard": "TensorBoard files; to see them: tensorboard --logdir DIR",
}


def summary(config: Config, run_dir: Path, *, checkpoint: Path | None, seconds: float) -> str:
    """The summary as text. `seconds` is the time of this start of the run; tokens and tokens/s are over all steps in
    metrics.jsonl, earlier starts included."""
    records = list(read_records(run_dir / "metrics.jsonl"))
    steps = [record for record in records if record["step"] > 0]
    rows = {
        "held-out accuracy": accuracy_text(records),
        "reward": before_after(steps, "reward/mean", "{:.3f}"),
        "response length": before_after(steps, "response/length_mean", "{:.1f}", " tokens"),
        "sampled": sampled_text(steps),
        "time": duration(seconds),
        "checkpoint": str(checkpoint.resolve()) if checkpoint else "none",
    }
    if checkpoint is not None:
        rows["try it"] = f"python -m infsample_rl chat {shlex.quote(str(checkpoint.resolve()))}"
    lines = [f"{config.run.name}: {len(steps)} steps", *(f"  {name:<17}  {text}" for name, text in rows.items())]
    lines.append(f"  files in {run_dir.resolve()}:")
    for name, text in FILES.items():
        path = run_dir / name
        if path.exists():
            shown = name + "/" if path.is_dir() else name
            lines.append(f"    {shown:<17}  {text.replace('DIR', shlex.quote(str(path.resolve())))}")
    return "\n".join(lines)


def series(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric where it has a value."""
    found = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def before_after(steps: list[dict[str, Any]], name: str, form: str, unit: str = "") -> str:
    """ "0.310 -> 0.520 (mean of the first and of the last 5 steps)"; of fewer than ten steps half of them."""
    _, values = series(steps, name)
    if len(values) < 2:
        return f"{form.format(values[0])}{unit} (one step)" if values else "none measured"
    n = min(5, len(values) // 2)
    over = f"mean of the first and of the last {n} steps" if n > 1 else "first and last step"
    return f"{form.format(fmean(values[:n]))} -> {form.format(fmean(values[-n:]))}{unit} ({over})"


def accuracy_text(records: list[dict[str, Any]]) -> str:
    """Accuracy at the first and the last evaluated step."""
    at, values = series(records, "eval/accuracy")
    if not values:
        return "not evaluated"
    if len(values) == 1:
        return f"{values[0]:.3f} (step {at[0]} only)"
    return f"{values[0]:.3f} -> {values[-1]:.3f} (before and after: step {at[0]} and step {at[-1]})"


def sampled_text(steps: list[dict[str, Any]]) -> str:
    """Tokens sampled in the steps (evaluations and observations apart) and tokens a second of step time."""
    names = ("response/tokens", "environment/observed_tokens", "timing/step")
    responses, observed, seconds = (sum(series(steps, name)[1]) for name in names)
    tokens = responses - observed
    speed = f", {tokens / seconds:,.0f} tokens/s over {duration(seconds)} of steps" if seconds > 0 else ""
    return f"{tokens:,.0f} tokens{speed}"

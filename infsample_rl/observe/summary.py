"""The end of a run: a short summary from metrics.jsonl and a picture of the reward curve."""

from __future__ import annotations

import json
import shlex
import sys
import warnings
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
    "reward_curve.png": "reward, held-out accuracy and response length over the steps",
    "run.log": "what was printed, with times",
    "checkpoints": "to resume from, and to load with transformers",
    "wandb": "W&B files; to upload those of offline runs: wandb sync DIR/offline-run-*",
    "tensorboard": "TensorBoard files; to see them: tensorboard --logdir DIR",
}
CURVES = {
    "reward/mean": ("reward", "#1f5fa8"),
    "eval/accuracy": ("held-out accuracy", "#d1620a"),
    "response/length_mean": ("response length (tokens)", "#2a7f4f"),
}


def write_summary(config: Config, run_dir: Path, *, checkpoint: Path | None, seconds: float) -> str:
    """Draw run_dir/reward_curve.png and return the summary as text.

    `seconds` is the time of this start of the run; tokens and tokens/s are over all steps in metrics.jsonl, earlier
    starts included.
    """
    records = list(read_records(run_dir / "metrics.jsonl"))
    steps = [record for record in records if record["step"] > 0]
    title = f"{config.run.name}: {len(steps)} steps"
    if steps:
        draw_curves(
            records, run_dir / "reward_curve.png", title=f"{title}, {config.rollout.group_size} samples a prompt"
        )
    rows = [
        ("held-out accuracy", accuracy_text(records)),
        ("reward", before_after(steps, "reward/mean", "{:.3f}")),
        ("response length", before_after(steps, "response/length_mean", "{:.1f}", " tokens")),
        ("sampled", sampled_text(steps)),
        ("time", duration(seconds)),
        ("checkpoint", str(checkpoint.resolve()) if checkpoint else "none"),
    ]
    if checkpoint is not None:
        rows.append(("try it", try_command(config, checkpoint.resolve(), run_dir.resolve())))
    lines = [title, *(f"  {name:<17}  {text}" for name, text in rows), f"  files in {run_dir.resolve()}:"]
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


def ends(values: list[float]) -> tuple[float, float, int]:
    """Mean of the first and the last n values and n: five, or half of them when there are fewer than ten."""
    n = max(1, min(5, len(values) // 2))
    return fmean(values[:n]), fmean(values[-n:]), n


def before_after(steps: list[dict[str, Any]], name: str, form: str, unit: str = "") -> str:
    """ "0.310 -> 0.520 (mean of the first and of the last 5 steps)"."""
    _, values = series(steps, name)
    if not values:
        return "none measured"
    first, last, n = ends(values)
    if len(values) == 1:
        return f"{form.format(first)}{unit} (one step)"
    over = f"mean of the first and of the last {n} steps" if n > 1 else "first and last step"
    return f"{form.format(first)} -> {form.format(last)}{unit} ({over})"


def accuracy_text(records: list[dict[str, Any]]) -> str:
    """Accuracy at the first and the last evaluated step."""
    at, values = series(records, "eval/accuracy")
    if not values:
        return "not evaluated"
    if len(values) == 1:
        return f"{values[0]:.3f} (step {at[0]} only)"
    return f"{values[0]:.3f} -> {values[-1]:.3f} (before and after: step {at[0]} and step {at[-1]})"


def sampled_text(steps: list[dict[str, Any]]) -> str:
    """Tokens sampled in the steps (evaluations apart) and tokens a second of step time."""
    tokens, seconds = (sum(series(steps, name)[1]) for name in ("response/tokens", "timing/step"))
    speed = f", {tokens / seconds:,.0f} tokens/s over {duration(seconds)} of steps" if seconds > 0 else ""
    return f"{tokens:,.0f} tokens{speed}"


def try_command(config: Config, checkpoint: Path, run_dir: Path) -> str:
    """A shell line that samples from the checkpoint with plain transformers, on the last prompt of
    completions.jsonl."""
    samples = run_dir / "completions.jsonl"
    if samples.exists() and samples.stat().st_size > 0:
        prompt = f'json.loads(open({str(samples)!r}).readlines()[-1])["prompt"]'
    else:
        prompt = json.dumps("Question: what is 7 + 5?\nAnswer:")
    model = repr(str(checkpoint))
    sample = f"max_new_tokens={config.rollout.max_new_tokens}, do_sample=True, temperature={config.rollout.temperature}"
    generate = f'pipeline("text-generation", {model})({prompt}, {sample})[0]["generated_text"]'
    code = f"import json; from transformers import pipeline; print({generate})"
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"


def smooth(values: list[float]) -> list[float]:
    """Centred mean over about a tenth of the values, 5 to 21, and over fewer at both ends."""
    half = min(10, max(2, len(values) // 20))
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def draw_curves(records: list[dict[str, Any]], path: Path, *, title: str) -> None:
    """Write a PNG: reward, held-out accuracy where it was measured, and response length over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display and no pyplot state
    from matplotlib.figure import Figure

    shown = [name for name in CURVES if series(records, name)[1]]
    figure = Figure(figsize=(8, 6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(max(1, len(shown)), 1, sharex=True, squeeze=False)[:, 0]
    panels[0].set_title(title, parse_math=False)
    for axes, name in zip(panels, shown, strict=False):
        label, colour = CURVES[name]
        at, values = series(records, name)
        is_sparse = len(values) < 30
        axes.plot(at, values, color=colour, alpha=0.35, linewidth=1, marker="." if is_sparse else "")
        axes.plot(at, smooth(values) if len(values) >= 8 else values, color=colour, linewidth=2.2)
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a run's name in letters that no font here has: boxes
        figure.savefig(path)

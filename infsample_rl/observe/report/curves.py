"""Metrics as charts: which belong together, with titles and units, thinned so that a run of any length is drawn by a
few hundred points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infsample_rl.observe.report.run_folder import Record, RunFolder

MOST_POINTS = 400  # of a line
OTHER_POINTS = 300  # of a metric that has no chart of its own

Chart = dict[str, Any]  # title, unit, note, lines; what assets/chart.js draws


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart of some metrics over the steps."""

    title: str
    unit: str
    metrics: dict[str, str]  # name -> label; the first one alone when runs are compared
    spread: str | None = None  # a standard deviation, drawn around the first
    note: str = ""
    only_if_not_zero: bool = False
    log: bool = False  # logarithmic where all values are above 0


LEARNING = (
    Curve("Reward", "reward", {"reward/mean": "mean of the step's samples"}, spread="reward/std"),
    Curve(
        "Held-out accuracy", "share", {"eval/accuracy": "all samples", "eval/pass@1": "first sample of each problem"}
    ),
    Curve(
        "Response length",
        "tokens",
        {"response/length_mean": "mean", "response/length_max": "longest"},
        spread="response/length_std",
    ),
    Curve(
        "Signal",
        "share",
        {"reward/groups_with_signal": "groups whose rewards differ", "response/cut": "samples cut at the maximum"},
        note="a group whose rewards are all equal teaches nothing",
    ),
    Curve("Failed rewards", "samples", {"reward/failed": "failed or timed out"}, only_if_not_zero=True),
)
POLICY = (
    Curve("Entropy", "nats per token", {"learner/entropy": "policy"}),
    Curve(
        "KL to the reference",
        "nats per token",
        {"learner/kl": "policy from reference"},
        note="0 where the objective has no KL term",
    ),
    Curve(
        "Mismatch of engine and learner",
        "nats",
        {
            "learner/logprob_diff_mean": "mean difference",
            "learner/logprob_diff_max": "largest difference",
            "learner/logprob_diff_k3": "KL (k3)",
        },
        note="log-probabilities of the same tokens, computed by both",
        log=True,
    ),
    Curve("Loss", "loss", {"learner/loss": "loss"}),
    Curve("Gradient norm", "norm", {"learner/grad_norm": "before clipping"}),
    Curve("Clipped", "share of tokens", {"learner/clip_fraction": "outside the clip range"}, only_if_not_zero=True),
    Curve(
        "Effective sample size",
        "share",
        {"learner/engine_ess": "of importance weights"},
        note="1: engine and learner agree",
    ),
)
SPEED = (
    Curve("Speed of sampling", "tokens/s", {"timing/tokens_per_s": "all rollout workers"}),
    Curve("Decode steps", "running steps", {"rollout/running_steps": "slowest worker"}),
    Curve("Rows used", "share", {"rollout/row_utilisation": "rows that decode"}),
    Curve("Restarts", "workers", {"cluster/restarts": "so far"}, only_if_not_zero=True),
)
PREDICTOR = (
    Curve(
        "Error",
        "|log(predicted / length)|",
        {"predictor/log_error": "first prediction"},
        note="0.7: off by a factor of two; of samples that ended by themselves",
    ),
    Curve(
        "Order within a prompt",
        "Kendall's tau",
        {"predictor/tau": "first prediction"},
        note="1: the right order; 0: no better than chance",
    ),
    Curve(
        "Decode steps that predictions save",
        "running steps",
        {"predictor/steps_saved": "in replays of recent groups"},
        note="above 0 for long enough: predictions are used",
    ),
)


def charts(runs: Sequence[RunFolder], curves: Sequence[Curve]) -> list[Chart]:
    """Those of the curves that some run has values of. One run: all metrics of a curve; several: its first one, a line
    a run."""
    return [chart for chart in (_chart(runs, curve) for curve in curves) if chart["lines"]]


def component_curves(runs: Sequence[RunFolder]) -> list[Curve]:
    """A chart of the rewards' parts, where a run has several reward functions."""
    known = {"reward/mean", "reward/std", "reward/failed", "reward/groups_with_signal"}
    names = [name for name in metric_names(runs) if name.startswith("reward/") and name not in known]
    if not names:
        return []
    labels = {name: name.removeprefix("reward/") for name in names}
    if len(runs) == 1:
        return [Curve("Reward functions", "value", labels)]
    return [Curve(f"Reward function {label}", "value", {name: label}) for name, label in labels.items()]


def other_metrics(runs: Sequence[RunFolder]) -> dict[str, Chart]:
    """Every metric by its name, coarser, for the chart in which any can be chosen."""
    return {name: _chart(runs, Curve(name, name, {name: name}), OTHER_POINTS) for name in metric_names(runs)}


def metric_names(runs: Sequence[RunFolder]) -> list[str]:
    """All metrics with a value somewhere, sorted."""
    records = (record for run in runs for record in run.metrics)
    return sorted({name for record in records for name, value in record.items() if value is not None} - {"step"})


def _chart(runs: Sequence[RunFolder], curve: Curve, most: int = MOST_POINTS) -> Chart:
    lines, alone = list[dict[str, Any]](), len(runs) == 1
    for place, run in enumerate(runs):
        for position, (name, label) in enumerate(list(curve.metrics.items())[: None if alone else 1]):
            line = _line(run.metrics, name, curve.spread if alone and position == 0 else None, most)
            if line and (any(line["y"]) or not curve.only_if_not_zero):
                lines.append({"label": label if alone else run.label, "colour": position if alone else place, **line})
    values = [value for line in lines for value in line["y"] + line.get("low", [])]
    positive = bool(values) and min(values) > 0
    return {"title": curve.title, "unit": curve.unit, "note": curve.note, "log": curve.log and positive, "lines": lines}


def _line(records: Sequence[Record], name: str, spread: str | None, most: int) -> Chart:
    """Points where the metric has a value; of a long line means over neighbours, with their lowest and highest value as
    a band."""
    found = [
        (record["step"], record[name], record.get(spread) if spread else None)
        for record in records
        if record.get(name) is not None
    ]
    if not found:
        return {}
    size = -(-len(found) // most)
    if size == 1:
        line: Chart = {"x": [step for step, _, _ in found], "y": [short(value) for _, value, _ in found]}
        if spread and all(deviation is not None for _, _, deviation in found):
            line["low"] = [short(value - deviation) for _, value, deviation in found]
            line["high"] = [short(value + deviation) for _, value, deviation in found]
            line["band"] = "± standard deviation"
        return line
    parts = [found[start : start + size] for start in range(0, len(found), size)]
    values = [[value for _, value, _ in part] for part in parts]
    return {
        "x": [part[-1][0] for part in parts],
        "y": [short(sum(part) / len(part)) for part in values],
        "low": [short(min(part)) for part in values],
        "high": [short(max(part)) for part in values],
        "band": f"lowest to highest; the line is the mean of {size} steps",
    }


def short(value: float) -> float:
    """Five digits, which is what a screen shows: short(0.123456) -> 0.12346."""
    return float(f"{value:.5g}")

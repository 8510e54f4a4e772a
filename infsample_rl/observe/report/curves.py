"""Metrics as charts: which belong together, with titles and units, thinned so that a run of any length is drawn by a
few hundred points."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from infsample_rl.observe.report.run_folder import Record, RunFolder

MOST_POINTS = 400  # of a line

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


CURVES = {  # section of the page -> its charts
    "learning": (
        Curve("Reward", "reward", {"reward/mean": "mean of the step's samples"}, spread="reward/std"),
        Curve(
            "Held-out accuracy",
            "share",
            {"eval/accuracy": "all samples", "eval/pass@1": "first sample of each problem"},
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
    ),
    "policy": (
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
        Curve("Effective sample size", "share", {"learner/engine_ess": "1: engine and learner agree"}),
    ),
    "speed": (
        Curve("Speed of sampling", "tokens/s", {"timing/tokens_per_s": "all rollout workers"}),
        Curve("Decode steps", "running steps", {"rollout/running_steps": "slowest worker"}),
        Curve("Tokens of a row in a step", "tokens", {"rollout/tokens_per_row_step": "1: none was drafted and right"}),
        Curve("Rows used", "share", {"rollout/row_utilisation": "rows that decode"}),
        Curve("Restarts", "workers", {"cluster/restarts": "since this start"}, only_if_not_zero=True),
    ),
    "predictor": (
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
    ),
    "memory": (
        Curve(
            "KV cache of a rollout worker",
            "bytes",
            {"rollout/peak_kv_bytes": "most held at a time", "rollout/kv_pool_bytes": "the pool"},
        ),
        Curve("Learner peak", "bytes", {"memory/learner_peak_bytes": "measured"}),
        Curve("Rollout peak", "bytes", {"memory/rollout_peak_bytes": "measured"}),
        Curve("Reference peak", "bytes", {"memory/reference_peak_bytes": "measured"}),
        Curve("Weights to the engines", "bytes", {"weight_sync/bytes": "a version"}),
    ),
}
PHASES = {
    "timing/rollout": "sampling",
    "timing/backward_after_rollout": "backward after the last sample",
    "timing/update": "optimizer",
    "timing/weight_sync": "weights to the engines",
}
PHASES_NOTE = "What every worker did in the last steps is in trace.json: open it in ui.perfetto.dev."


def sections(runs: Sequence[RunFolder]) -> dict[str, list[Chart]]:
    """The charts of every section that some run has values of. One run: all metrics of a curve; several: its first
    one, a line a run."""
    known = {name for curve in CURVES["learning"] for name in (*curve.metrics, curve.spread)}
    parts = [name for name in metric_names(runs) if name.startswith("reward/") and name not in known]
    found = {section: charts(runs, curves) for section, curves in CURVES.items()}
    found["learning"] += charts(runs, [Curve(name.partition("/")[2], "reward", {name: "mean"}) for name in parts])
    return found


def charts(runs: Sequence[RunFolder], curves: Sequence[Curve]) -> list[Chart]:
    """Those of the curves that have a line."""
    return [chart for chart in (_chart(runs, curve) for curve in curves) if chart["lines"]]


def every_metric(runs: Sequence[RunFolder]) -> dict[str, Chart]:
    """Every metric by its name, for the chart in which any can be chosen."""
    return {name: _chart(runs, Curve(name, name, {name: name})) for name in metric_names(runs)}


def metric_names(runs: Sequence[RunFolder]) -> list[str]:
    """All metrics with a value somewhere, sorted."""
    records = (record for run in runs for record in run.metrics)
    return sorted({name for record in records for name, value in record.items() if value is not None} - {"step"})


def phase_chart(run: RunFolder) -> Chart | None:
    """Seconds of a step, stacked; None where no step has them. With run.max_staleness=1 sampling is beside the update:
    lines, not a stack."""
    overlaps = bool(run.settings.get("run.max_staleness"))
    labels = PHASES | ({"timing/step": "the step"} if overlaps else {"rest": "the rest: driver, records"})
    seconds = []
    for record in run.metrics:
        if record.get("timing/step") is not None:
            parts = {name: record.get(name) or 0.0 for name in PHASES}
            rest = max(0.0, record["timing/step"] - sum(parts.values()))
            seconds.append(parts | {"step": record["step"], "timing/step": record["timing/step"], "rest": rest})
    curve = Curve("Phases of a step", "s", labels, note=PHASES_NOTE)
    chart = _chart([dataclasses.replace(run, metrics=seconds)], curve)
    for line in chart["lines"]:
        line.pop("low", None), line.pop("high", None), line.pop("band", None)
    return chart | {"stack": not overlaps} if chart["lines"] else None


def _chart(runs: Sequence[RunFolder], curve: Curve) -> Chart:
    lines, alone = list[dict[str, Any]](), len(runs) == 1
    for place, run in enumerate(runs):
        for position, (name, label) in enumerate(list(curve.metrics.items())[: None if alone else 1]):
            line = _line(run.metrics, name, curve.spread if alone and position == 0 else None)
            if line and (any(line["y"]) or not curve.only_if_not_zero):
                lines.append({"label": label if alone else run.label, "colour": position if alone else place, **line})
    positive = all(value > 0 for line in lines for value in line["y"] + line.get("low", []))
    return {"title": curve.title, "unit": curve.unit, "note": curve.note, "log": curve.log and positive, "lines": lines}


def _line(records: Sequence[Record], name: str, spread: str | None) -> Chart:
    """Points where the metric has a value; of a long line means over neighbours, with their lowest and highest value as
    a band."""
    found = [record for record in records if record.get(name) is not None]
    if not found:
        return {}
    size = -(-len(found) // MOST_POINTS)
    parts = [found[start : start + size] for start in range(0, len(found), size)]
    values = [[record[name] for record in part] for part in parts]
    middle = list(map(fmean, values))
    line: Chart = {"x": [part[-1]["step"] for part in parts], "y": list(map(short, middle))}
    deviations = [record[spread] for record in found if record.get(spread) is not None] if spread else []
    if size > 1:
        low, high = list(map(min, values)), list(map(max, values))
        band = f"lowest to highest; the line is the mean of {size} steps"
    elif len(deviations) == len(found):
        low, high = ([mean + sign * by for mean, by in zip(middle, deviations, strict=True)] for sign in (-1, 1))
        band = "± standard deviation"
    else:
        return line
    return line | {"low": list(map(short, low)), "high": list(map(short, high)), "band": band}


def short(value: float) -> float:
    """Five digits, which is what a screen shows: short(0.123456) -> 0.12346."""
    return float(f"{value:.5g}")

"""Tables of the page: settings and how they differ, versions, final figures of every run."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from infsample_rl.config import Config
from infsample_rl.observe.report.run_folder import METRICS, RunFolder
from infsample_rl.observe.screen import duration
from infsample_rl.observe.summary import accuracy_text, before_after, ends, sampled_text, series

FRESH_S = 300.0  # a run without an end that wrote a step within this time may be going on
ABSENT = "–"


def settings_rows(run: RunFolder) -> list[list[Any]]:
    """[name, value, default where it differs, else None] of every setting in config.yaml."""
    defaults = _defaults()
    rows = []
    for name, value in _settings(run).items():
        default = defaults.get(name, value)
        rows.append([name, text_of(value), None if default == value else text_of(default)])
    return rows


def setting_differences(runs: Sequence[RunFolder]) -> list[list[Any]]:
    """[name, value of each run] of the settings that are not equal in all, where the run wrote itself apart."""
    settings = [{name: text_of(value) for name, value in _settings(run).items()} for run in runs]
    names = dict.fromkeys(name for values in settings for name in values if name != "run.dir")
    rows = [[name, *(values.get(name, ABSENT) for values in settings)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def version_rows(runs: Sequence[RunFolder]) -> list[list[Any]]:
    """[name, value of each run] of versions.json."""
    names = dict.fromkeys(str(name) for run in runs for name in run.versions)
    return [
        [name.removesuffix("_bytes"), *(_version_text(name, run.versions.get(name)) for run in runs)] for name in names
    ]


def figure_rows(runs: Sequence[RunFolder]) -> list[list[Any]]:
    """[name, value of each run]: what came out."""
    figures = [_figures(run) for run in runs]
    rows = [[name, *(found[name] for found in figures)] for name in figures[0]]
    return [row for row in rows if set(row[1:]) != {ABSENT}]


def headline(run: RunFolder) -> list[list[str]]:
    """[name, value, what it is] of the few figures at the top of the page."""
    steps = run.metrics_of_steps
    done = f"{run.last_step:,}" + ("" if run.total_steps is None else f" of {run.total_steps:,}")
    cards = [["steps", done, state(run)]]
    for title, name, form in (
        ("held-out accuracy", "eval/accuracy", "{:.3f}"),
        ("reward", "reward/mean", "{:.3f}"),
        ("response length", "response/length_mean", "{:,.0f} tokens"),
    ):
        is_evaluation = name.startswith("eval/")
        values = series(run.metrics if is_evaluation else steps, name)[1]
        if values:
            first, last, n = (values[0], values[-1], 1) if is_evaluation else ends(values)
            was = f"was {form.format(first)}" + (f"; means of {n} steps" if n > 1 else "")
            cards.append([title, form.format(last), was if len(values) > 1 else "only measured once"])
    seconds = series(steps, "timing/step")[1]
    if seconds:
        _, last, n = ends(seconds)
        mean = f"mean of the last {n} steps; " if n > 1 else ""
        cards.append(["a step", f"{last:,.1f} s", f"{mean}{duration(sum(seconds))} of steps in all"])
    return cards


def state(run: RunFolder) -> str:
    """How far a run is: finished, or when it last wrote a step."""
    if run.total_steps is not None and run.last_step >= run.total_steps:
        return "finished"
    if not run.metrics:
        return "no step yet"
    try:
        since = time.time() - (run.path / METRICS).stat().st_mtime
    except OSError:
        return "its files have gone"
    ago = f"last step written {duration(max(0.0, since))} ago"
    return f"{ago}: going on, or just stopped" if since < FRESH_S else ago


def description(run: RunFolder) -> str:
    """Model, data, G, schedule and, unless every sample has its own, the memory of KV, in a line."""
    model, source = (str(run.setting(name) or "").rstrip("/").split("/")[-1] for name in ("model.path", "data.source"))
    group, schedule = run.setting("rollout.group_size"), str(run.setting("rollout.schedule") or "")
    slots, tokens, given = (run.setting(f"rollout.{name}") for name in ("slots", "kv_budget_tokens", "kv_budget_bytes"))
    if schedule == "full_group":
        memory = ""
    elif given is not None or isinstance(tokens, int):
        memory = f"{given} of KV" if given is not None else f"{tokens:,} KV tokens"
    else:
        memory = f"{slots} slots" if slots else ""
    prompts = f"{run.setting('data.prompts_per_step')} prompts x G = {group}" if group else ""
    return " · ".join(filter(None, [model, source, prompts, ", ".join(filter(None, [schedule, memory]))]))


def text_of(value: Any) -> str:
    """A setting as one would write it on the command line: null, true, 0.5, [a, b]."""
    return (value or '""') if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _figures(run: RunFolder) -> dict[str, str]:
    records, steps = run.metrics, run.metrics_of_steps
    samples = (run.setting("data.prompts_per_step"), run.setting("rollout.group_size"))
    are_known = bool(steps) and all(isinstance(count, int) for count in samples)
    peaks = [max(series(steps, name)[1], default=None) for name in ("rollout/peak_kv_bytes", "rollout/kv_pool_bytes")]
    seconds = series(steps, "timing/step")[1]
    at, accuracies = series(records, "eval/accuracy")
    best = max(zip(accuracies, at, strict=True), key=lambda found: found[0], default=None)

    def last(name: str, unit: str) -> str:
        values = series(steps, name)[1]
        return f"{values[-1]:.4g} {unit}" if values else ABSENT

    figures = {
        "state": f"step {run.last_step:,}, {state(run)}",
        "held-out accuracy": accuracy_text(records),
        "best held-out accuracy": f"{best[0]:.3f} (step {best[1]})" if best else ABSENT,
        "reward": before_after(steps, "reward/mean", "{:.3f}"),
        "response length": before_after(steps, "response/length_mean", "{:.1f}", " tokens"),
        "sampled": sampled_text(steps, samples[0] * samples[1]) if are_known else ABSENT,
        "seconds of a step": f"{sum(seconds) / len(seconds):,.2f} (mean)" if seconds else ABSENT,
        "entropy at the end": last("learner/entropy", "nats per token"),
        "KL at the end": last("learner/kl", "nats per token"),
        "mismatch at the end": last("learner/logprob_diff_mean", "nats"),
        "order of predicted lengths at the end": last("predictor/tau", "(Kendall's tau)"),
        "most KV held by a worker": " of ".join(bytes_text(peak) for peak in peaks if peak is not None) or ABSENT,
        "failed rewards": f"{sum(series(steps, 'reward/failed')[1]):,.0f}" if steps else ABSENT,
        "restarts": f"{max(series(steps, 'cluster/restarts')[1], default=0):,.0f}" if steps else ABSENT,
    }
    return {name: ABSENT if text in ("none measured", "not evaluated") else text for name, text in figures.items()}


def bytes_text(value: float) -> str:
    """bytes_text(1_310_720) -> "1.3 MB", of 10^6."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def _version_text(name: str, value: Any) -> str:
    if value is None:
        return ABSENT
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        return bytes_text(value)
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _settings(run: RunFolder) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, values in run.settings.items() for key, value in values.items()}


def _defaults() -> dict[str, Any]:
    """Defaults of config.py by name, as YAML would hold them."""
    found = {}
    for section in dataclasses.fields(Config):
        for spec in dataclasses.fields(section.default_factory):  # type: ignore[arg-type]
            default = spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()
            if default is not dataclasses.MISSING:
                found[f"{section.name}.{spec.name}"] = json.loads(json.dumps(default, default=dataclasses.asdict))
    return found

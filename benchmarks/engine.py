"""Decode speed of our engine under every schedule, beside its rivals on the same prompt and at the same KV bytes.

python -m benchmarks.engine [model=PATH] [group_size=32] [slots=4] [max_new_tokens=128] [schedules=[infinite,...]]
[json=true] ...

Every rival is measured twice: as it runs best (`generate`: G rows at a time) and, `/equal_kv`, within the KV budget of
`slots`. Of each rival's variants the fastest on a short workload is taken. Each measurement has a process of its own in
every round, warmed up; figures are of the median round. "first / this" is what the first measurement takes of this
one's time.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks import figures
from benchmarks.process import end_with_terminate, measure
from benchmarks.rival_settings import Measurement, measure_on_vllm, measure_vllm, on_vllm, rival_measurements
from benchmarks.rounds import beside, measure_rounds, median_round
from benchmarks.workload import EngineOptions
from infsample_rl.config.command_line import run_with_options

NOT_OF_THE_WORKLOAD = ("json", "engines", "schedules", "preemptions", "speculate", "rivals", "rows", "profile")
SHORT_TOKENS = 24  # of the workload on which a rival's variants are compared


def main() -> int:
    """Run all measurements; 1 when one failed, token counts differ although ends are ignored, or drafts change a
    sample."""
    end_with_terminate()
    return run_with_options(run, EngineOptions, usage=__doc__)


def run(options: EngineOptions) -> int:
    """As main(). RuntimeError when the model cannot be had."""
    rounds: list[list[dict[str, Any]]] = []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            measuring = EngineBenchmark(options, scratch)
            asked = ours_measurements(options)
            asked += on_vllm(options, measuring.facts) if "vllm" in options.engines else []
            asked += rival_measurements(options, measuring.facts)
            points = [(f"benchmarks.engine: {each.name}", partial(measuring.record, each)) for each in asked]
            failed = measure_rounds(points, options.repeats, rounds)
    finally:  # what was measured is said by a command that is ended too
        found = in_one(rounds)
        for record in found if options.json else ():
            print(json.dumps(record), flush=True)
    if not options.json:
        figures.print_records(found, figures.ENGINE_COLUMNS)
        for record in found:
            if record["profile"]:
                print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in record["profile"].items()))
    unequal = [record["name"] for record in found if record["tokens_equal"] is False]
    if unequal:
        expected = found[0]["tokens_expected"]
        print(f"benchmarks.engine: token counts differ from {expected}: {', '.join(unequal)}", file=sys.stderr)
    other = other_samples(found)
    if other:
        print(f"benchmarks.engine: samples differ from those of other drafts: {', '.join(other)}", file=sys.stderr)
    return 1 if failed or unequal or other else 0


def other_samples(records: list[dict[str, Any]]) -> list[str]:
    """Ours whose samples are not those of the same schedule with another number of drafts, which they are bit by bit
    on the CPU."""
    first: dict[str, str] = {}
    ours = [each for each in records if each["samples_sha256"] and each["device"] == "cpu"]
    return [
        each["name"]
        for each in ours
        if first.setdefault(each["name"].split("/speculate=")[0], each["samples_sha256"]) != each["samples_sha256"]
    ]


def in_one(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A record of all rounds for every measurement that has any, with the profile of the first round, which alone has
    one; `ratio`: the first measurement's seconds over its own."""
    measured = [records for records in rounds if records]
    seconds = [[record["seconds"] for record in records] for records in measured]
    return [
        median_round(records, "seconds")
        | {"profile": records[0]["profile"], "seconds_rounds": own}
        | beside(seconds[0], own)
        for records, own in zip(measured, seconds, strict=True)
    ]


def ours_measurements(options: EngineOptions) -> list[Measurement]:
    """One per schedule, of token_budget one per kind of preemption; the first also times and counts single steps, which
    depend on neither."""
    asked = [
        (name, kind, drafts)
        for name in options.schedules
        for kind in (options.preemptions if name == "token_budget" else ["auto"])
        for drafts in options.speculate
    ]
    found = []
    for schedule, preemption, drafts in asked:
        name = f"ours/{schedule}" if preemption == "auto" else f"ours/{schedule}/{preemption}"
        name += "" if drafts == "auto" else f"/speculate={drafts}"
        settings: dict[str, Any] = {"schedule": schedule, "preemption": preemption, "speculate": drafts}
        if not found:
            settings |= {"rows_timed": options.rows, "profile": options.profile}
        found.append(Measurement(name, [settings]))
    return found


class EngineBenchmark:
    """Takes one measurement after another. RuntimeError for one that fails."""

    def __init__(self, options: EngineOptions, scratch: str) -> None:
        self.options = options
        self.workload = asdict(options) | {"config_folder": scratch}
        self.facts = self._measure("facts", self.workload, {"config_folder": scratch})
        options.prompt_tokens = self.workload["prompt_tokens"] = max(map(len, self.facts["prompts"]))
        self._step_seconds: dict[str, float] | None = None  # of our engine
        self._fastest: dict[str, tuple[int, list[dict[str, Any]]]] = {}  # by the measurement's name

    def record(self, measurement: Measurement, number: int) -> dict[str, Any]:
        """The object of one measurement in one round."""
        if measurement.name not in self._fastest:
            self._fastest[measurement.name] = self._fastest_variant(measurement)
        index, variants = self._fastest[measurement.name]
        settings = measurement.variants[index]
        if number > 0:  # single steps are timed in the first round
            settings = _shown(settings)
        raw = self._measure(measurement.what, self.workload, settings)
        if measurement.what == "ours":
            self._step_seconds = self._step_seconds or raw.get("step_seconds")
            raw["step_seconds"] = self._step_seconds
            if "vllm" in self.options.engines or self.options.mean_tokens:  # what vLLM by itself is forced to
                self.workload["lengths"] = raw["lengths"]
        return record_of(measurement.name, self.options, self.facts, raw) | {
            "settings": _shown(settings),
            "variants": variants,
        }

    def _measure(self, what: str, workload: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        if what == "vllm":
            return measure_vllm(workload, settings, self.facts)
        if what == "ours_on_vllm":
            return measure_on_vllm(workload, settings, self.facts)
        spec = {"what": what, "workload": workload, "settings": settings}
        return measure("engine_point.main", spec, threads=self.options.threads, timeout_s=self.options.timeout_s)

    def _fastest_variant(self, measurement: Measurement) -> tuple[int, list[dict[str, Any]]]:
        """Which variant to measure, and the seconds of every variant on a short workload (none compared when there is
        one variant)."""
        if len(measurement.variants) == 1:
            return 0, []
        tokens = min(SHORT_TOKENS, self.options.max_new_tokens)
        short = self.workload | {"max_new_tokens": tokens}
        if "lengths" in short:
            short["lengths"] = [min(length, tokens) for length in short["lengths"]]
        if "rows" in measurement.variants[0]:
            short["group_size"] = measurement.variants[0]["rows"]  # one micro-batch tells as much as all
        seconds = self._tune(measurement, short)
        variants = [
            {"settings": _shown(settings), "seconds": each}
            for settings, each in zip(measurement.variants, seconds, strict=True)
        ]
        if all(each is None for each in seconds):
            raise RuntimeError(f"no variant runs here: {[variant['settings'] for variant in variants]}")
        return min((each, index) for index, each in enumerate(seconds) if each is not None)[1], variants

    def _tune(self, measurement: Measurement, short: dict[str, Any]) -> list[float | None]:
        """Seconds of every variant, None where it cannot run: in one process, but for vLLM, whose threads are set at
        its start."""
        if "vllm" not in measurement.what:
            return self._measure("tune", short, {"what": measurement.what, "variants": measurement.variants})["seconds"]
        seconds: list[float | None] = []
        for settings in measurement.variants:
            try:
                seconds.append(self._measure(measurement.what, short, settings)["seconds"])
            except RuntimeError as error:
                print(f"benchmarks.engine: {measurement.name} {_shown(settings)}: {error}", file=sys.stderr, flush=True)
                seconds.append(None)
        return seconds


def _shown(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in ("rows_timed", "profile")}


def kv_bytes_read(lengths: list[int], running_steps: int, prompt_tokens: int, kv_bytes_per_token: int) -> int:
    """Least KV bytes a run reads: the prompt once per running step, and for token t of a sample its t - 1 earlier ones.

    A lower bound for every engine, also for those that read the prompt once per row.
    """
    return kv_bytes_per_token * (running_steps * prompt_tokens + sum(length * (length - 1) // 2 for length in lengths))


def roofline_seconds(running_steps: int, weight_bytes_read: int, kv_bytes: int, bandwidth: float) -> float:
    """Seconds to read the weights once per running step and `kv_bytes` in all, at `bandwidth` bytes per second."""
    return (running_steps * weight_bytes_read + kv_bytes) / bandwidth


def fit_step_time(seconds: dict[int, float]) -> tuple[float, float]:
    """c0, c1 of seconds = c0 + c1 x rows, by least squares over {rows: seconds of one step}. Needs two different row
    counts."""
    if len(seconds) < 2:
        raise ValueError(f"rows must have at least two different counts to fit c0 and c1, got {sorted(seconds)}")
    c1, c0 = statistics.linear_regression(list(seconds), list(seconds.values()))
    return c0, c1


def record_of(name: str, options: EngineOptions, facts: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """The object of one measurement: the keys that all benchmarks share first. Bytes, seconds; a step has one token for
    every active row."""
    tokens, seconds = sum(raw["lengths"]), raw["seconds"]
    samples = options.group_size * len(facts["prompts"])
    expected = samples * options.max_new_tokens if options.ignore_eos else None
    kv_read = kv_bytes_read(raw["lengths"], raw["running_steps"], options.prompt_tokens, facts["kv_bytes_per_token"])
    ideal = roofline_seconds(raw["running_steps"], facts["weight_bytes_read"], kv_read, facts["bandwidth"])
    timed = {int(rows): each for rows, each in (raw.get("step_seconds") or {}).items()}
    c0, c1 = fit_step_time(timed) if timed else (None, None)
    return {
        "name": name,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "running_steps": raw["running_steps"],
        "peak_kv_bytes": raw["peak_kv_bytes"],
        "peak_memory_bytes": raw["peak_memory_bytes"],
        "roofline_fraction": ideal / seconds,
        "kv_pool_bytes": raw["kv_pool_bytes"],
        "kv_budget_bytes": options.kv_budget_tokens() * facts["kv_bytes_per_token"],
        "tokens_expected": expected,
        "tokens_equal": None if expected is None else tokens == expected,
        "c0": c0,
        "c1": c1,
        "c2": raw.get("park_seconds"),
        "step_seconds": timed or None,
        "profile": raw.get("profile"),
        "bandwidth": facts["bandwidth"],
        "threads": options.threads,
        "device": facts["device"],
        "versions": facts["versions"] | {name: raw[name] for name in ("vllm",) if name in raw},
        "workload": {name: value for name, value in asdict(options).items() if name not in NOT_OF_THE_WORKLOAD},
        "preemptions": raw.get("preemptions"),
        "recomputed_tokens": raw.get("recomputed_tokens"),
        "parked_tokens": raw.get("parked_tokens"),
        "tokens_per_row_step": tokens / raw["row_steps"] if raw.get("row_steps") else None,
        "draft_seconds": raw.get("draft_seconds"),
        "second_seconds": raw.get("second_seconds"),
        "second_steps": raw.get("second_steps"),
        "samples_sha256": raw.get("samples_sha256"),
    }


if __name__ == "__main__":
    sys.exit(main())

"""Our engine under one schedule: one measurement, in its own process."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.models import Loaded
from infsample_rl.config import RolloutConfig
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine

# the time of a step is the difference of two runs of so many tokens, which leaves out the prefill
STEP_TOKENS = (4, 20)
STATISTICS = ("running_steps", "peak_kv_bytes", "kv_pool_bytes", "recomputed_tokens", "parked_tokens")
STATISTICS += ("preemptions", "row_utilisation")


def rollout_config(workload: dict[str, Any], **settings: Any) -> RolloutConfig:
    """The engine's settings for a workload; `settings` win."""
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    given = {name: workload[name] for name in ("group_size", "slots", "max_new_tokens") if name in workload}
    return RolloutConfig(**(plain | given | settings))


def measure_ours(given: Loaded, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds, lengths and the engine's own figures, of the fastest of `repeats` runs after a full one that warms
    up."""
    workload, asked = given.workload, {name: settings[name] for name in ("schedule", "preemption")}
    config = rollout_config(workload, **asked, prompts_at_once=workload["prompts_at_once"])
    stop_ids = set() if workload["ignore_eos"] else None
    engine = SamplingEngine(given.model, given.tokenizer, config, stop_token_ids=stop_ids)
    runs = []
    for repeat in range(workload["repeats"] + 1):
        started = time.perf_counter()
        groups = engine.generate(given.prompts, seed=workload["seed"] + repeat)
        seconds = time.perf_counter() - started
        runs.append((seconds, [len(completion.token_ids) for group in groups for completion in group], engine.stats))
    seconds, lengths, stats = min(runs[1:], key=lambda run: run[0])
    found = {"seconds": seconds, "lengths": lengths, "park_seconds": _park_seconds(engine)}
    return found | {name: getattr(stats, name) for name in STATISTICS}


def _park_seconds(engine: SamplingEngine) -> float | None:
    """Seconds to park a token's KV and bring it back, of a full response, the fastest of five; None where this engine
    parks nothing."""
    kv, parking, page_size = engine.runner.kv, engine.pool.parking, engine.config.page_size
    pages = list(range(min(kv.num_pages, -(-engine.config.max_new_tokens // page_size))))
    if parking is None or not parking.take(len(pages)):
        return None
    sample, seconds = object(), []
    for _ in range(5):
        started = time.perf_counter()
        parking.put(sample, pages)
        parking.fetch(sample, pages)
        kv.store[0, 0, 0, 0, 0].item()  # waits for a GPU
        seconds.append(time.perf_counter() - started)
    parking.release(len(pages))
    return min(seconds) / (len(pages) * page_size)


def step_seconds(given: Loaded, rows: int) -> float:
    """Seconds of one decode step of so many rows."""
    fastest = []
    for tokens in STEP_TOKENS:
        config = rollout_config({}, schedule="arrival", group_size=rows, slots=rows, max_new_tokens=tokens)
        engine = SamplingEngine(given.model, given.tokenizer, config, stop_token_ids=set())
        seconds = []
        for _ in range(4):  # the first warms up
            started = time.perf_counter()
            engine.generate(given.prompts[:1], seed=given.workload["seed"])
            seconds.append(time.perf_counter() - started)
        fastest.append(min(seconds[1:]))
    return (fastest[1] - fastest[0]) / (STEP_TOKENS[1] - STEP_TOKENS[0])

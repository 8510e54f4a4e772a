"""One measurement of `benchmarks.engine`, in the process that `process.measure` starts.

Its spec has `what` (facts, ours, generate, generate_batch, tune), `workload` (the command's options) and `settings` (of
this measurement).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from benchmarks import models, rivals
from benchmarks.models import Loaded, rollout_config
from benchmarks.workload import Workload
from infsample_rl.model.generation import stop_ids_of
from infsample_rl.model.peak_memory import PeakMemory
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine

# the time of a step is the difference of two runs of so many tokens, which leaves out the prefill
STEP_TOKENS = (4, 20)
STEP_PAIRS = 5
STEP_TRIES = 3
WARM_UP_STEPS = 5  # before steps are profiled
# By name, of the CUDA runtime or of operators that read a tensor's value on the host. cudaDeviceSynchronize is this
# module's and the profiler's, cudaEventSynchronize waits for what the step before drew, while this one runs.
SYNCS = ("cudaStreamSynchronize", "aten::_local_scalar_dense", "Memcpy DtoH (Device -> Pageable)")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
STATISTICS = ("running_steps", "peak_kv_bytes", "kv_pool_bytes", "preemptions", "recomputed_tokens")
STATISTICS += ("parked_tokens", "row_steps", "drafted_tokens", "accepted_tokens", "draft_seconds")


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """What the measurement found; peak memory is counted from the loaded model on, the model included."""
    what, options, settings = spec["what"], spec["workload"], spec["settings"]
    workload = Workload.of(options)
    torch.set_num_threads(workload.threads)
    memory = PeakMemory(models.pick_device(workload))
    model, tokenizer = models.load(workload)
    prompts, warm_up = models.make_prompts(workload, tokenizer, 2)
    if options.get("prompts"):
        prompts = read_prompts(Path(options["prompts"]), tokenizer, options["num_prompts"])
        options["prompt_tokens"] = max(map(len, prompts))
    else:
        prompts = [prompts]
    ends = stop_ids_of(model.generation_config, tokenizer, [])
    if options.get("mean_tokens"):
        ends |= models.early_stop_ids(len(tokenizer), options["mean_tokens"], workload.seed)
    given = Loaded(
        model=model, tokenizer=tokenizer, prompts=prompts, warm_up=[warm_up], stop_ids=sorted(ends), workload=options
    )
    if what == "facts":
        return facts(workload, model, settings) | {"prompts": prompts, "stop_ids": given.stop_ids}
    if what == "tune":
        return {"seconds": tune(settings["what"], given, settings["variants"])}
    memory.reset()
    found = ENGINES[what](given, settings)
    found |= {"peak_memory_bytes": memory.peak_bytes()}
    if settings.get("rows_timed"):
        found["step_seconds"] = {rows: step_seconds(given, rows) for rows in settings["rows_timed"]}
    if settings.get("profile"):
        found["profile"] = profile_steps(given, settings["profile"])
    return found


def tune(what: str, given: Loaded, variants: list[dict[str, Any]]) -> list[float | None]:
    """Seconds of every variant of a rival on this workload; None for one that cannot run here."""
    seconds: list[float | None] = []
    for variant in variants:
        try:
            seconds.append(ENGINES[what](given, variant)["seconds"])
        except (RuntimeError, ValueError, ImportError) as error:
            print(f"{what} {variant}: {error}", file=sys.stderr)
            seconds.append(None)
    return seconds


def facts(workload: Workload, model: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the engine: bytes of weights and KV, the memory's bandwidth, versions."""
    weights = models.weight_bytes(model)
    if workload.shape is not None:  # for an engine that makes random weights itself
        models.shape_config(workload.shape).save_pretrained(Path(settings["config_folder"]))
    return models.machine(model.device) | {
        "weight_bytes": weights,
        "weight_bytes_read": models.weight_bytes_read(model),
        "kv_bytes_per_token": models.kv_bytes_per_token(model),
        "bandwidth": read_bandwidth(weights, model.device),
    }


def read_bandwidth(num_bytes: int, device: torch.device, repeats: int = 9) -> float:
    """Bytes per second of a read-only sum over a buffer of `num_bytes` random numbers, median of `repeats`, with
    torch's current threads; on a GPU without the launches, which wait in its queue."""
    buffer = torch.rand(max(1, num_bytes // 4), dtype=torch.float32, device=device)
    seconds = []
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 2)]
        for event in events:
            buffer.sum()
            event.record()
        torch.cuda.synchronize(device)
        seconds = [first.elapsed_time(second) / 1000 for first, second in itertools.pairwise(events)]
    else:
        for _ in range(repeats + 1):
            started = time.perf_counter()
            buffer.sum()
            seconds.append(time.perf_counter() - started)
    return buffer.numel() * 4 / statistics.median(seconds[1:])


def measure_ours(given: Loaded, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds, lengths and the engine's own figures, of a run after one of another prompt that warms up; and seconds
    and steps of the same prompts in a second epoch."""
    workload, asked = given.workload, {name: settings[name] for name in ("schedule", "preemption", "speculate")}
    config = rollout_config(workload, **asked)
    stop_ids = set() if workload["ignore_eos"] else set(given.stop_ids)
    engine = SamplingEngine(given.model, given.tokenizer, config, stop_token_ids=stop_ids)
    engine.generate(given.warm_up, seed=workload["seed"])
    started = time.perf_counter()
    groups = engine.generate(given.prompts, seed=workload["seed"] + 1)
    seconds, stats = time.perf_counter() - started, engine.stats
    found = {name: getattr(stats, name) for name in STATISTICS}
    started = time.perf_counter()
    engine.generate(given.prompts, seed=workload["seed"] + 2)
    found |= {"second_seconds": time.perf_counter() - started, "second_steps": engine.stats.running_steps}
    texts = hashlib.sha256(b"".join(sample.token_ids.tobytes() for group in groups for sample in group)).hexdigest()
    lengths = [len(completion.token_ids) for group in groups for completion in group]
    found |= {"seconds": seconds, "lengths": lengths, "park_seconds": _park_seconds(engine), "samples_sha256": texts}
    return found


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """The last `count` different prompts of a file, as they are written there."""
    texts = list(dict.fromkeys(json.loads(line)["prompt"] for line in path.read_text().splitlines()))[-count:]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


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
    """Seconds of one decode step of so many rows: the median of STEP_PAIRS differences of a long and a short run.
    RuntimeError where a short run took longer than the long one beside it, in each of STEP_TRIES tries."""
    engines = []
    for tokens in STEP_TOKENS:
        config = rollout_config(
            {}, schedule="arrival", group_size=rows, slots=rows, max_new_tokens=tokens, speculate="0"
        )
        engines.append(SamplingEngine(given.model, given.tokenizer, config, stop_token_ids=set()))
    for _ in range(STEP_TRIES):
        differences = []
        for _ in range(STEP_PAIRS + 1):  # the first warms up
            seconds = []
            for engine in engines:
                started = time.perf_counter()
                engine.generate(given.prompts, seed=given.workload["seed"])
                seconds.append(time.perf_counter() - started)
            differences.append(seconds[1] - seconds[0])
        if min(differences[1:]) > 0:
            return statistics.median(differences[1:]) / (STEP_TOKENS[1] - STEP_TOKENS[0])
    raise RuntimeError(
        f"{STEP_TOKENS[1]} tokens of {rows} rows took no longer than {STEP_TOKENS[0]}: this machine is too noisy to "
        "time a step now; rows=[] leaves that out"
    )


def profile_steps(given: Loaded, steps: int) -> dict[str, Any]:
    """Figures of one decode step of G rows, means over `steps`: kernels and launches, waits of the host for the device,
    device allocations; milliseconds are measured without the profiler, over as many steps before."""
    rows = given.workload["group_size"]
    tokens = 2 * steps + WARM_UP_STEPS + 2  # no row ends within the steps
    config = rollout_config(
        {}, group_size=rows, slots=rows, schedule="full_group", max_new_tokens=tokens, speculate="0"
    )
    engine = SamplingEngine(given.model, given.tokenizer, config, stop_token_ids=set())
    engine.stream(given.prompts, 0)
    timed_steps(engine, WARM_UP_STEPS)
    found = {"rows": rows, "steps": steps, "milliseconds": round(1000 * timed_steps(engine, steps) / steps, 3)}
    is_cuda = given.model.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if is_cuda else [])
    allocated = _device_allocations(is_cuda)
    with torch.profiler.profile(activities=activities) as profile:
        timed_steps(engine, steps)
    allocated = _device_allocations(is_cuda) - allocated
    events = profile.profiler.kineto_results.events()
    counts = Counter(event.name() for event in events)
    cuda = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
    totals = {
        "kernels": sum(not event.name().startswith("Mem") for event in cuda),
        "launches": sum(counts[name] for name in LAUNCHES),
        "host_syncs": sum(counts[name] for name in SYNCS),
        "device_allocations": allocated,
    }
    return found | {name: round(total / steps, 3) for name, total in totals.items()}


def timed_steps(engine: SamplingEngine, steps: int) -> float:
    """Seconds of so many steps of the stream that runs, until the device has done them."""
    started = time.perf_counter()
    for _ in range(steps):
        engine._loop.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _device_allocations(is_cuda: bool) -> int:
    return torch.cuda.memory_stats()["allocation.all.allocated"] if is_cuda else 0


ENGINES = {
    "ours": measure_ours,
    "generate": rivals.measure_generate,
    "generate_batch": rivals.measure_generate_batch,
}

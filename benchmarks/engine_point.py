"""One measurement of `benchmarks.engine`, in the process that `process.measure` starts.

Its spec has `what` (facts, ours, generate, generate_batch, tune), `workload` (the command's options) and `settings` (of
this measurement).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import models, ours, rivals
from benchmarks.models import Loaded
from benchmarks.roofline import read_bandwidth
from benchmarks.step_profile import profile_steps
from benchmarks.workload import Workload
from infsample_rl.model.generation import stop_ids_of
from infsample_rl.model.peak_memory import PeakMemory

ENGINES = {
    "ours": ours.measure_ours,
    "generate": rivals.measure_generate,
    "generate_batch": rivals.measure_generate_batch,
}


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """What the measurement found; peak memory is counted from the loaded model on, the model included."""
    what, options, settings = spec["what"], spec["workload"], spec["settings"]
    workload = Workload.of(options)
    torch.set_num_threads(workload.threads)
    memory = PeakMemory(models.pick_device(workload))
    model, tokenizer = models.load(workload)
    prompts = models.make_prompts(workload, tokenizer, options["prompts"])
    stop_ids = sorted(stop_ids_of(model.generation_config, tokenizer, []))
    given = Loaded(model=model, tokenizer=tokenizer, prompts=prompts, stop_ids=stop_ids, workload=options)
    if what == "facts":
        return facts(workload, model, settings) | {"prompts": prompts, "stop_ids": stop_ids}
    if what == "tune":
        return {"seconds": tune(settings["what"], given, settings["variants"])}
    memory.reset()
    found = ENGINES[what](given, settings)
    found |= {"peak_memory_bytes": memory.peak_bytes(), "reserved_memory_bytes": memory.reserved_bytes()}
    if settings.get("rows_timed"):
        found["step_seconds"] = {rows: ours.step_seconds(given, rows) for rows in settings["rows_timed"]}
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

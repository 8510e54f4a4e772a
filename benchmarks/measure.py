"""One measurement, in the process that `process.measure_here` starts: python -m benchmarks.measure SPEC RESULT, both
JSON.

SPEC has `what` (facts, ours, generate, generate_batch, tune, memory), `workload` (options of the command) and
`settings` (of this measurement).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import bandwidth, memory_points, models, ours, rivals
from benchmarks.workload import Workload
from infsample_rl.model.loading import stop_token_ids
from infsample_rl.model.peak_memory import PeakMemory


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """What the measurement found; peak memory is counted from the loaded model on, the model included."""
    options, settings = spec["workload"], spec["settings"]
    workload = Workload(**{field.name: options[field.name] for field in dataclasses.fields(Workload)})
    torch.set_num_threads(workload.threads)
    memory = PeakMemory(models.pick_device(workload))
    model, tokenizer = models.load(workload)
    prompts = models.make_prompts(workload, tokenizer, options["prompts"])
    stop_ids = sorted(stop_token_ids(model, tokenizer, []))
    if spec["what"] == "facts":
        return facts(workload, model, settings) | {"prompts": prompts, "stop_ids": stop_ids}
    memory.reset()
    if spec["what"] == "ours":
        found = ours.measure_ours(model, tokenizer, prompts, options, settings)
    elif spec["what"] in ("generate", "generate_batch"):
        found = measure_rival(spec["what"], model, prompts, stop_ids, options, settings)
    elif spec["what"] == "tune":
        return {"seconds": tune(settings["what"], model, prompts, stop_ids, options, settings["variants"])}
    else:
        found = memory_points.measure(model, tokenizer, prompts[0], options, settings)
    found |= {"peak_memory_bytes": memory.peak_bytes(), "reserved_memory_bytes": memory.reserved_bytes()}
    rows = settings.get("rows_timed")
    if rows and spec["what"] == "ours":
        found["step_seconds"] = ours.step_seconds_ours(model, tokenizer, prompts[0], rows, options["seed"])
    elif rows and spec["what"] == "generate":
        found["step_seconds"] = rivals.step_seconds_generate(model, prompts[0], options, settings, rows)
    return found


def measure_rival(
    what: str,
    model: Any,
    prompts: list[list[int]],
    stop_ids: list[int],
    options: dict[str, Any],
    settings: dict[str, Any],
) -> Any:
    """One measurement of `generate` or `generate_batch`."""
    function = rivals.measure_generate if what == "generate" else rivals.measure_generate_batch
    return function(model, prompts, stop_ids, options, settings)


def tune(
    what: str,
    model: Any,
    prompts: list[list[int]],
    stop_ids: list[int],
    options: dict[str, Any],
    variants: list[dict[str, Any]],
) -> list[float | None]:
    """Seconds of every variant on this workload; None for one that cannot run here."""
    seconds: list[float | None] = []
    for variant in variants:
        try:
            seconds.append(measure_rival(what, model, prompts, stop_ids, options, variant)["seconds"])
        except (RuntimeError, ValueError, ImportError) as error:
            print(f"{what} {variant}: {error}", file=sys.stderr)
            seconds.append(None)
    return seconds


def facts(workload: Workload, model: transformers.PreTrainedModel, settings: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the engine: bytes of weights and KV, the memory's bandwidth, versions."""
    weights, device = models.weight_bytes(model), model.device
    read, kv = models.weight_bytes_read(model), models.kv_bytes_per_token(model)
    if workload.shape is not None and settings.get("config_folder"):
        models.save_config(workload.shape, Path(settings["config_folder"]))
    return {
        "weight_bytes": weights,
        "weight_bytes_read": read,
        "kv_bytes_per_token": kv,
        "bandwidth": bandwidth.read_bandwidth(weights, device),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
        },
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(sys.argv[1]))))

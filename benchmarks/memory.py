"""The paper's memory figure: peak memory over the group size, of ours at g = 1, 2, 4 beside the full group and
`model.generate`.

python -m benchmarks.memory [shape=qwen3_1.7b dtype=bfloat16 max_new_tokens=1024] [groups=[8,16,...]] [slots=...]
[json=true] ...

Each point has a process of its own. The pool has its full size and a few samples their full length; the others end
early, since memory does not depend on them. On CPU the peak is that of the process, less what its imports take; on CUDA
what the device lent at most, its context included.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import figures, models, rivals
from benchmarks.models import Loaded, rollout_config
from benchmarks.process import end_with_terminate, measure, measure_points
from benchmarks.workload import ModelOptions, Workload
from infsample_rl.config.command_line import option, run_with_options
from infsample_rl.config.rollout import SCHEDULES, RolloutConfig
from infsample_rl.model.peak_memory import PeakMemory
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine

PAPER_GROUP = 32  # of the paper's memory figure


@dataclass(kw_only=True)
class MemoryOptions(Workload):
    """Arguments of this command; `slots` is a list here."""

    max_new_tokens: int = option(256, "longest response; the pool holds slots of them", low=1)
    groups: list[int] = option([8, 16, 32, 64, 256, 1024], "group sizes G of ours", low=1)
    slot_counts: list[int] = option([1, 2, 4], "slot counts g of ours", low=1, key="slots")
    schedule: str = option(RolloutConfig().schedule, "schedule of ours", choices=SCHEDULES)
    max_generate_group: int = option(32, "largest G of the full group and of model.generate", low=1)
    mean_tokens: int = option(8, "tokens after which most of our samples end", low=1)
    json: bool = option(False, "one JSON object per measurement on stdout, and nothing else there")
    out: str = option("bench_out", "folder of the figure")


def main() -> int:
    """Measure all points; 1 when one failed."""
    end_with_terminate()
    return run_with_options(run, MemoryOptions, usage=__doc__)


def run(options: MemoryOptions) -> int:
    """As main()."""
    found, failed = measure_points(
        ((f"benchmarks.memory: {settings}", partial(measure_point, options, settings)) for settings in points(options)),
        as_json=options.json,
    )
    if not options.json and found:
        figures.print_records(found, figures.MEMORY_COLUMNS)
        print(figures.memory_facts(options, found[0]["device"]))
        print(f"figure: {figures.draw_memory(found, Path(options.out))}")
    return 1 if failed else 0


def measure_point(options: MemoryOptions, settings: dict[str, Any], earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """The object of one point, measured in a process of its own."""
    raw = measure(
        "memory.measure_here", asdict(options) | settings, threads=options.threads, timeout_s=options.timeout_s
    )
    return record_of(options, settings, raw, earlier)


def measure_here(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds, tokens, steps and KV bytes of one point; peak memory is counted from the loaded model on, the model
    included."""
    options = ModelOptions.of(spec)
    torch.set_num_threads(options.threads)
    memory = PeakMemory(models.pick_device(options))
    model, tokenizer = models.load(options)
    prompts = models.make_prompts(options, tokenizer, 1)
    workload = spec | {"ignore_eos": True}
    given = Loaded(model=model, tokenizer=tokenizer, prompts=prompts, stop_ids=[], workload=workload)
    memory.reset()
    started = time.perf_counter()
    if spec["schedule"] is None:
        lengths, kv_bytes = rivals.generate_once(given, "dynamic", spec["group_size"])
        found = {"running_steps": max(lengths), "peak_kv_bytes": kv_bytes, "kv_pool_bytes": kv_bytes}
    else:
        lengths, found = _ours(given)
    seconds = time.perf_counter() - started
    return (
        found
        | models.machine(model.device)
        | {
            "seconds": seconds,
            "lengths": lengths,
            "peak_memory_bytes": memory.peak_bytes(),
            "weight_bytes": models.weight_bytes(model),
        }
    )


def _ours(given: Loaded) -> tuple[list[int], dict[str, int]]:
    """Lengths and figures of all G samples with early ends, then of as many as there are slots to their full length,
    in one pool of full size.

    The first call shows that G does not matter, the second reaches the longest context; together far fewer than G x
    max_new_tokens tokens.
    """
    spec = given.workload
    config = rollout_config(spec, schedule=spec["schedule"])
    ends = models.early_stop_ids(len(given.tokenizer), spec["mean_tokens"], spec["seed"])
    engine = SamplingEngine(given.model, given.tokenizer, config, stop_token_ids=ends)
    early = engine.generate(given.prompts, seed=spec["seed"])[0]
    stats = [engine.stats]
    engine.stop_token_ids = set()
    rows = config.group_size if config.schedule == "full_group" else min(config.slots, config.group_size)
    full = engine.generate(given.prompts, seed=spec["seed"] + 1, sample_indices=[list(range(rows))])[0]
    stats.append(engine.stats)
    return [len(completion.token_ids) for completion in (*early, *full)], {
        "running_steps": sum(each.running_steps for each in stats),
        "peak_kv_bytes": max(each.peak_kv_bytes for each in stats),
        "kv_pool_bytes": max(each.kv_pool_bytes for each in stats),
    }


def points(options: MemoryOptions) -> list[dict[str, Any]]:
    """Every point, `generate` with 32 rows first: what ours saves is a share of that."""
    groups = sorted(
        {group for group in options.groups if group <= options.max_generate_group},
        key=lambda group: (group != PAPER_GROUP, group),
    )
    found = [{"group_size": group, "slots": None, "schedule": None} for group in groups]
    found += [{"group_size": group, "slots": group, "schedule": "full_group"} for group in sorted(groups)]
    return found + [
        {"group_size": group, "slots": slots, "schedule": options.schedule}
        for slots in options.slot_counts
        for group in options.groups
    ]


def record_of(
    options: MemoryOptions, settings: dict[str, Any], raw: dict[str, Any], earlier: list[dict[str, Any]]
) -> dict[str, Any]:
    """The object of one point; `rest_bytes` is the peak less weights and KV pool, `saved_share` is of `generate` with
    32 rows."""
    group, slots, schedule = (settings[name] for name in ("group_size", "slots", "schedule"))
    peak = raw["peak_memory_bytes"]
    rivals = [each for each in earlier if each["name"] == "generate" and each["group_size"] == PAPER_GROUP]
    tokens = sum(raw.pop("lengths"))
    return {
        "name": "generate" if schedule is None else f"ours/{schedule}",
        "group_size": group,
        "slots": slots,
        **raw,
        "tokens": tokens,
        "tokens_per_s": tokens / raw["seconds"],
        "rest_bytes": peak - raw["weight_bytes"] - raw["kv_pool_bytes"],
        "saved_share": 1 - peak / rivals[0]["peak_memory_bytes"] if rivals else None,
        "workload": {name: value for name, value in asdict(options).items() if name not in ("json", "out")},
    }


if __name__ == "__main__":
    sys.exit(main())

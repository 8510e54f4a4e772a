"""The paper's memory figure: peak memory over the group size, of ours at g = 1, 2, 4 beside the full group and
`model.generate`.

python -m benchmarks.memory [shape=qwen3_1.7b dtype=bfloat16 max_new_tokens=1024] [groups=[8,16,...]] [slots=...]
[json=true] ...

Each point has a process of its own. The pool has its full size and a few samples their full length; the others end
early, since memory does not depend on them. On CPU the peak is that of the process, less what its imports take; on CUDA
torch's max_memory_allocated.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.process import end_with_terminate, measure_here
from benchmarks.workload import Workload
from infsample_rl.commands import measurements
from infsample_rl.config.command_line import option, run_with_options
from infsample_rl.config.rollout import SCHEDULES, RolloutConfig

# Infinite Sampling, abstract and memory figure: Qwen3-1.7B, G = 32, 1,024 new tokens, all at once and one slot; GB of
# 1e9 bytes.
PAPER_SHAPE, PAPER_GROUP = "qwen3_1.7b", 32
PAPER_FULL_GROUP, PAPER_ONE_SLOT = 21.55e9, 10.64e9


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
    """As main(). RuntimeError when the model cannot be had."""
    workload = asdict(options) | {"prompts": 1}
    found: list[dict[str, Any]] = []
    failed = False
    facts = measure_here("facts", workload, {}, timeout_s=options.timeout_s)
    for settings in points(options):
        print(f"bench.memory: {settings} ...", file=sys.stderr, flush=True)
        try:
            raw = measure_here("memory", workload, settings, timeout_s=options.timeout_s)
        except RuntimeError as error:  # e.g. generate out of memory: the other points still stand
            print(f"bench.memory: {settings} failed: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        found.append(record_of(options, facts, settings, raw, found))
        if options.json:
            measurements.print_json(found[-1])
    if not options.json:
        _print_report(options, found, facts)
    return 1 if failed else 0


def points(options: MemoryOptions) -> list[dict[str, Any]]:
    """Every point, `generate` with 32 rows first: what ours saves is a share of that."""
    groups = sorted(
        {group for group in options.groups if group <= options.max_generate_group},
        key=lambda group: (group != PAPER_GROUP, group),
    )
    found = [{"kind": "generate", "group_size": group, "slots": None, "schedule": None} for group in groups]
    found += [
        {"kind": "ours", "group_size": group, "slots": group, "schedule": "full_group"} for group in sorted(groups)
    ]
    return found + [
        {"kind": "ours", "group_size": group, "slots": slots, "schedule": options.schedule}
        for slots in options.slot_counts
        for group in options.groups
    ]


def record_of(
    options: MemoryOptions,
    facts: dict[str, Any],
    settings: dict[str, Any],
    raw: dict[str, Any],
    earlier: list[dict[str, Any]],
) -> dict[str, Any]:
    """The object of one point; `rest_bytes` is the peak less weights and KV pool, `saved_share` is of `generate` with
    32 rows."""
    peak, group, slots = raw["peak_memory_bytes"], settings["group_size"], settings["slots"]
    tokens = sum(raw["lengths"])
    name = "generate" if settings["kind"] == "generate" else f"ours/{settings['schedule']}"
    rival = next(
        (
            record["peak_memory_bytes"]
            for record in earlier
            if record["name"] == "generate" and record["group_size"] == PAPER_GROUP
        ),
        None,
    )
    all_at_once = settings["kind"] == "generate" or settings["schedule"] == "full_group"
    paper = None
    if options.shape == PAPER_SHAPE and group == PAPER_GROUP and (all_at_once or slots == 1):
        paper = PAPER_FULL_GROUP if all_at_once else PAPER_ONE_SLOT
    return {
        "name": name,
        "group_size": group,
        "slots": slots,
        "seconds": raw["seconds"],
        "tokens": tokens,
        "tokens_per_s": tokens / raw["seconds"],
        "running_steps": raw["running_steps"],
        "peak_kv_bytes": raw["peak_kv_bytes"],
        "kv_pool_bytes": raw["kv_pool_bytes"],
        "peak_memory_bytes": peak,
        "weight_bytes": facts["weight_bytes"],
        "rest_bytes": peak - facts["weight_bytes"] - raw["kv_pool_bytes"],
        "reserved_memory_bytes": raw["reserved_memory_bytes"],
        "saved_share": None if rival is None else 1 - peak / rival,
        "paper_peak_memory_bytes": paper,
        "weights": "as given" if options.shape is None else f"random, shape {options.shape}",
        "device": facts["device"],
        "versions": facts["versions"],
        "threads": options.threads,
        "workload": {name: value for name, value in asdict(options).items() if name not in ("json", "out")},
    }


def _print_report(options: MemoryOptions, found: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    measurements.print_table(found, measurements.MEMORY_COLUMNS)
    counted = "VmHWM of the process less its imports" if facts["device"] == "cpu" else "torch's max_memory_allocated"
    weights = f"random weights of shape {options.shape}" if options.shape else options.model
    print(f"{weights}, {options.dtype}; peak: {counted}; MB of 1e6 bytes")
    if options.shape == PAPER_SHAPE:
        print(
            f"the paper, G = {PAPER_GROUP}: {PAPER_FULL_GROUP / 1e9} GB all at once, {PAPER_ONE_SLOT / 1e9} GB at g = 1"
        )
    for record in found:
        if record["slots"] == 1 and record["group_size"] == PAPER_GROUP and record["saved_share"] is not None:
            print(
                f"saved from generate with {PAPER_GROUP} rows to {record['name']} at g = 1: {record['saved_share']:.1%}"
            )
    print(f"figure: {measurements.draw_memory(found, Path(options.out))}")


if __name__ == "__main__":
    sys.exit(main())

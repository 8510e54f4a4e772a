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
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.process import end_with_terminate, measure, measure_points
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
    """As main()."""
    found, failed = measure_points(
        ((f"bench.memory: {settings}", partial(measure_point, options, settings)) for settings in points(options)),
        as_json=options.json,
    )
    if not options.json and found:
        _print_report(options, found)
    return 1 if failed else 0


def measure_point(options: MemoryOptions, settings: dict[str, Any], earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """The object of one point, measured in a process of its own."""
    raw = measure("memory_point", asdict(options) | settings, threads=options.threads, timeout_s=options.timeout_s)
    return record_of(options, settings, raw, earlier)


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
    paper = None
    if options.shape == PAPER_SHAPE and group == PAPER_GROUP:
        paper = PAPER_FULL_GROUP if schedule in (None, "full_group") else PAPER_ONE_SLOT if slots == 1 else None
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
        "paper_peak_memory_bytes": paper,
        "weights": options.weights,
        "threads": options.threads,
        "workload": {name: value for name, value in asdict(options).items() if name not in ("json", "out")},
    }


def _print_report(options: MemoryOptions, found: list[dict[str, Any]]) -> None:
    measurements.print_table(found, figures.MEMORY_COLUMNS)
    print(figures.memory_facts(options, found[0]["device"]))
    if options.shape == PAPER_SHAPE:
        paper = f"{PAPER_FULL_GROUP / 1e9} GB all at once, {PAPER_ONE_SLOT / 1e9} GB at g = 1"
        print(f"the paper, G = {PAPER_GROUP}: {paper}")
    print(f"figure: {figures.draw_memory(found, Path(options.out))}")


if __name__ == "__main__":
    sys.exit(main())

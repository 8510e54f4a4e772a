"""Peak memory of one update over the group size: our learner beside one padded batch of the whole group in plain
transformers.

python -m benchmarks.learner_memory [model=FOLDER] [groups=[8,16,...]] [max_tokens_per_micro_batch=] [json=true] ...

Each point has a process of its own: model, AdamW and its moments are there already when the measured update begins.
Ours packs the group into passes of max_tokens_per_micro_batch behind one prompt; the rival runs all G responses,
padded, at once, with the logits of every position, and has the same masters, optimizer and recomputation. On CPU the
peak is that of the process, less what its imports take; on CUDA max_memory_allocated.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.process import FREED_AT_ONCE, end_with_terminate, measure, measure_points
from benchmarks.workload import ModelOptions
from infsample_rl.commands import measurements
from infsample_rl.config import LearnerConfig
from infsample_rl.config.command_line import option, run_with_options

COLUMNS = {
    "name": "name",
    "group_size": "G",
    "passes": "passes",
    "tokens": "tokens",
    "peak_memory_bytes": "peak MB",
    "state_bytes": "weights, gradients, optimizer MB",
    "rest_bytes": "rest MB",
    "seconds": "s",
}


@dataclass(kw_only=True)
class LearnerMemoryOptions(ModelOptions):
    """Arguments of this command; those of the learner are named and meant as in the config."""

    max_new_tokens: int = option(128, "longest response; they have half of it to all of it", low=2)
    groups: list[int] = option([8, 16, 32, 64, 128, 256], "group sizes G of ours", low=1)
    max_full_batch_group: int = option(64, "largest G of the rival; 0: none", low=0)
    max_tokens_per_micro_batch: int = option(2048, "tokens of one pass", low=16)
    logprob_chunk_tokens: int = option(
        LearnerConfig().logprob_chunk_tokens, "tokens whose logits exist at a time", low=1
    )
    activation_checkpointing: int = option(0, "0: of no layer, 1: of every layer, n: of every n-th; of both", low=0)
    recompute_granularity: str = option(
        "full", "of recomputed layers, as in the config; of both", choices=("full", "selective")
    )
    offload_optimizer: bool = option(False, "masters, moments and the optimizer step in host memory; of both")
    optimizer: str = option("adamw", "of both", choices=("adamw", "adamw_8bit"))
    timeout_s: float = option(1800.0, "seconds one measurement may take", low=1)
    json: bool = option(False, "one JSON object per measurement on stdout, and nothing else there")
    out: str = option("bench_out/learner_memory", "folder of the figure")


def main() -> int:
    """Measure all points; 1 when one failed."""
    end_with_terminate()
    return run_with_options(run, LearnerMemoryOptions, usage=__doc__)


def run(options: LearnerMemoryOptions) -> int:
    """As main()."""
    found, failed = measure_points(
        (
            (f"bench.learner_memory: {name}, G = {size}", partial(measure_point, options, name, size))
            for name, size in points(options)
        ),
        as_json=options.json,
    )
    if not options.json and found:
        measurements.print_table(found, COLUMNS)
        print(figures.memory_facts(options, found[0]["device"]))
        print(f"figure: {figures.draw_memory(found, Path(options.out))}")
    return 1 if failed else 0


def points(options: LearnerMemoryOptions) -> list[tuple[str, int]]:
    """Ours at every G, then the rival at those that are not too large for it."""
    rival = [("full batch", group) for group in options.groups if group <= options.max_full_batch_group]
    return [("ours", group) for group in options.groups] + rival


def measure_point(
    options: LearnerMemoryOptions, name: str, group_size: int, earlier: list[dict[str, Any]]
) -> dict[str, Any]:
    """The object of one point; `rest_bytes` is the peak less weights, gradients and optimizer state on the device:
    activations and logits."""
    spec = asdict(options) | {"name": name, "group_size": group_size}
    limits = {"threads": options.threads, "timeout_s": options.timeout_s}
    raw = measure("learner_memory_point", spec, **limits, environment=FREED_AT_ONCE)
    return raw | {
        "name": name,
        "group_size": group_size,
        "rest_bytes": raw["peak_memory_bytes"] - raw["state_bytes"],
        "tokens_per_s": raw["tokens"] / raw["seconds"],
        "weights": options.weights,
        "threads": options.threads,
        "workload": {key: value for key, value in asdict(options).items() if key not in ("json", "out", "groups")},
    }


if __name__ == "__main__":
    sys.exit(main())

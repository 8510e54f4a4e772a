"""A decode step of our engine beside the roofline, over rows, prompts and own lengths.

python -m benchmarks.decode [shape=qwen3_1.7b dtype=bfloat16] [rows=[1,4,32]] [prompt_tokens=1024]
    [own_tokens=[64,1024]] [kv_dtype=int8] [top_p=0.9] [json=true]

All rows share one prompt. The floor is the weights, the prompt's KV and every row's own KV, each read once at the
bandwidth that was measured just before. All in one process: rows decode on, and windows of `steps` steps are timed
where they have `own_tokens` tokens.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import models
from benchmarks.engine_point import WARM_UP_STEPS, read_bandwidth, timed_steps
from benchmarks.figures import print_records
from benchmarks.models import rollout_config
from benchmarks.process import end_with_terminate
from benchmarks.workload import ModelOptions
from infsample_rl.config.command_line import option, run_with_options
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine

WINDOWS = 3  # timed at every length; the median counts
COLUMNS = {
    "rows": "rows",
    "prompt_tokens": "prompt",
    "own_tokens": "own",
    "milliseconds": "ms",
    "floor_milliseconds": "floor ms",
    "roofline_fraction": "of the roofline",
}


@dataclass(kw_only=True)
class DecodeOptions(ModelOptions):
    """Arguments of this command."""

    prompt_tokens: int = option(1024, "tokens of the prompt that all rows share", low=1)
    rows: list[int] = option([1, 2, 4, 8, 16, 32, 64], "rows of a step", low=1)
    own_tokens: list[int] = option([64, 512, 1024], "own tokens of every row", low=1)
    steps: int = option(20, "steps of a window", low=1)
    kv_dtype: str = option("auto", "as rollout.kv_dtype", choices=("auto", "int8"))
    top_p: float = option(1.0, "as rollout.top_p", above=0, high=1)
    json: bool = option(False, "one JSON object per row count and length on stdout, and nothing else there")


def main() -> int:
    """Measure everything."""
    end_with_terminate()
    return run_with_options(run, DecodeOptions, usage=__doc__)


def run(options: DecodeOptions) -> int:
    """As main()."""
    found = []
    for record in measure_here(asdict(options)):
        found.append(record)
        if options.json:
            print(json.dumps(record), flush=True)
    if not options.json:
        print_records(found, COLUMNS)
        print(f"{found[0]['device']}: {found[0]['bandwidth'] / 1e12:.2f} TB/s read")
    return 0


def measure_here(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A record for every number of rows and every length, as soon as it is measured."""
    options = ModelOptions.of(spec)
    torch.set_num_threads(options.threads)
    model, tokenizer = models.load(options)
    prompts = models.make_prompts(options, tokenizer, 1)
    read = models.weight_bytes_read(model)
    shared = models.machine(model.device) | {
        "name": options.shape or options.model,
        "dtype": options.dtype,
        "kv_dtype": spec["kv_dtype"],
        "top_p": spec["top_p"],
        "prompt_tokens": options.prompt_tokens,
        "bandwidth": read_bandwidth(read, model.device),
    }
    lengths = sorted(spec["own_tokens"])
    for rows in spec["rows"]:
        config = rollout_config(
            {},
            group_size=rows,
            slots=rows,
            schedule="full_group",
            max_new_tokens=lengths[-1] + WARM_UP_STEPS + WINDOWS * spec["steps"] + 2,
            speculate="0",
            kv_dtype=spec["kv_dtype"],
            top_p=spec["top_p"],
        )
        engine = SamplingEngine(model, tokenizer, config, stop_token_ids=set())
        kv_bytes = engine.runner.page_bytes(config.page_size) / config.page_size
        engine.stream(prompts, 0)
        for own, seconds in zip(lengths, _step_seconds(engine, lengths, spec["steps"]), strict=True):
            seen = options.prompt_tokens + rows * (own + WINDOWS * spec["steps"] / 2)
            floor = (read + kv_bytes * seen) / shared["bandwidth"]
            figures = {"milliseconds": 1000 * seconds, "floor_milliseconds": 1000 * floor}
            sizes = {"rows": rows, "own_tokens": own}
            yield shared | sizes | figures | {"roofline_fraction": floor / seconds}
        del engine


def _step_seconds(engine: SamplingEngine, lengths: list[int], steps: int) -> list[float]:
    """Seconds of a step at every length: the median of WINDOWS windows, which follow one another."""
    found = []
    for length in lengths:
        timed_steps(engine, max(WARM_UP_STEPS, length - engine._loop.stats.running_steps))
        found.append(statistics.median(timed_steps(engine, steps) / steps for _ in range(WINDOWS)))
    return found


if __name__ == "__main__":
    sys.exit(main())

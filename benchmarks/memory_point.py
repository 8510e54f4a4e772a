"""One point of `benchmarks.memory`, in the process that `process.measure` starts: ours, our full group, or
`model.generate` with G rows."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks import models, rivals
from benchmarks.models import Loaded
from benchmarks.ours import rollout_config
from benchmarks.workload import ModelOptions
from infsample_rl.model.peak_memory import PeakMemory
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine


def main(spec: dict[str, Any]) -> dict[str, Any]:
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
        lengths, kv_bytes = rivals.generate_once(given, prompts[0], "dynamic", spec["group_size"])
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
            "reserved_memory_bytes": memory.reserved_bytes(),
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
    ends = early_stop_ids(len(given.tokenizer), spec["mean_tokens"], spec["seed"])
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


def early_stop_ids(vocab_size: int, mean_tokens: int, seed: int) -> set[int]:
    """A random share of 1 / mean_tokens of the vocabulary: with near-uniform logits samples end after about
    mean_tokens."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    return set(order[: max(1, vocab_size // mean_tokens)].tolist())

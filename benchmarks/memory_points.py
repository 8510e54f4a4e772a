"""One point of the memory benchmark, in its own process: ours, our full group, or `model.generate` with G rows."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks import rivals
from benchmarks.ours import rollout_config
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[int],
    workload: dict[str, Any],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Seconds, tokens, steps and KV bytes of one point; the caller has the peak."""
    started = time.perf_counter()
    if settings["kind"] == "generate":
        rows = settings["group_size"]
        lengths, kv_bytes = rivals.generate_once(
            model, prompt, [], workload | {"ignore_eos": True}, "dynamic", rows, workload["max_new_tokens"]
        )
        found = {
            "lengths": lengths,
            "running_steps": max(lengths),
            "peak_kv_bytes": kv_bytes,
            "kv_pool_bytes": kv_bytes,
        }
    else:
        found = _ours(model, tokenizer, prompt, workload, settings)
    return found | {"seconds": time.perf_counter() - started}


def _ours(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[int],
    workload: dict[str, Any],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """All G samples with early ends, then as many as there are slots to their full length, in one pool of full size.

    The first call shows that G does not matter, the second reaches the longest context; together far fewer than G x
    max_new_tokens tokens.
    """
    group_size, slots = settings["group_size"], settings["slots"]
    config = rollout_config(workload, group_size=group_size, slots=slots, schedule=settings["schedule"])
    engine = SamplingEngine(
        model,
        tokenizer,
        config,
        stop_token_ids=early_stop_ids(len(tokenizer), workload["mean_tokens"], workload["seed"]),
    )
    early = engine.generate([prompt], seed=workload["seed"])[0]
    stats = engine.stats
    engine.stop_token_ids = set()
    rows = group_size if settings["schedule"] == "full_group" else min(slots, group_size)
    full = engine.generate([prompt], seed=workload["seed"] + 1, sample_indices=[list(range(rows))])[0]
    lengths = [len(completion.token_ids) for completion in full]
    if lengths != [workload["max_new_tokens"]] * rows:
        raise RuntimeError(
            f"without stop ids every sample must have {workload['max_new_tokens']} tokens, got {lengths}"
        )
    return {
        "lengths": [len(completion.token_ids) for completion in early] + lengths,
        "running_steps": stats.running_steps + engine.stats.running_steps,
        "peak_kv_bytes": max(stats.peak_kv_bytes, engine.stats.peak_kv_bytes),
        "kv_pool_bytes": max(stats.kv_pool_bytes, engine.stats.kv_pool_bytes),
    }


def early_stop_ids(vocab_size: int, mean_tokens: int, seed: int) -> set[int]:
    """A random share of 1 / mean_tokens of the vocabulary: with near-uniform logits samples end after about
    mean_tokens."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    return set(order[: max(1, vocab_size // mean_tokens)].tolist())

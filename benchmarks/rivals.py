"""The rivals inside transformers: `model.generate` and its continuous batching, `generate_batch`. One measurement, in
its own process.

Both get plain sampling (temperature 1, top_k 0, top_p 1, said explicitly) and the same stop ids as our engine.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.models import Loaded

TRASH_BLOCKS = 2  # generate_batch allocates so many blocks that never hold a sample


def generation_config(given: Loaded, rows: int) -> GenerationConfig:
    """Plain sampling of `rows` completions of one prompt, of exactly max_new_tokens with ignore_eos. What is left out
    here is the model's own."""
    end = given.model.config.eos_token_id
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        typical_p=1.0,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        max_new_tokens=given.workload["max_new_tokens"],
        min_new_tokens=None,
        eos_token_id=-1 if given.workload["ignore_eos"] else given.stop_ids,  # None would become the model's own
        pad_token_id=end[0] if isinstance(end, list) else end,
        num_return_sequences=rows,
    )


def measure_generate(given: Loaded, settings: dict[str, Any]) -> dict[str, Any]:
    """The group in micro-batches of settings["rows"]; warmed up with one micro-batch."""
    group_size, rows = given.workload["group_size"], settings["rows"]
    batches = [min(rows, group_size - start) for start in range(0, group_size, rows)]
    for count in sorted(set(batches)):
        generate_once(given, settings["cache"], count)
    started, lengths, steps, kv_bytes = time.perf_counter(), list[int](), 0, 0
    for count in batches:
        found, taken = generate_once(given, settings["cache"], count)
        lengths, steps, kv_bytes = lengths + found, steps + max(found), max(kv_bytes, taken)
    return _figures(time.perf_counter() - started, lengths, steps, kv_bytes)


def measure_generate_batch(given: Loaded, settings: dict[str, Any]) -> dict[str, Any]:
    """The group in one call of continuous batching, in a pool of settings["kv_tokens"] tokens or of one sample; warmed
    up with a full run."""
    model, workload, page = given.model, given.workload, settings["page_size"]
    # to hold one sample, and its copy of a shared block
    least = math.ceil((workload["prompt_tokens"] + workload["max_new_tokens"]) / page) + 1
    blocks = max(least, settings["kv_tokens"] // page - TRASH_BLOCKS)
    batching = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=blocks,
        max_batch_tokens=workload["prompt_tokens"] + workload["group_size"],
        scheduler_type=settings["scheduler"],
        default_compile_level=settings["compile_level"],
        use_cuda_graph=settings["cuda_graph"],
        safety_margin=settings["safety_margin"],
    )
    copies = workload["group_size"] if settings["copies"] else 1
    config = generation_config(given, workload["group_size"] // copies)
    inputs = given.prompts * copies
    forwards: list[None] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda *_: forwards.append(None))
    for _ in range(2):  # the first warms up
        forwards.clear()
        started = time.perf_counter()
        outputs = model.generate_batch(
            inputs, generation_config=config, continuous_batching_config=batching, persistent_manager=True
        )
        lengths, seconds = [len(output.generated_tokens) for output in outputs.values()], time.perf_counter() - started
    handle.remove()
    model.destroy_cached_continuous_batching_manager()
    pool = (blocks + TRASH_BLOCKS) * page * settings["kv_bytes_per_token"]
    return _figures(seconds, lengths, len(forwards), pool)


def _figures(seconds: float, lengths: list[int], steps: int, kv_bytes: int) -> dict[str, Any]:
    pool = {"peak_kv_bytes": kv_bytes, "kv_pool_bytes": kv_bytes}
    return {"seconds": seconds, "lengths": lengths, "running_steps": steps} | pool


def generate_once(given: Loaded, cache: str, rows: int) -> tuple[list[int], int]:
    """Lengths of `rows` completions of one prompt, and the bytes of the KV cache at the end."""
    model, config, prompt = given.model, generation_config(given, rows), given.prompts[0]
    config.cache_implementation = None if cache == "dynamic" else cache
    config.return_dict_in_generate = True
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    tensors = [tensor for layer in output.past_key_values.layers for tensor in (layer.keys, layer.values)]
    ends = set() if given.workload["ignore_eos"] else set(given.stop_ids)
    lengths = [_length(ids, ends) for ids in output.sequences[:, len(prompt) :].tolist()]
    return lengths, sum(tensor.nbytes for tensor in tensors)


def _length(ids: list[int], stop_ids: set[int]) -> int:
    """Tokens up to and including the first stop id."""
    return next((index + 1 for index, token in enumerate(ids) if token in stop_ids), len(ids))

"""The rivals inside transformers: `model.generate` and its continuous batching, `generate_batch`. One measurement, in
its own process.

Both get plain sampling (temperature 1, top_k 0, top_p 1, said explicitly) and the same stop ids as our engine.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from benchmarks.ours import STEP_TOKENS

TRASH_BLOCKS = 2  # generate_batch allocates so many blocks that never hold a sample


def generation_config(
    workload: dict[str, Any], stop_ids: list[int], pad_id: int, rows: int, new_tokens: int
) -> GenerationConfig:
    """Plain sampling of `rows` completions of one prompt, of exactly `new_tokens` with ignore_eos. What is left out
    here is the model's own."""
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        typical_p=1.0,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        max_new_tokens=new_tokens,
        min_new_tokens=None,
        eos_token_id=-1 if workload["ignore_eos"] else stop_ids,  # None would become the model's own
        pad_token_id=pad_id,
        num_return_sequences=rows,
    )


def measure_generate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    stop_ids: list[int],
    workload: dict[str, Any],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Groups in micro-batches of settings["rows"], prompt after prompt; warmed up with one micro-batch."""
    group_size, rows = workload["group_size"], settings["rows"]
    batches = [min(rows, group_size - start) for start in range(0, group_size, rows)]
    for count in sorted(set(batches)):
        generate_once(model, prompts[0], stop_ids, workload, settings["cache"], count, workload["max_new_tokens"])
    runs = []
    for _ in range(workload["repeats"]):
        started, lengths, steps, kv_bytes = time.perf_counter(), [], 0, 0
        for prompt in prompts:
            for count in batches:
                found, taken = generate_once(
                    model, prompt, stop_ids, workload, settings["cache"], count, workload["max_new_tokens"]
                )
                lengths, steps, kv_bytes = lengths + found, steps + max(found), max(kv_bytes, taken)
        runs.append((time.perf_counter() - started, lengths, steps, kv_bytes))
    seconds, lengths, steps, kv_bytes = min(runs, key=lambda run: run[0])
    return {
        "seconds": seconds,
        "lengths": lengths,
        "running_steps": steps,
        "peak_kv_bytes": kv_bytes,
        "kv_pool_bytes": kv_bytes,
    }


def step_seconds_generate(
    model: PreTrainedModel, prompt: list[int], workload: dict[str, Any], settings: dict[str, Any], rows: list[int]
) -> dict[int, float]:
    """{rows: seconds of one decode step of so many rows}."""
    found = {}
    for count in rows:
        fastest = []
        for tokens in STEP_TOKENS:
            seconds = []
            for _ in range(4):  # the first warms up
                started = time.perf_counter()
                generate_once(model, prompt, [], workload | {"ignore_eos": True}, settings["cache"], count, tokens)
                seconds.append(time.perf_counter() - started)
            fastest.append(min(seconds[1:]))
        found[count] = (fastest[1] - fastest[0]) / (STEP_TOKENS[1] - STEP_TOKENS[0])
    return found


def measure_generate_batch(
    model: PreTrainedModel,
    prompts: list[list[int]],
    stop_ids: list[int],
    workload: dict[str, Any],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """All groups in one call of continuous batching, in a pool of settings["kv_tokens"] tokens or of one sample; warmed
    up with a full run."""
    page, group_size = settings["page_size"], workload["group_size"]
    # to hold one sample, and its copy of a shared block
    least = math.ceil((workload["prompt_tokens"] + workload["max_new_tokens"]) / page) + 1
    blocks = max(least, settings["kv_tokens"] // page - TRASH_BLOCKS)
    batching = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=blocks,
        max_batch_tokens=workload["prompt_tokens"] + group_size * len(prompts),
        scheduler_type=settings["scheduler"],
        default_compile_level=settings["compile_level"],
        use_cuda_graph=settings["cuda_graph"],
        safety_margin=settings["safety_margin"],
    )
    copies = group_size if settings["copies"] else 1
    config = generation_config(
        workload, stop_ids, model.config.eos_token_id, group_size // copies, workload["max_new_tokens"]
    )
    forwards = [0]
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda *_: forwards.__setitem__(0, forwards[0] + 1)
    )
    runs = []
    for _ in range(workload["repeats"] + 1):
        forwards[0], started = 0, time.perf_counter()
        inputs = [prompt for prompt in prompts for _ in range(copies)]
        outputs = model.generate_batch(
            inputs, generation_config=config, continuous_batching_config=batching, persistent_manager=True
        )
        runs.append(
            (time.perf_counter() - started, [len(output.generated_tokens) for output in outputs.values()], forwards[0])
        )
    handle.remove()
    model.destroy_cached_continuous_batching_manager()
    seconds, lengths, steps = min(runs[1:], key=lambda run: run[0])
    pool = (blocks + TRASH_BLOCKS) * page * settings["kv_bytes_per_token"]
    return {
        "seconds": seconds,
        "lengths": lengths,
        "running_steps": steps,
        "peak_kv_bytes": pool,
        "kv_pool_bytes": pool,
    }


def generate_once(
    model: PreTrainedModel,
    prompt: list[int],
    stop_ids: list[int],
    workload: dict[str, Any],
    cache: str,
    rows: int,
    new_tokens: int,
) -> tuple[list[int], int]:
    """Lengths of `rows` completions of one prompt, and the bytes of the KV cache at the end."""
    pad_id = model.config.eos_token_id[0] if isinstance(model.config.eos_token_id, list) else model.config.eos_token_id
    config = generation_config(workload, stop_ids, pad_id, rows, new_tokens)
    config.cache_implementation = None if cache == "dynamic" else cache
    config.return_dict_in_generate = True
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    tensors = [tensor for layer in output.past_key_values.layers for tensor in (layer.keys, layer.values)]
    kv_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return [
        _length(ids, set(stop_ids) if not workload["ignore_eos"] else set())
        for ids in output.sequences[:, len(prompt) :].tolist()
    ], kv_bytes


def _length(ids: list[int], stop_ids: set[int]) -> int:
    """Tokens up to and including the first stop id."""
    return next((index + 1 for index, token in enumerate(ids) if token in stop_ids), len(ids))

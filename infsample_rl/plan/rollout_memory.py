"""Memory of a rollout worker: weights, KV pool, the rows of a step, logits, and the larger of a prefill and of weights
that arrive.

Arithmetic over what the engine allocates. The float32 path of the CPU has been measured; 16 bits, quantised KV and CUDA
follow from the code.
"""

from __future__ import annotations

from pathlib import Path

import torch

from infsample_rl.config import Config
from infsample_rl.config.fields import kv_pages
from infsample_rl.config.rollout import MOST_DRAFTS, MOST_QUERIES
from infsample_rl.model.weight_sync.buckets import BUCKET_BYTES
from infsample_rl.model.weight_sync.transport import choose_transport
from infsample_rl.plan.devices import Device
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.row_memory import RowSettings, fullest_moment
from infsample_rl.rollout.engine.cpu_decoder import ANGLES
from infsample_rl.rollout.engine.cuda_decode import HEAD_ROWS, bucket_of, whole_heads
from infsample_rl.rollout.engine.decode_step import LOGITS_AT_A_TIME
from infsample_rl.rollout.engine.decoder import drafts_tokens, is_compiled
from infsample_rl.rollout.engine.kv_cache import stored_dtype
from infsample_rl.rollout.engine.model_runner import PREFILL_TOKENS
from infsample_rl.rollout.engine.sampler import split_vocabulary
from infsample_rl.rollout.engine.vllm_engine import LEAST_BATCH
from infsample_rl.rollout.schedule.drafter import BYTES_PER_TOKEN, MOST_BYTES, OTHERS_BYTES
from infsample_rl.rollout.schedule.kv_budget import free_for_pool, num_pool_pages, rows_in
from infsample_rl.rollout.schedule.kv_pool import MOST_POOLS

Lines = dict[str, int]
ATTENTION_PARTS = 2 * 8  # of a row: SPLITS of paged_attention.py, which needs Triton, for its prompt and for itself
# torch allots 32 MiB on Hopper to each stream that multiplies: the main one and that of graph captures
CUBLAS_WORKSPACE = 2 * 32 * 2**20


def rollout_lines(config: Config, model: ModelOutline, device: Device) -> tuple[Lines, Lines]:
    """Bytes of a rollout worker where it computes, and, of one on a GPU, in host memory. ValueError for a KV budget
    that is too small."""
    weights = {"weights": weights_share(config, model)}
    pool = _pool(config, model, device, weights["weights"])
    if config.rollout.engine == "vllm":
        return weights | _predictor(config) | pool | {"vLLM's step": _vllm_step(config, model, device)}, {}
    adapters, host = _adapters(config, model)
    return weights | adapters | _predictor(config) | pool | _work(config, model, device), host


def weights_share(config: Config, model: ModelOutline) -> int:
    """Bytes of the weights in one process of a rollout worker."""
    return _item(config) * model.num_parameters // config.rollout.tensor_parallel


def pool_page_bytes(config: Config, model: ModelOutline) -> int:
    """Bytes of a page of the pool in one process of a rollout worker, scales included."""
    stored = stored_dtype(config.rollout.kv_dtype, getattr(torch, config.model.dtype))
    return model.kv.page_bytes(config.rollout.page_size, stored) // config.rollout.tensor_parallel


def pool_pages(config: Config, model: ModelOutline, free: int) -> int:
    """Pages of the pool, where `free` bytes are free after the weights; of a pool that takes them at least the fewest
    with which a run starts, so that a plan says what they need where they do not fit."""
    rollout, prompts = config.rollout, [config.data.max_prompt_tokens] * config.rollout.most_prompts
    page = pool_page_bytes(config, model)
    least = kv_pages(1, rollout.max_new_tokens, prompts[:1], rollout.page_size) * page
    free = free_for_pool(free, on_gpu=config.cluster.rollout_gpus > 0, sharers=config.cluster.rollout_workers)
    return num_pool_pages(rollout, page_bytes=page, prompts=prompts, free_bytes=max(free, least))


def parked_bytes(config: Config, model: ModelOutline, device: Device) -> int:
    """Most that the KV of preempted samples takes outside the pool, where half of what is free there is no less."""
    pages = pool_pages(config, model, device.usable_bytes - weights_share(config, model))
    return MOST_POOLS * pages * pool_page_bytes(config, model)


def prompt_pages(config: Config) -> int:
    """Pages that a budget counts for resident prompts, each of data.max_prompt_tokens."""
    return config.rollout.planned_prompts * -(-config.data.max_prompt_tokens // config.rollout.page_size)


def response_pages(config: Config) -> int:
    """Pages of one full response."""
    return -(-config.rollout.max_new_tokens // config.rollout.page_size)


def _pool(config: Config, model: ModelOutline, device: Device, weights: int) -> Lines:
    pages, size = pool_pages(config, model, device.usable_bytes - weights), pool_page_bytes(config, model)
    prompts = min(prompt_pages(config), pages)
    # one page is scratch
    return {"KV pool: responses": (pages - prompts + 1) * size, "KV pool: prompts": prompts * size}


def _vllm_step(config: Config, model: ModelOutline, device: Device) -> int:
    """The largest batch that vLLM is given: its activations, and logits with what they are drawn by."""
    hidden, query, kv, inner = model.widths
    rows, reach = most_rows(config, model, device), config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = max(LEAST_BATCH, reach + rows * config.rollout.page_size)
    activations = _item(config) * tokens * (3 * hidden + 2 * (query + kv) + 3 * inner) // config.rollout.tensor_parallel
    return activations + 4 * 4 * rows * model.architecture.vocab_size


def _predictor(config: Config) -> Lines:
    """The paper's length predictor, which is read whole, in float32 as it is kept; where it is no folder here its size
    is not known."""
    if config.rollout.predictor != "bert" or config.rollout.predictor_path is None:
        return {}
    files = list(Path(config.rollout.predictor_path).expanduser().glob("*.safetensors"))
    return {"length predictor": sum(file.stat().st_size for file in files)} if files else {}


def _item(config: Config) -> int:
    return getattr(torch, config.model.dtype).itemsize


def most_rows(config: Config, model: ModelOutline, device: Device) -> int:
    """Rows that decode at a time, at most: a row has a page from its second token on, and a sample of a step or of an
    evaluation."""
    pages = pool_pages(config, model, device.usable_bytes - weights_share(config, model))
    rows = rows_in(config.rollout, pages, [1])  # the shortest prompts leave room for most
    return bucket_of(config.most_samples, rows) if config.cluster.rollout_gpus > 0 else min(rows, config.most_samples)


def _work(config: Config, model: ModelOutline, device: Device) -> Lines:
    """What lies beside weights and pool at the fullest moment: a step's tensors and a prefill, and buckets that a link
    receives into."""
    rows = most_rows(config, model, device)
    on_gpu = config.cluster.rollout_gpus > 0
    drafts = drafts_tokens(config, model.architecture)
    queries = max(rows, min(MOST_QUERIES, (1 + MOST_DRAFTS) * rows)) if drafts else rows
    if on_gpu:
        lines = {
            "rows of a step": _rows_on_cuda(config, model, whole_heads(queries)),
            "cuBLAS workspaces": CUBLAS_WORKSPACE,
        }
        at_a_time = HEAD_ROWS
    else:
        lines = {"rows of a step": _rows_on_cpu(config, model, queries)}
        at_a_time = min(queries, max(8, LOGITS_AT_A_TIME // model.architecture.vocab_size))
    if drafts and not on_gpu:  # else they lie beside the GPU
        lines["drafted texts"] = _drafted_texts(config)
    lines["logits and drawing"] = _drawing(config, model, at_a_time, _prompts(config, rows))
    if not on_gpu and not is_compiled(config, model.architecture):  # attention's copies are gone when logits are there
        lines["logits and drawing"] = max(0, lines["logits and drawing"] - _gathered(config, model, rows))
    if choose_transport(config) in ("broadcast", "cuda_ipc"):
        lines["weight buckets"] = 2 * BUCKET_BYTES  # else they lie in Ray's object store
    return lines | {"prefill of a prompt": _prefill(config, model)}


def _drafted_texts(config: Config) -> int:
    """What drafts are found in: all that the run samples, as far as it is kept."""
    run, most = config.run, MOST_BYTES + OTHERS_BYTES
    if run.steps is None:
        return most
    samples = run.steps * config.samples_per_step
    if config.has_evaluations:
        held_out = sum(part.held_out is not None for part in config.data.parts.values())
        times = 2 + (run.steps // run.eval_every if run.eval_every else 0)  # before the first step, after the last
        samples += times * held_out * run.eval_prompts * run.eval_samples
    tokens = samples * (config.data.max_prompt_tokens + config.rollout.max_new_tokens)
    return min(most, 2 * BYTES_PER_TOKEN * tokens)  # a sample is among its prompt's, and among those of all


def _prompts(config: Config, rows: int) -> int:
    """Prompts that are resident together at most, in a step or an evaluation: each of them has a row."""
    asked = max(config.data.prompts_per_step, config.run.eval_prompts if config.has_evaluations else 0)
    return min(config.rollout.most_prompts, rows, asked)


def _tables(config: Config, rows: int) -> int:
    """Of RowBatch, and the host's copies."""
    prompts, pages = _prompts(config, rows), -(-config.data.max_prompt_tokens // config.rollout.page_size)
    return rows * (2 * 4 * response_pages(config) + 9 * 8 + 2 * 4) + prompts * (4 * pages + 12)


def _rows_on_cpu(config: Config, model: ModelOutline, rows: int) -> int:
    hidden, query, kv, inner = model.widths
    if is_compiled(config, model.architecture):
        workspace = 2 * hidden + max(hidden, query) + max(query + 2 * kv, inner)
        places, reach = ANGLES, config.data.max_prompt_tokens + config.rollout.max_new_tokens
        while places < reach:
            places *= 2
        return _tables(config, rows) + 4 * rows * (workspace + hidden) + 8 * model.kv.head_dim * places
    size = _item(config)
    prompts = 2 * kv * size * config.data.max_prompt_tokens
    kept = _tables(config, rows) + prompts + size * rows * (3 * hidden + 3 * inner + 2 * query + 2 * kv)
    return kept + _gathered(config, model, rows)


def _gathered(config: Config, model: ModelOutline, rows: int) -> int:
    """One layer's pages as a dense copy, and the mask."""
    size, tokens = _item(config), response_pages(config) * config.rollout.page_size
    return rows * tokens * (2 * model.widths[2] * size + size + 1)


def _rows_on_cuda(config: Config, model: ModelOutline, rows: int) -> int:
    """Tables, states and attention's parts of the graphs of training and of evaluation, with the layer's tensors, which
    graphs share."""
    (hidden, query, kv, inner), size, heads = model.widths, _item(config), model.architecture.num_attention_heads
    attention = 4 * (query + heads) * rows * ATTENTION_PARTS
    kept = _tables(config, rows) + attention + size * rows * hidden
    return 2 * kept + size * rows * (3 * hidden + 3 * inner + 2 * query + 2 * kv)


def _drawing(config: Config, model: ModelOutline, rows: int, prompts: int) -> int:
    """Logits of so many rows, their float32 probabilities, the noise, and the logits kept of the resident `prompts`."""
    vocab, size = model.architecture.vocab_size, 4 if config.model.lm_head_fp32 else _item(config)
    blocks, block = split_vocabulary(vocab)
    scaled = 4 if config.rollout.temperature != 1 and size < 4 else 0
    padded = 4 if blocks * block != vocab else 0
    noise = 8 * (blocks + block)  # float64, with its logarithms and what is added to them
    return rows * (vocab * (size + scaled + 4 + padded) + 4 * noise) + vocab * size * prompts + noise


def _prefill(config: Config, model: ModelOutline) -> int:
    """The last piece of the longest prompt: activations, and one layer's earlier keys and values as a dense copy."""
    on_gpu, longest = config.cluster.rollout_gpus > 0, config.data.max_prompt_tokens
    tokens, size = min(longest, PREFILL_TOKENS["cuda" if on_gpu else "cpu"]), _item(config)
    hidden, query, kv, inner = model.widths
    past = 2 * size * kv * (longest - tokens)
    if is_compiled(config, model.architecture) and not on_gpu:
        # query and keys before and after they are rotated, output, values
        attending = 2 * query + 2 * (query + kv) + 2 * kv
        return 4 * tokens * (2 * hidden + max(attending, hidden + 3 * inner)) + past
    settings = RowSettings(
        model=model,
        dtype=getattr(torch, config.model.dtype),
        learner=config.learner,
        masters=False,
        on_gpu=on_gpu,
        flex_attention=on_gpu,
        with_gradient=False,
    )
    return sum(fullest_moment(settings, [(max(1, tokens - 1), [1])]).values()) + past


def _adapters(config: Config, model: ModelOutline) -> tuple[Lines, Lines]:
    """With learner.lora_publish=adapters: what is received, and the base weights of the adapted layers, which lie in
    host memory."""
    if not config.learner.sends_adapters or config.cluster.colocate:
        return {}, {}
    size, shapes = _item(config), model.adapted(config)
    received, base = size * sum(model.adapter_sizes(config)), size * sum(shape.numel() for shape in shapes)
    if config.cluster.rollout_gpus > 0:
        return {"received adapters": received}, {"base weights of the adapted layers": base}
    return {"received adapters": received, "base weights of the adapted layers": base}, {}

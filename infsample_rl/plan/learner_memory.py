"""Memory of a learner rank: what it keeps from update to update, and what its fullest row adds.

The state is arithmetic over what the backends allocate (docs/learner.md); the row is traced (row_memory.py). Rows are
taken as full and as the second of an update, so that the gradients of all parameters are there. One rank in float32 on
the CPU has been measured; 16 bits, several ranks, DeepSpeed, offload and CUDA follow from the code and have not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from infsample_rl.config import Config
from infsample_rl.learner.deepspeed_config import BUCKET_ELEMENTS
from infsample_rl.model.packed_attention import takes_flex_attention
from infsample_rl.model.weight_slices import CHUNK_ELEMENTS
from infsample_rl.model.weight_sync.buckets import BUCKET_BYTES
from infsample_rl.model.weight_sync.transport import choose_transport
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.row_memory import RowGroups, RowSettings, fullest_moment

Lines = dict[str, int]
OF_UPDATES = ("gradients", "whole gradients", "gathered")  # how lines begin of what an update alone holds
# of torchao's AdamW8bit: values that share a float32 scale, the smallest tensor that is quantised
BLOCK, SMALLEST_8BIT = 256, 4096


def learner_lines(config: Config, model: ModelOutline) -> tuple[Lines, Lines]:
    """Bytes of one rank where it computes, and, of a rank on a GPU, in host memory."""
    device, host = _state(config, model)
    device |= _reference(config, model, host)
    beside = beside_steps(config, model, device)
    rows = (row_lines(config, model), _teacher_row(config, model))
    device |= max(rows, key=lambda lines: sum(lines.values())) | _buckets(config)
    device["loading, publishing or saving, beyond a step"] = beside - sum(device.values())
    return {name: size for name, size in device.items() if size > 0}, host


def resting_bytes(config: Config, model: ModelOutline | None = None) -> int:
    """Bytes that one rank holds between updates where it computes: no gradients, no row, nothing gathered."""
    model = model or ModelOutline.of(config)
    device, host = _state(config, model)
    device |= _reference(config, model, host)
    return sum(size for name, size in device.items() if not name.startswith(OF_UPDATES))


def row_groups(prompt_tokens: int, response_tokens: int, row_tokens: int, group_size: int, prompts: int) -> RowGroups:
    """The fullest row: prompts and responses of these lengths, the last response cut, until the row is full or no
    sample is left.

    row_groups(4, 10, 30, 2, 8) -> [(4, [10, 10]), (4, [2])]
    """
    groups: list[tuple[int, list[int]]] = []
    left = row_tokens
    while left > prompt_tokens and len(groups) < prompts:
        left -= prompt_tokens
        lengths: list[int] = []
        while left > 0 and len(lengths) < group_size:
            lengths.append(min(response_tokens, left))
            left -= lengths[-1]
        groups.append((prompt_tokens, lengths))
    return groups


def _state(config: Config, model: ModelOutline) -> tuple[Lines, Lines]:
    learner, size = config.learner, getattr(torch, config.model.dtype).itemsize
    trained = model.adapter_sizes(config) if learner.lora_rank > 0 else model.sizes
    count, frozen = sum(trained), model.num_parameters if learner.lora_rank > 0 else 0
    ranks = config.cluster.learner_ranks
    if learner.backend == "deepspeed":
        lines = _zero_state(config, count, frozen, size)
    elif ranks > 1:
        lines = _fsdp_state(config, model, trained, count, frozen, size)
    else:
        lines = {
            "weights": size * (frozen + count),
            "float32 masters": 0 if size == 4 else 4 * count,
            "gradients": 4 * count,
            "optimizer's moments": _moments(trained, learner.optimizer),
        }
    if not (learner.offload_optimizer and config.cluster.learner_gpus > 0):
        return lines, {}
    if ranks == 1 and learner.backend == "fsdp":
        kept = {name: lines.pop(name) for name in ("float32 masters", "gradients", "optimizer's moments")}
        return lines, kept | {"float32 masters": 4 * count}  # in float32 too they are copies, in host memory
    moved = {"float32 shards", "float32 masters", "optimizer's moments"}
    moved |= {"gradients"} if learner.backend == "fsdp" else set()
    return lines, {name: lines.pop(name) for name in list(lines) if name in moved}


def beside_steps(config: Config, model: ModelOutline, state: Lines) -> int:
    """The fullest moment of loading, publishing and saving, in which there are neither gradients nor a row. FSDP2 and
    ZeRO-3 read slices and have no more than a layer whole; the others have the whole model in float32 first."""
    learner, ranks, size = config.learner, config.cluster.learner_ranks, getattr(torch, config.model.dtype).itemsize
    kept = sum(bytes_ for name, bytes_ in state.items() if name in ("weights", "float32 shards", "float32 masters"))
    in_slices = ranks > 1 and (learner.backend == "fsdp" or learner.zero_stage == 3)
    if in_slices and not model.is_converted:
        loading = kept + 4 * min(CHUNK_ELEMENTS, max(model.sizes))
        if learner.backend == "deepspeed":
            loading += size * max(model.layer_parameters, model.root_parameters)
    else:
        loading = (4 if learner.lora_rank == 0 else size) * model.num_parameters + (kept if in_slices else 0)
    # a tensor is gathered, and lies in a piece of the weights or a file's buffer
    piece = 4 * max(model.sizes) + min(BUCKET_BYTES, size * model.num_parameters)
    leaving = kept + state.get("optimizer's moments", 0) + piece
    return max(loading, leaving if in_slices else 0)


def _moments(sizes: Iterable[int], optimizer: str) -> int:
    """AdamW's two moments; in 8 bits codes and a scale for each block, where a tensor has whole blocks and is not
    small."""
    if optimizer == "adamw":
        return 8 * sum(sizes)
    return sum(
        2 * (count + 4 * count // BLOCK) if count >= SMALLEST_8BIT and count % BLOCK == 0 else 8 * count
        for count in sizes
    )


def _fsdp_state(config: Config, model: ModelOutline, trained: list[int], count: int, frozen: int, size: int) -> Lines:
    """FSDP2: float32 shards of everything trained; what is gathered has the model's dtype (frozen weights keep
    theirs)."""
    shards = config.learner.shard_ranks or config.cluster.learner_ranks
    lines = {
        "float32 shards": (4 * count + size * frozen) // shards,
        "gradients": 4 * count // shards,
        "optimizer's moments": _moments(trained, config.learner.optimizer) // shards,
    }
    whole = model.num_parameters + (count if frozen else 0)
    if config.learner.grad_sync == "last_row":
        return lines | {"whole weights": size * whole, "whole gradients": 4 * count}
    in_layer = count // model.architecture.num_hidden_layers if frozen else model.layer_parameters
    return lines | {
        "gathered: two layers": 2 * size * (model.layer_parameters + (in_layer if frozen else 0)),
        "gathered: embeddings and head": size * model.root_parameters,
        "gradients of a layer before and in reduction": (size + 4) * in_layer,
    }


def _zero_state(config: Config, count: int, frozen: int, size: int) -> Lines:
    """DeepSpeed's stages, as in docs/learner.md."""
    ranks, stage = config.cluster.learner_ranks, config.learner.zero_stage
    return {
        "weights": size * (count + frozen) // (ranks if stage == 3 else 1),
        "gradients": 4 * count // (ranks if stage >= 2 else 1),
        "float32 masters": 4 * count // ranks,
        "optimizer's moments": 8 * count // ranks,
        "reduction bucket": 4 * min(BUCKET_ELEMENTS, count),
    }


def row_lines(config: Config, model: ModelOutline) -> Lines:
    """The fullest row of an update: prompts of data.max_prompt_tokens, responses of rollout.max_new_tokens."""
    sharded = config.cluster.learner_ranks > 1 or config.learner.backend == "deepspeed"
    on_gpu = config.cluster.learner_gpus > 0
    settings = replace(
        _row_settings(config, model, on_gpu=on_gpu),
        masters=config.model.dtype != "float32" and not sharded,
        adds_head_gradient=not sharded and not (config.learner.offload_optimizer and on_gpu),
    )
    whole_group = config.data.max_prompt_tokens + config.rollout.group_size * config.rollout.max_new_tokens
    in_passes = config.long_rows > 0 and whole_group > config.learner.max_tokens_per_micro_batch
    return fullest_moment(settings, learner_row(config), in_passes=in_passes)


def learner_row(config: Config) -> RowGroups:
    """The fullest row, or pass of a longer one, that an update of these settings may have."""
    prompts = -(-config.data.prompts_per_step // config.objective.mini_batches)
    lengths = (config.data.max_prompt_tokens, config.rollout.max_new_tokens)
    return row_groups(*lengths, config.learner.max_tokens_per_micro_batch, config.rollout.group_size, prompts)


def frozen_row(config: Config, model: ModelOutline, row: RowGroups, *, on_gpu: bool) -> Lines:
    """The fullest moment of a row of a reference or a teacher, which has no gradient."""
    return fullest_moment(replace(_row_settings(config, model, on_gpu=on_gpu), with_gradient=False), row)


def _row_settings(config: Config, model: ModelOutline, *, on_gpu: bool) -> RowSettings:
    dtype = getattr(torch, config.model.dtype)
    return RowSettings(
        model=model,
        dtype=dtype,
        learner=config.learner,
        masters=False,
        on_gpu=on_gpu,
        flex_attention=on_gpu and takes_flex_attention(model.kv.head_dim, dtype),
        head_fp32=config.model.lm_head_fp32,
        top_k=config.objective.teacher_top_k,
    )


def _reference(config: Config, model: ModelOutline, host: Lines) -> Lines:
    """The frozen copy of reference.placement=learner; with LoRA there is none."""
    if not _has_copy(config):
        return {}
    count, size = model.reference_of(config).num_parameters, getattr(torch, config.model.dtype).itemsize
    ranks = config.cluster.learner_ranks if config.learner.grad_sync == "every_row" else 1
    if config.reference.offload and config.cluster.learner_gpus > 0:
        host["reference"] = size * count // ranks
        return {}  # its layers are there one at a time, in its own pass, before there are activations
    return {"reference": size * count // ranks}


def _teacher_row(config: Config, model: ModelOutline) -> Lines:
    """The fullest row under a frozen copy that is another model, which may be larger than the one that is trained
    after it, and what is there of its weights for that time alone. Empty where it is the policy's own."""
    if not _has_copy(config) or (teacher := model.reference_of(config)) is model:
        return {}
    on_gpu, size = config.cluster.learner_gpus > 0, getattr(torch, config.model.dtype).itemsize
    lines = frozen_row(config, teacher, learner_row(config), on_gpu=on_gpu)
    is_sharded = config.cluster.learner_ranks > 1 and config.learner.grad_sync == "every_row"
    if is_sharded or (config.reference.offload and on_gpu):
        lines["reference: two layers"] = 2 * size * teacher.layer_parameters
        lines["reference: embeddings and head"] = size * teacher.root_parameters
    return lines


def _has_copy(config: Config) -> bool:
    """Whether a learner rank has a model beside the policy."""
    reads, on_learner = config.objective.reference_in_loss, config.reference.placement == "learner"
    return reads and on_learner and config.learner.lora_rank == 0


def _buckets(config: Config) -> Lines:
    """Buffers for weights on their way that live as long as the run; those of the object store are there between
    updates only."""
    return {"weight buckets": 2 * BUCKET_BYTES} if choose_transport(config) in ("broadcast", "cuda_ipc") else {}

"""Bytes that a step sends over the network or the bus, and the seconds that takes at the link's full speed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infsample_rl.config import Config
from infsample_rl.model.weight_sync.manifest import BUCKET_BYTES
from infsample_rl.model.weight_sync.transport import choose_transport
from infsample_rl.plan.devices import Device
from infsample_rl.plan.model_outline import ModelOutline


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """`num_bytes`: of one step, on the busiest link; `way`: in words."""

    what: str
    way: str
    num_bytes: int
    seconds: float


def step_traffic(config: Config, model: ModelOutline, device: Device) -> list[Traffic]:
    """Weights to the engines, and what the learner ranks exchange; nothing where nothing travels."""
    return [
        found for found in (_weights(config, model, device), _gradients(config, model, device)) if found.num_bytes > 0
    ]


def _weights(config: Config, model: ModelOutline, device: Device) -> Traffic:
    size, transport = getattr(torch, config.model.dtype).itemsize, choose_transport(config.cluster)
    adapters = config.learner.lora_rank > 0 and config.learner.lora_publish == "adapters"
    sent = size * (sum(model.adapter_sizes(config)) if adapters else model.num_parameters)
    is_shared = transport == "local" and config.cluster.learner_ranks == 1 and config.learner.lora_rank == 0
    sent = 0 if is_shared else sent
    way = (
        f"{transport}, {-(-sent // BUCKET_BYTES)} buckets of {BUCKET_BYTES // 2**20} MiB to "
        f"{config.cluster.rollout_workers} engines"
    )
    return Traffic(what="weights", way=way, num_bytes=sent, seconds=sent / device.link)


def _gradients(config: Config, model: ModelOutline, device: Device) -> Traffic:
    """Per rank: parameters gathered for forward and backward in the model's dtype, gradients reduced in float32, (S -
    1) / S of each."""
    learner, ranks = config.learner, config.cluster.learner_ranks
    size, shards = getattr(torch, config.model.dtype).itemsize, learner.shard_ranks or ranks
    trained = sum(model.adapter_sizes(config)) if learner.lora_rank > 0 else model.num_parameters
    if ranks == 1:
        return Traffic(what="gradients", way="one rank", num_bytes=0, seconds=0.0)
    waves = -(-num_rows(config) // ranks) * config.objective.epochs
    rounds = config.objective.updates_per_step if learner.grad_sync == "last_row" else waves
    gathers = 1 if learner.grad_sync == "last_row" else 2
    if learner.backend == "deepspeed":
        gathers = 2 if learner.zero_stage == 3 else 0
        rounds = waves if learner.zero_stage > 1 else config.objective.updates_per_step
    share = (shards - 1) / shards
    sent = int(rounds * share * (gathers * size * model.num_parameters + 4 * trained))
    if learner.backend == "deepspeed" and learner.zero_stage < 3:
        sent += int(config.objective.updates_per_step * share * size * trained)  # the stepped parameters
    if shards < ranks:
        sent += int(rounds * 2 * (ranks // shards - 1) / (ranks // shards) * 4 * trained / shards)
    way = f"{rounds} x (gather {gathers} times, reduce) over {shards} ranks" + (
        f", {ranks // shards} copies" if shards < ranks else ""
    )
    return Traffic(what="gradients and gathered weights", way=way, num_bytes=sent, seconds=sent / device.link)


def num_rows(config: Config) -> int:
    """Learner rows of a step in which every prompt and response is as long as it may be."""
    room = config.learner.max_tokens_per_micro_batch - config.data.max_prompt_tokens
    return config.data.prompts_per_step * -(-config.rollout.group_size // max(1, room // config.rollout.max_new_tokens))

"""How learner ranks meet, and how they share the policy."""

from __future__ import annotations

import datetime
from typing import cast

import torch
import torch.distributed as dist

from infsample_rl.config import Config
from infsample_rl.learner.backend import Backend
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.weight_slices import WeightSlices
from infsample_rl.model.weight_sync.store import SignedStore


def join_default_group(config: Config, store: SignedStore, rank: int, world_size: int, *, backend: str) -> None:
    """Make the default process group of the ranks that meet in this store."""
    meeting = store.plain if "nccl" in backend else cast(dist.Store, store)
    limit = datetime.timedelta(seconds=config.cluster.collective_timeout_s)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world_size, timeout=limit)


def join_ranks(config: Config, store: SignedStore, rank: int, world_size: int) -> dist.ProcessGroup:
    """Make the learner's default process group, and return another, in which the ranks tell each other what they could
    write.

    There they wait for one that writes, whose disk may be slower than any collective, as long as the driver waits for
    them.
    """
    backend = "gloo"
    if config.cluster.learner_gpus > 0:
        # The gradients of an offloaded optimizer have their norm taken in host memory.
        backend = "cpu:gloo,cuda:nccl" if config.learner.offload_optimizer else "nccl"
    join_default_group(config, store, rank, world_size, backend=backend)
    return dist.new_group(timeout=datetime.timedelta(seconds=config.cluster.progress_timeout_s), backend="gloo")


def build_backend(
    policy: PackedPolicy, config: Config, slices: WeightSlices | None, *, device: torch.device, world_size: int
) -> Backend:
    """The backend of the settings; `slices` as load_policy gives them. Imported where it is chosen: a machine may lack
    DeepSpeed."""
    learner, dtype = config.learner, getattr(torch, config.model.dtype)
    if learner.backend == "deepspeed":
        from infsample_rl.learner.deepspeed_backend import DeepSpeedBackend

        return DeepSpeedBackend(policy, learner, slices, device=device, dtype=dtype, world_size=world_size)
    if world_size == 1:
        from infsample_rl.learner.unsharded_backend import UnshardedBackend

        return UnshardedBackend(policy, learner, dtype=dtype)
    from infsample_rl.learner.fsdp_backend import FsdpBackend

    return FsdpBackend(policy, learner, slices, device=device, dtype=dtype, world_size=world_size)

"""How learner ranks meet."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from infsample_rl.config import Config


def join_ranks(config: Config, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
    """Make the default process group, and return another, in which the ranks tell each other what they could write.

    There they wait for one that writes, whose disk may be slower than any collective, as long as the driver waits for
    them.
    """
    backend = "gloo"
    if config.cluster.learner_gpus > 0:
        # The gradients of an offloaded optimizer have their norm taken in host memory.
        backend = "cpu:gloo,cuda:nccl" if config.learner.offload_optimizer else "nccl"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=config.cluster.collective_timeout_s),
    )
    return dist.new_group(timeout=datetime.timedelta(seconds=config.cluster.progress_timeout_s), backend="gloo")

"""Which way the weights go, and whether Ray's object store can hold them: pure."""

from __future__ import annotations

from infsample_rl.config import ClusterConfig, Config

_STORE_MARGIN = 0.1  # of the weights' bytes, beside _STORE_SPARE: for samples and rewards on their way
_STORE_SPARE = 64 * 2**20


def choose_transport(config: Config) -> str:
    """local, object_store, broadcast or cuda_ipc. ValueError for cuda_ipc without a GPU that learner and engine share.

    auto: local in one process (nothing travels), broadcast where learner and engines have whole GPUs of their own, else
    object_store.
    """
    cluster = config.cluster
    if config.shares_process:
        return "local"
    if cluster.weight_sync == "auto":
        by_nccl = broadcast_backend(cluster) == "nccl" and not config.takes_turns
        return "broadcast" if by_nccl else "object_store"
    if cluster.weight_sync == "cuda_ipc":
        _check_shared_gpu(cluster)
    return cluster.weight_sync


def broadcast_backend(cluster: ClusterConfig) -> str:
    """nccl where learner rank 0 and every engine have a GPU of their own, as NCCL demands; else gloo, through host
    memory."""
    return "nccl" if cluster.learner_gpus == 1 and cluster.rollout_gpus == 1 else "gloo"


def _check_shared_gpu(cluster: ClusterConfig) -> None:
    for name in ("learner_gpus", "rollout_gpus"):
        if getattr(cluster, name) == 0:
            raise ValueError(
                f"cluster.{name} must be > 0 with cluster.weight_sync=cuda_ipc, got 0; without a GPU: "
                "cluster.weight_sync=object_store"
            )
    together = cluster.learner_ranks * cluster.learner_gpus + cluster.rollout_workers * cluster.rollout_gpus
    if together > 1:
        raise ValueError(
            "cluster.weight_sync=cuda_ipc needs learner and engines on one GPU: cluster.learner_ranks x learner_gpus + "
            f"rollout_workers x rollout_gpus <= 1, got {cluster.learner_ranks} x {cluster.learner_gpus:g} + "
            f"{cluster.rollout_workers} x {cluster.rollout_gpus:g}; the nearest that works on more GPUs is "
            "cluster.weight_sync=broadcast"
        )


def check_object_store(num_bytes: int, capacity: int) -> None:
    """ValueError when the object store of learner rank 0's node, of `capacity` bytes, cannot hold one version of
    weights of `num_bytes` and what else is on its way."""
    needed = num_bytes + int(_STORE_MARGIN * num_bytes) + _STORE_SPARE
    if needed > capacity:
        raise ValueError(
            f"Ray's object store must have >= {needed:,} bytes for cluster.weight_sync=object_store (weights "
            f"{num_bytes:,}, and a tenth of them and {_STORE_SPARE:,} for samples), got {capacity:,}: run `ray start "
            f"--head --object-store-memory={needed}` and set cluster.address=auto, or take "
            "cluster.weight_sync=broadcast"
        )

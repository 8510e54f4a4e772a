"""Settings of processes and machines: how many workers, what each takes, which Ray cluster they run on. Standard
library only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from infsample_rl.config.fields import check_bounds, setting
from infsample_rl.config.pairs import check_pairs

# plan/devices.py has their figures
DEVICE_TYPES = ("a100-40gb", "a100-80gb", "h100", "h200", "b200", "l4", "l40s", "rtx3090", "rtx4090")


def _joins_a_cluster(config: Any) -> bool:
    return config.cluster.address is not None


@dataclass(kw_only=True)
class ClusterConfig:
    """Processes and what each takes."""

    address: str | None = setting(
        None, "host:port of a running Ray cluster (auto: the one here); none: a new local one"
    )
    allow_unauthenticated: bool = setting(
        False,
        "join a Ray cluster that asks for no token; whoever reaches its ports can run code on it",
        read_if=_joins_a_cluster,
    )
    wait_for_nodes_s: float = setting(
        0.0,
        "seconds to wait for nodes that are still to come; 0: refuse at once what does not fit",
        low=0,
        read_if=_joins_a_cluster,
    )
    device_type: str | None = setting(
        None, "GPU that `plan` reckons with; none: the one found here", choices=DEVICE_TYPES
    )
    colocate: bool = setting(
        False,
        "rollout and learner on one device for each learner rank: in one process, which at one rank has the weights "
        "once; with rollout.engine=vllm in two that take turns",
    )
    rollout_workers: int = setting(1, "rollout workers", low=1)
    rollout_gpus: float = setting(0.0, "GPUs of one rollout worker", low=0, high=1)
    learner_ranks: int = setting(1, "learner ranks the policy is sharded over", low=1)
    learner_gpus: float = setting(
        0.0, "GPUs of one learner rank: 0 or 1, at one rank also a part of one", low=0, high=1
    )
    reference_workers: int = setting(
        1, "reference workers, started for a KL term or a teacher", low=1, read_if=lambda c: c.has_reference_workers
    )
    reference_ranks: int = setting(
        1,
        "processes that the model of one reference worker is sharded over, where it is above one GPU",
        low=1,
        read_if=lambda c: c.has_reference_workers,
    )
    reference_gpus: float = setting(
        0.0, "GPUs of each process of a reference worker", low=0, high=1, read_if=lambda c: c.has_reference_workers
    )
    reward_workers: int = setting(1, "reward workers", low=1)
    reward_gpus: float = setting(
        0.0,
        "GPUs of one reward worker, for reward models",
        low=0,
        high=1,
        read_if=lambda c: any(function.name.startswith("model:") for function in c.reward.functions),
    )
    cpus_per_worker: float = setting(
        1.0, "CPUs Ray reserves for every worker, and threads of torch in it (one at least)", low=0
    )
    weight_sync: str = setting(
        "auto",
        "how weights reach the engines; auto: in place in one process, broadcast among GPUs, else through Ray's object "
        "store",
        choices=("auto", "object_store", "broadcast", "cuda_ipc"),
    )
    max_restarts: int = setting(
        8,
        "restarts of a lost worker, or of the learner, between two newly finished steps, after which the run stops",
        low=0,
    )
    progress_timeout_s: float = setting(
        600.0,
        "seconds without any progress after which what is waited for is taken as lost; half of it for a collective of "
        "ranks; 300 at least for a start",
        above=0,
    )

    def __post_init__(self) -> None:
        check_bounds("cluster", self)
        pairs = [
            (f"cluster.{role}_ranks>1", f"cluster.{role}_gpus=0|1", "ranks cannot share a GPU")
            for role in ("learner", "reference")
        ]
        check_pairs(pairs, cluster=self)
        if self.address is not None and not re.fullmatch(r"auto|[^/\s]+:\d+", self.address):
            raise ValueError(
                f"cluster.address must be auto or host:port, got {self.address!r}: Ray Client (ray://) cannot stream; "
                "submit the run as a Ray job"
            )

    @property
    def threads_per_worker(self) -> int:
        """CPU threads of torch in every worker."""
        return max(1, int(self.cpus_per_worker))

    @property
    def start_timeout_s(self) -> float:
        """Seconds the workers may take to start."""
        return max(300.0, self.progress_timeout_s)

    @property
    def collective_timeout_s(self) -> float:
        """Seconds a collective of ranks may take: it fails before who waits for the rank gives up."""
        return self.progress_timeout_s / 2

"""Settings of processes and machines: how many workers, what each takes, which Ray cluster they run on. Standard
library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from infsample_rl.config.fields import check_bounds, setting

# plan/devices.py has their figures
DEVICE_TYPES = ("a100-40gb", "a100-80gb", "h100", "h200", "b200", "l4", "l40s", "rtx3090", "rtx4090")


@dataclass(kw_only=True)
class ClusterConfig:
    """Processes and what each takes."""

    address: str | None = setting(
        None, "host:port of a running Ray cluster (auto: the one here); none: a new local one"
    )
    allow_unauthenticated: bool = setting(
        False, "join a Ray cluster that asks for no token; whoever reaches its ports can run code on it"
    )
    wait_for_nodes_s: float = setting(
        0.0, "seconds to wait for nodes that are still to come; 0: refuse at once what does not fit", low=0
    )
    device_type: str | None = setting(
        None, "GPU that `plan` reckons with; none: the one found here", choices=DEVICE_TYPES
    )
    dashboard: bool = setting(False, "start Ray's dashboard with a new local cluster")
    dashboard_host: str = setting("127.0.0.1", "address that dashboard listens on; 0.0.0.0: every interface")
    colocate: bool = setting(
        False, "rollout and learner in one process for each learner rank; at one rank they share the weights"
    )
    decode_steps_per_turn: int = setting(
        8, "running steps between two learner rows, in a process that does both", low=1
    )
    rollout_workers: int = setting(1, "rollout workers", low=1)
    rollout_gpus: float = setting(0.0, "GPUs of one rollout worker", low=0, high=1)
    rollout_cpus: float | None = setting(
        None, "CPUs Ray reserves for a rollout worker; none: cluster.cpus_per_worker", low=0
    )
    learner_ranks: int = setting(1, "learner ranks the policy is sharded over", low=1)
    learner_gpus: float = setting(
        0.0, "GPUs of one learner rank: 0 or 1, at one rank also a part of one", low=0, high=1
    )
    learner_cpus: float | None = setting(
        None, "CPUs Ray reserves for a learner rank; none: cluster.cpus_per_worker", low=0
    )
    reference_workers: int = setting(1, "reference workers, started only when a KL term is used", low=1)
    reference_gpus: float = setting(0.0, "GPUs of one reference worker", low=0, high=1)
    reference_cpus: float | None = setting(
        None, "CPUs Ray reserves for a reference worker; none: cluster.cpus_per_worker", low=0
    )
    reward_workers: int = setting(1, "reward workers", low=1)
    reward_gpus: float = setting(0.0, "GPUs of one reward worker, for reward models", low=0, high=1)
    reward_cpus: float | None = setting(
        None, "CPUs Ray reserves for a reward worker; none: cluster.cpus_per_worker", low=0
    )
    cpus_per_worker: float = setting(1.0, "CPUs Ray reserves for every worker", low=0)
    threads_per_worker: int = setting(1, "CPU threads of torch in every worker", low=1)
    weight_sync: str = setting(
        "auto",
        "how weights reach the engines; auto: in place when colocated, broadcast among GPUs, else through Ray's object "
        "store",
        choices=("auto", "object_store", "broadcast", "cuda_ipc"),
    )
    weight_checksum: bool = setting(False, "prove after every transfer that engines and learner hold the same weights")
    min_workers: int = setting(
        1, "rollout workers a step needs; with fewer left the run waits for their replacements", low=1
    )
    max_workers: int | None = setting(
        None, "rollout workers the run may grow to between steps where there is room; none: rollout_workers", low=1
    )
    max_restarts: int = setting(
        8,
        "restarts of a lost worker, or of the learner, between two newly finished steps, after which the run stops",
        low=0,
    )
    start_timeout_s: float = setting(300.0, "seconds the workers may take to start", above=0)
    progress_timeout_s: float = setting(
        600.0, "seconds without any progress after which what is waited for is taken as lost", above=0
    )
    collective_timeout_s: float = setting(300.0, "seconds a collective of the learner ranks may take", above=0)

    def __post_init__(self) -> None:
        check_bounds("cluster", self)
        if self.min_workers > self.rollout_workers:
            raise ValueError(
                f"cluster.min_workers must be <= cluster.rollout_workers = {self.rollout_workers}, got "
                f"{self.min_workers}"
            )
        if self.max_workers is not None and self.max_workers < self.rollout_workers:
            raise ValueError(
                f"cluster.max_workers must be >= cluster.rollout_workers = {self.rollout_workers}, got "
                f"{self.max_workers}"
            )
        if self.learner_gpus not in (0, 1) and self.learner_ranks > 1:
            raise ValueError(
                f"cluster.learner_gpus must be 0 or 1 with cluster.learner_ranks > 1, got {self.learner_gpus:g}: ranks "
                "cannot share a GPU; "
                "the nearest that works is 1"
            )
        if self.address is not None and not re.fullmatch(r"auto|[^/\s]+:\d+", self.address):
            raise ValueError(
                f"cluster.address must be auto or host:port, got {self.address!r}: Ray Client (ray://) cannot stream; "
                "submit the run as a Ray job"
            )

    @property
    def most_rollout_workers(self) -> int:
        """Rollout workers the run may have."""
        return self.max_workers or self.rollout_workers

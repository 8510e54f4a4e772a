"""Which processes a run has and what each takes: pure arithmetic, carried out by cluster.py."""

from __future__ import annotations

from dataclasses import dataclass

from infsample_rl.config import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroup:
    """`count` processes of one role. Example: WorkerGroup(role="rollout", count=2, cpus=1.0, gpus=0.0)"""

    role: str
    count: int
    cpus: float
    gpus: float


def worker_groups(config: Config) -> list[WorkerGroup]:
    """The processes of a run beside the driver: rollout is in the learner's when colocated, the reference's exist for a KL term only."""
    cluster = config.cluster
    groups = [
        WorkerGroup(role="reward", count=cluster.reward_workers, cpus=cluster.cpus_per_worker, gpus=cluster.reward_gpus),
        WorkerGroup(role="learner", count=cluster.learner_ranks, cpus=cluster.cpus_per_worker, gpus=cluster.learner_gpus),
    ]
    if not cluster.colocate:
        groups.insert(0, WorkerGroup(role="rollout", count=cluster.rollout_workers, cpus=cluster.cpus_per_worker, gpus=cluster.rollout_gpus))
    if config.objective.needs_reference and config.reference.placement == "workers":
        groups.append(WorkerGroup(role="reference", count=cluster.reference_workers, cpus=cluster.cpus_per_worker, gpus=cluster.reference_gpus))
    return groups


def total_cpus(config: Config) -> float:
    """CPUs the workers reserve together."""
    return sum(group.count * group.cpus for group in worker_groups(config))


def total_gpus(config: Config) -> float:
    """GPUs the workers reserve together."""
    return sum(group.count * group.gpus for group in worker_groups(config))


def reference_text(config: Config) -> str:
    """Where the reference of the KL terms is, in words."""
    reference, cluster = config.reference, config.cluster
    if not config.objective.needs_reference:
        return "none: no KL term is used"
    path = reference.path or "the policy as the run starts"
    if reference.placement == "workers":
        return f"{path}, in {cluster.reference_workers} reference worker{'s' if cluster.reference_workers > 1 else ''}"
    if config.learner.lora_rank > 0:
        return "on the learner ranks: the policy without its adapters"
    is_sharded = cluster.learner_ranks > 1 and config.learner.grad_sync == "every_row"
    place = "in host memory between uses" if reference.offload and cluster.learner_gpus > 0 else "beside the policy"
    return f"{path}, on the learner ranks: {'sharded over them' if is_sharded else 'whole on each'}, {place}"


def check_gpus(config: Config, available: float) -> None:
    """Raise ValueError when the workers ask for more GPUs than there are, naming each wish and what to set."""
    wanted = total_gpus(config)
    if wanted > available:
        wishes = [f"cluster.{group.role}_gpus={group.gpus:g} x {group.count}" for group in worker_groups(config) if group.gpus > 0]
        zeros = " ".join(f"cluster.{group.role}_gpus=0" for group in worker_groups(config) if group.gpus > 0)
        raise ValueError(f"{' + '.join(wishes)} = {wanted:g} GPUs, but there are {available:g}; without a GPU: {zeros}")

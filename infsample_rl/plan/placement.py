"""Which processes a run has, what each takes, and which nodes would take them: pure arithmetic.

Ray decides where a worker goes; the plan says beforehand whether that can work at all, and what is missing if not.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infsample_rl.config import Config

SMALLEST_CPUS = 0.001  # of a worker that asks for nothing: Ray reserves no empty bundle
_KINDS = {"rollout": "worker", "learner": "rank", "reference": "worker", "reward": "worker"}  # of a role's processes

Worker = tuple[str, int]  # role and index
Seat = tuple[Worker, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroup:
    """`count` processes of one role; `ranks` of them, next to each other, are one worker. Example:
    WorkerGroup(role="rollout", count=2, cpus=1.0, gpus=0.0)"""

    role: str
    count: int
    cpus: float
    gpus: float
    ranks: int = 1

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for one of them: {"CPU": 1.0, "GPU": 1.0}"""
        bundle = {"CPU": self.cpus, "GPU": self.gpus}
        return {name: amount for name, amount in bundle.items() if amount > 0} or {"CPU": SMALLEST_CPUS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Workers that are reserved together, all or none, by one of Ray's strategies: PACK, STRICT_PACK, SPREAD. Those of
    a seat share a bundle, and with it a GPU."""

    name: str
    strategy: str
    seats: list[Seat]

    @property
    def workers(self) -> list[Worker]:
        """Of all seats."""
        return [worker for seat in self.seats for worker in seat]


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine: what is free on it, and what it has in all. Example: Node(name="10.0.0.7", cpus=8, gpus=0.5,
    all_cpus=16, all_gpus=2)"""

    name: str
    cpus: float
    gpus: float
    all_cpus: float
    all_gpus: float

    def holds(self, group: WorkerGroup) -> bool:
        """Whether one more worker of the group fits. A GPU is whole or parts of one: 0.5 + 0.5 free may be one half on
        each of two."""
        whole = int(self.gpus + 1e-6)
        gpus = whole >= group.gpus or (group.gpus < 1 and self.gpus - whole >= group.gpus - 1e-6)
        return gpus and self.cpus >= group.cpus - 1e-6

    def less(self, group: WorkerGroup) -> Node:
        """The node when one worker of the group has been put on it."""
        return dataclasses.replace(self, cpus=round(self.cpus - group.cpus, 4), gpus=round(self.gpus - group.gpus, 4))

    def empty(self) -> Node:
        """The node without anybody's work on it."""
        return dataclasses.replace(self, cpus=self.all_cpus, gpus=self.all_gpus)


def worker_groups(config: Config) -> list[WorkerGroup]:
    """The processes of a run beside the driver: rollout may be in the learner's, the reference's exist for a KL term
    only. Two that take turns on a device have half of it each, in Ray's books."""
    cluster, part = config.cluster, 0.5 if config.takes_turns else 1.0

    def group(role: str, count: int, gpus: float, ranks: int = 1, parts: int = 1) -> WorkerGroup:
        cpus = parts * cluster.cpus_per_worker
        return WorkerGroup(role=role, count=count, cpus=cpus, gpus=parts * gpus, ranks=ranks)

    groups = [
        group("reward", cluster.reward_workers, cluster.reward_gpus),
        group("learner", cluster.learner_ranks, part * cluster.learner_gpus),
    ]
    if not config.shares_process:
        parts = config.rollout.tensor_parallel  # processes of one worker, which vLLM starts
        groups.insert(0, group("rollout", cluster.rollout_workers, part * cluster.rollout_gpus, parts=parts))
    if config.objective.needs_reference and config.reference.placement == "workers":
        count = cluster.reference_workers * cluster.reference_ranks
        groups.append(group("reference", count, cluster.reference_gpus, cluster.reference_ranks))
    return groups


def reservations(config: Config) -> list[Reservation]:
    """What Ray is asked to reserve, in that order: ranks on few nodes, since they meet in every row, the others
    over many. With cluster.weight_sync=cuda_ipc learner and engines share a GPU: one reservation on one node. A
    learner rank and an engine that take turns have one seat."""
    groups = {group.role: group for group in worker_groups(config)}
    seats: dict[str, list[Seat]] = {
        role: [((role, index),) for index in range(group.count)] for role, group in groups.items()
    }
    shares_gpu = config.cluster.weight_sync == "cuda_ipc"
    if shares_gpu:
        seats["learner"] += seats.pop("rollout")
    elif config.takes_turns:
        seats["learner"] = [one + other for one, other in zip(seats["learner"], seats.pop("rollout"), strict=True)]
    found = [Reservation(name="learner", strategy="STRICT_PACK" if shares_gpu else "PACK", seats=seats["learner"])]
    for role in (role for role in ("reference", "rollout", "reward") if role in seats):
        strategy = "PACK" if groups[role].ranks > 1 else "SPREAD"
        found.append(Reservation(name=role, strategy=strategy, seats=seats[role]))
    return found


def bundle_of(seat: Seat, groups: dict[str, WorkerGroup]) -> dict[str, float]:
    """What Ray reserves for those of a seat together."""
    bundles = [groups[role].bundle for role, _ in seat]
    names = {name for bundle in bundles for name in bundle}
    return {name: sum(bundle.get(name, 0) for bundle in bundles) for name in sorted(names)}


def total_cpus(config: Config) -> float:
    """CPUs the workers reserve together."""
    return sum(group.count * group.bundle.get("CPU", 0) for group in worker_groups(config))


def local_cpus(config: Config) -> int:
    """CPUs of a Ray node that is started here for this run alone: reservations, not cores, so as many as its workers
    ask for."""
    return max(os.cpu_count() or 1, int(total_cpus(config)) + 1)


def total_gpus(config: Config) -> float:
    """GPUs the workers reserve together."""
    return sum(group.count * group.gpus for group in worker_groups(config))


def plan(config: Config, nodes: Sequence[Node]) -> dict[Worker, int]:
    """Worker -> index of the node that would take it, as Ray's strategies would place them; a worker without a place is
    left out."""
    groups, free, places = {group.role: group for group in worker_groups(config)}, list(nodes), dict[Worker, int]()
    for reservation in reservations(config):
        place_all = _spread if reservation.strategy == "SPREAD" else _packed
        placed = place_all(reservation, groups, free)
        for (role, _), place in placed.items():
            free[place] = free[place].less(groups[role])
        places |= placed
    return places


def _packed(reservation: Reservation, groups: dict[str, WorkerGroup], free: Sequence[Node]) -> dict[Worker, int]:
    """Fill the node that holds most of the workers, then the next; with STRICT_PACK only one."""
    left, taken, places = list(reservation.workers), set[int](), dict[Worker, int]()
    while left:
        on_node = {index: _fill(node, left, groups) for index, node in enumerate(free) if index not in taken}
        best = max(on_node, key=lambda index: (len(on_node[index]), -free[index].gpus), default=None)
        if best is None or not on_node[best]:
            break
        taken.add(best)
        places |= dict.fromkeys(on_node[best], best)
        left = [worker for worker in left if worker not in places]
        if reservation.strategy == "STRICT_PACK":
            break
    return places


def _fill(node: Node, workers: list[Worker], groups: dict[str, WorkerGroup]) -> list[Worker]:
    held = []
    for worker in workers:
        if node.holds(groups[worker[0]]):
            node = node.less(groups[worker[0]])
            held.append(worker)
    return held


def _spread(reservation: Reservation, groups: dict[str, WorkerGroup], free: Sequence[Node]) -> dict[Worker, int]:
    """Each worker to the node with the fewest of them, among equals to the one with most left."""
    free, places = list(free), dict[Worker, int]()
    for worker in reservation.workers:
        group, load = groups[worker[0]], Counter(places.values())
        fitting = [index for index, node in enumerate(free) if node.holds(group)]
        if fitting:
            place = min(
                fitting, key=lambda index: (load[index], -free[index].gpus if group.gpus else 0, -free[index].cpus)
            )
            free[place] = free[place].less(group)
            places[worker] = place
    return places


def refusal(config: Config, nodes: Sequence[Node]) -> str | None:
    """Why a run cannot be placed on these nodes, in one line: what it wants, what is there, what is missing, what to
    set; none if it can."""
    groups = worker_groups(config)
    places = Counter(role for role, _ in plan(config, nodes))
    missing = [group for group in groups if places[group.role] < group.count]
    if not missing:
        return None
    wanted = " + ".join(_group_text(group, group.count) for group in groups)
    absent = ", ".join(_group_text(group, group.count - places[group.role]) for group in missing)
    fewer = _fewer(config, nodes, places)
    roles = [group.role for group in groups if group.gpus > 0]
    if config.shares_process and "learner" in roles:  # rollout is in its processes, and has its setting
        roles.insert(0, "rollout")
    without = [f"cluster.{role}_gpus=0" for role in roles]
    ways = []
    if _fits(config, [node.empty() for node in nodes]):
        ways.append("it fits once other work on these nodes has ended")
    if fewer:
        ways.append(f"what fits: {fewer}")
    if total_gpus(config) > sum(node.gpus for node in nodes):
        ways.append(f"without a GPU: {' '.join(without)}")
    if not ways:
        sizes = [f"cluster.{group.role}_gpus, " for group in missing if group.gpus > 0]
        ways.append(f"what one takes is set by {''.join(sizes)}cluster.cpus_per_worker")
    have = _amounts(sum(node.cpus for node in nodes), sum(node.gpus for node in nodes))
    return (
        f"{wanted} want {_amounts(total_cpus(config), total_gpus(config))}, but there are {have} free"
        f"{nodes_text(nodes)}; no place for {absent}; {'; '.join(ways)}"
    )


def _fits(config: Config, nodes: Sequence[Node]) -> bool:
    return len(plan(config, nodes)) == sum(group.count for group in worker_groups(config))


def _fewer(config: Config, nodes: Sequence[Node], places: Counter[str]) -> str | None:
    """The setting of one role, of rollout workers where possible, with which the whole run fits."""
    names = {"learner": ("learner_ranks", "rollout_workers")} if config.cluster.colocate else {}
    for role, kind in _KINDS.items():
        setting = f"{role}_{kind}s"
        for count in range(min(places[role], getattr(config.cluster, setting) - 1), 0, -1):
            counts: dict[str, Any] = dict.fromkeys(names.get(role, (setting,)), count)
            try:
                smaller = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, **counts))
            except ValueError:  # other settings do not go with that many
                continue
            if _fits(smaller, nodes):
                return " ".join(f"cluster.{name}={count}" for name in counts)
    return None


def nodes_text(nodes: Sequence[Node]) -> str:
    """ " (10.0.0.1: 4 of 16 CPUs, 2 of 8 GPUs; 3 nodes like 10.0.0.2: ...)" """
    alike: dict[str, list[str]] = {}
    for node in nodes:
        text = f"{node.cpus:g} of {node.all_cpus:g} CPUs" + (
            f", {node.gpus:g} of {node.all_gpus:g} GPUs" if node.all_gpus else ""
        )
        alike.setdefault(text, []).append(node.name)
    parts = [
        f"{names[0] if len(names) == 1 else f'{len(names)} nodes like {names[0]}'}: {text}"
        for text, names in alike.items()
    ]
    return f" ({'; '.join(parts)})" if parts else ""


def layout_table(config: Config, nodes: Sequence[Node], places: dict[Worker, int]) -> str:
    """Lines of node, what this run takes of its CPUs and GPUs, and who sits there; nodes alike share a line."""
    groups, alike = {group.role: group for group in worker_groups(config)}, dict[Any, list[str]]()
    for index, node in enumerate(nodes):
        counts = Counter(role for (role, _), place in places.items() if place == index)
        cpus, gpus = (
            sum(count * getattr(groups[role], what) for role, count in counts.items()) for what in ("cpus", "gpus")
        )
        taken = (f"{cpus:g} of {node.all_cpus:g}", f"{gpus:g} of {node.all_gpus:g}")
        who = ", ".join(_count_text(role, counts[role]) for role in _KINDS if counts[role]) or "-"
        alike.setdefault((*taken, who), []).append(node.name)
    rows = [("node", "CPUs", "GPUs", "workers")]
    rows += [
        (names[0] if len(names) == 1 else f"{len(names)} nodes like {names[0]}", *row) for row, names in alike.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "placement\n" + "\n".join(
        "  " + "  ".join([*(f"{row[c]:<{widths[c]}}" for c in range(3)), row[3]]) for row in rows
    )


def _group_text(group: WorkerGroup, count: int) -> str:
    each = " each" if count > 1 else ""
    return f"{_count_text(group.role, count)} ({_amounts(group.cpus, group.gpus)}{each})"


def _count_text(role: str, count: int) -> str:
    return f"{count} {role} {_KINDS[role]}{'s' if count > 1 else ''}"


def _amounts(cpus: float, gpus: float) -> str:
    text = f"{cpus:g} CPU{'' if cpus == 1 else 's'}"
    return text + (f" and {gpus:g} GPU{'' if gpus == 1 else 's'}" if gpus else "")


def reference_text(config: Config) -> str:
    """Where the reference of the KL terms, or the teacher, is, in words."""
    reference, cluster = config.reference, config.cluster
    if not config.objective.needs_reference:
        return "none: no KL term and no teacher is used"
    path = reference.path or "the policy as the run starts"
    if reference.placement == "workers":
        sharded = f", each sharded over {cluster.reference_ranks} processes" if cluster.reference_ranks > 1 else ""
        workers = f"{cluster.reference_workers} reference worker{'s' if cluster.reference_workers > 1 else ''}"
        return f"{path}, in {workers}{sharded}"
    if config.learner.lora_rank > 0:
        return "on the learner ranks: the policy without its adapters"
    is_sharded = cluster.learner_ranks > 1 and config.learner.grad_sync == "every_row"
    place = "in host memory between uses" if reference.offload and cluster.learner_gpus > 0 else "beside the policy"
    return f"{path}, on the learner ranks: {'sharded over them' if is_sharded else 'whole on each'}, {place}"

"""A run's place in a Ray cluster: joined, reserved by placement groups, proven to see the run's files."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from infsample_rl.cluster import shared_files
from infsample_rl.cluster.calls import Patience
from infsample_rl.cluster.connection import RayProcesses, connect
from infsample_rl.cluster.interruption import SLICE_S, Interruption
from infsample_rl.cluster.local_ray import forked_python, forks
from infsample_rl.cluster.rollout_interpreter import DRIVERS_PYTHON, rollout_interpreter
from infsample_rl.cluster.worker_environment import allocator_environment
from infsample_rl.config import Config
from infsample_rl.observe.files import nearest_existing
from infsample_rl.plan.placement import (
    Node,
    Reservation,
    Worker,
    bundle_of,
    layout_table,
    nodes_text,
    refusal,
    reservations,
    worker_groups,
)

POLL_S = 0.1
NOTE_EVERY_S = 10.0  # how often a wait is said again
SETTLE_S = 5.0  # how long it may take until Ray gives back what a run that has just ended held

HOW_TO_WAIT = "; nodes that are still to come (an autoscaler's too) are waited for with cluster.wait_for_nodes_s=600"

Bundle = tuple[PlacementGroup, int]


class Session:
    """Joins or starts Ray, reserves the places of every role together, and says where a worker is."""

    def __init__(self, config: Config, note: Callable[[str], None], interruption: Interruption):
        self._config, self._note, self._interruption = config, note, interruption
        self._groups = {group.role: group for group in worker_groups(config)}
        self._bundles: dict[Worker, Bundle] = {}
        self._proven: set[str] = set()  # nodes that see the driver's run folder

    def open(self) -> None:
        """Connect, reserve, print the layout, have every node prove what it sees.

        ValueError, before any worker starts, for a cluster that cannot be joined or does not hold the run, and for a
        node with other files; Terminated after SIGTERM, or when Ray itself is gone.
        """
        connect(self._config, self._note, self._interruption)
        self._interruption.end_when(RayProcesses().failure)
        self._reserve()
        nodes, places = _nodes(), {worker: self.node_of(*worker) for worker in self._bundles}
        index = {node_id: position for position, node_id in enumerate(nodes)}
        shown = {worker: index[node_id] for worker, node_id in places.items() if node_id in index}
        if self._config.cluster.address is not None:  # else all are on this machine
            self._note(layout_table(self._config, list(nodes.values()), shown))
        self.check_new_nodes()

    def options(self, role: str, index: int) -> dict[str, Any]:
        """Options of the actor of worker `index` of a role: what it takes, and the bundle it takes it from."""
        return self._options(role, index * self._groups[role].ranks)

    def options_of_ranks(self, role: str, index: int) -> list[dict[str, Any]]:
        """Of the worker's ranks beside the first."""
        ranks = self._groups[role].ranks
        return [self._options(role, index * ranks + rank) for rank in range(1, ranks)]

    def _options(self, role: str, place: int) -> dict[str, Any]:
        group, (reservation, bundle) = self._groups[role], self._bundles[role, place]
        strategy = PlacementGroupSchedulingStrategy(placement_group=reservation, placement_group_bundle_index=bundle)
        variables = allocator_environment(role, group.gpus, samples=self._config.shares_process)
        python = rollout_interpreter(self._config) if role == "rollout" else None
        if python is not None:
            python = shlex.quote(python)  # Ray makes it part of a shell's command
            variables = variables | {DRIVERS_PYTHON: sys.executable}
        elif forks(group):
            python = forked_python()
        return {
            "num_cpus": group.cpus,
            "num_gpus": group.gpus,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": variables} | ({} if python is None else {"py_executable": python}),
        }

    def node_of(self, role: str, index: int) -> str | None:
        """Ray's id of the node that holds a worker's place; none while it has none."""
        group, bundle = self._bundles[role, index]
        return placement_group_table(group).get("bundles_to_node_id", {}).get(bundle) or None

    def has_place(self, role: str, index: int) -> bool:
        """Whether a node that is there holds a worker's place."""
        return self.node_of(role, index) in {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def check_new_nodes(self) -> bool:
        """Whether every worker has a place; new nodes prove what they see. ValueError for other files there."""
        if self._config.cluster.address is None:
            return True  # a local cluster is this machine
        nodes = {self.node_of(*worker) for worker in self._bundles}
        new = sorted(node for node in nodes if node is not None and node not in self._proven)
        if new and (problems := self._check_files(new)):
            raise ValueError(
                f"every node must see the driver's run folder, model and data: {'; '.join(problems)}; put them on a "
                "file system that all nodes mount at the same path"
            )
        self._proven |= set(new)
        return None not in nodes

    def object_store_bytes(self) -> int:
        """Capacity of the smallest object store among the nodes that hold workers."""
        used = {self.node_of(*worker) for worker in self._bundles}
        sizes = [
            node["Resources"].get("object_store_memory", 0)
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] in used
        ]
        return int(min(sizes, default=0))

    def _reserve(self) -> None:
        """Ask for all reservations; wait as long as nodes may still come, saying what is missing, else ValueError."""
        wanted, asked = reservations(self._config), dict[str, PlacementGroup]()
        for item in wanted:
            bundles = [bundle_of(seat, self._groups) for seat in item.seats]
            name = f"{self._config.run.name}: {item.name}"
            asked[item.name] = placement_group(bundles, strategy=item.strategy, name=name)
        started, noted, wait_s = time.monotonic(), -NOTE_EVERY_S, self._config.cluster.wait_for_nodes_s
        how_to_wait = "" if self._config.cluster.address is None else HOW_TO_WAIT
        while True:
            tables = {name: placement_group_table(group) for name, group in asked.items()}
            pending = [table["stats"]["scheduling_state"] for table in tables.values() if table["state"] != "CREATED"]
            if not pending:
                break
            waited = time.monotonic() - started
            limit = wait_s or (0.0 if "INFEASIBLE" in pending else SETTLE_S)
            if waited >= limit:
                raise ValueError(self._why(wanted, tables) + ("" if wait_s else how_to_wait))
            if wait_s and waited - noted >= NOTE_EVERY_S:
                noted = waited
                self._note(f"waiting for nodes, {waited:.0f} of {wait_s:g} s: {self._why(wanted, tables)}")
            self._interruption.sleep(POLL_S)
        for item in wanted:
            self._bundles |= _claim(item, asked[item.name], tables[item.name]["bundles_to_node_id"])

    def _why(self, wanted: list[Reservation], tables: dict[str, Any]) -> str:
        """What is wanted, there and missing; what this run has already been given counts as free."""
        nodes = _nodes()
        for item in wanted:
            for bundle, node_id in tables[item.name]["bundles_to_node_id"].items():
                if node_id in nodes:
                    nodes[node_id] = _given_back(nodes[node_id], bundle_of(item.seats[bundle], self._groups))
        pending = " and ".join(item.name for item in wanted if tables[item.name]["state"] != "CREATED")
        there = list(nodes.values())
        no_place = f"Ray finds no place for all of {pending} on the nodes there are{nodes_text(there)}"
        return refusal(self._config, there) or no_place

    def _check_files(self, node_ids: list[str]) -> list[str]:
        """Let nodes prove that they see the driver's files: what they do not see, a text for each such node."""
        folder, nodes = nearest_existing(Path(self._config.run.dir or ".")), _nodes()
        token, files = shared_files.offer_token(folder), shared_files.needed_files(self._config)
        prove, proofs = ray.remote(num_cpus=0)(shared_files.prove), {}
        for node_id in node_ids:
            there = NodeAffinitySchedulingStrategy(node_id, soft=False)
            proofs[prove.options(scheduling_strategy=there).remote(str(folder), token, node_id, files)] = node_id
        names = {node_id: nodes[node_id].name if node_id in nodes else node_id for node_id in node_ids}
        try:
            self._wait_for_proofs({proof: names[node_id] for proof, node_id in proofs.items()})
            found = {node_id: _result(proof) for proof, node_id in proofs.items()}
        finally:
            shared_files.end_check(folder, token)
        return [f"node {names[node]}: {', '.join(missing)}" for node, missing in found.items() if missing]

    def _wait_for_proofs(self, proofs: dict[ray.ObjectRef, str]) -> None:
        patience, pending, limit = Patience(self._note), list(proofs), self._config.cluster.start_timeout_s
        while pending and patience.idle_s < limit:
            self._interruption.check()
            patience.say(f"nodes to prove what they see: {', '.join(proofs[proof] for proof in pending)}")
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=SLICE_S)


def _claim(reservation: Reservation, group: PlacementGroup, node_ids: dict[int, str]) -> dict[Worker, Bundle]:
    """Worker -> bundle. Learner ranks are numbered node by node, so that neighbours (learner.shard_ranks) share one."""
    order = list(range(len(reservation.seats)))
    if reservation.strategy == "PACK":
        first = {node_id: bundle for bundle, node_id in reversed(node_ids.items())}
        order.sort(key=lambda bundle: (first[node_ids[bundle]], bundle))
    return {worker: (group, bundle) for seat, bundle in zip(reservation.seats, order, strict=True) for worker in seat}


def _nodes() -> dict[str, Node]:
    """Ray's id -> node, of those alive; two on one machine are told apart by their ids."""
    free, alive = available_resources_per_node(), [node for node in ray.nodes() if node["Alive"]]
    hosts, found = Counter(node["NodeManagerAddress"] for node in alive), {}
    for node in alive:
        node_id, host, all_of_it = node["NodeID"], node["NodeManagerAddress"], node["Resources"]
        found[node_id] = Node(
            name=host if hosts[host] == 1 else f"{host} ({node_id[:8]})",
            cpus=free.get(node_id, {}).get("CPU", 0.0),
            gpus=free.get(node_id, {}).get("GPU", 0.0),
            all_cpus=all_of_it.get("CPU", 0.0),
            all_gpus=all_of_it.get("GPU", 0.0),
        )
    return found


def _given_back(node: Node, bundle: dict[str, float]) -> Node:
    cpus, gpus = node.cpus + bundle.get("CPU", 0), node.gpus + bundle.get("GPU", 0)
    return dataclasses.replace(node, cpus=min(cpus, node.all_cpus), gpus=min(gpus, node.all_gpus))


def _result(proof: ray.ObjectRef) -> list[str]:
    """What a node said, or why it could not."""
    try:
        return ray.get(proof, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return ["it started no process within cluster.progress_timeout_s"]
    except ray.exceptions.RayError as error:
        return [f"it cannot run this package ({str(error).strip().splitlines()[-1]})"]

"""Learner ranks as processes: forks of one that has imported what they need, once for a whole run of tests."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from infsample_rl.config import Config
from infsample_rl.learner.worker import LearnerWorker
from infsample_rl.model.packing import pack_row
from infsample_rl.model.weight_sync.store import StoreAddress
from infsample_rl.types import WeightManifest
from tests.forks import FORKS, start_fork


@dataclass
class Scenario:
    """A worker's life. A call is (method, arguments): a tuple or dict for all ranks, or a list of one for each; a rank
    with None skips it.

    Methods beside the worker's: found, what setup() returned; gradients, parameters, states, full_parameters;
    write_file and wait_for_file (path,); die_in_next_backward; failing_save (folder,); slow_save (folder, seconds).
    """

    config: Config
    calls: list[tuple[str, Any]]
    total_steps: int = 10
    checkpoint: str | None = None
    results: list[Any] = field(default_factory=list)


def gradients(worker: LearnerWorker) -> dict[str, torch.Tensor]:
    """The full gradient of every parameter, summed over rows and ranks."""
    backend = worker.backend
    if worker.config.learner.grad_sync == "last_row":
        backend.reduce_with_next_backward()
        row = pack_row([(np.zeros(1, np.int32), [np.zeros(1, np.int32)])], worker.device)
        backend.backward(backend.forward(row, 1.0)[0].sum() * 0.0)
    return {name: whole(parameter.grad) for name, parameter in backend.masters.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, gathered from the ranks."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def parameters(worker: LearnerWorker) -> dict[str, torch.Tensor]:
    """The full float32 masters."""
    return {key.removesuffix("/master"): value.clone() for key, value in worker.backend.training_states(["master"])}


def states(worker: LearnerWorker) -> dict[str, dict[str, torch.Tensor]]:
    """The full float32 masters and moments."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in worker.backend.training_states():
        name, _, kind = key.rpartition("/")
        found.setdefault(name, {})[kind] = value.clone()
    return found


def full_parameters(worker: LearnerWorker) -> dict[str, torch.Tensor]:
    """What is published."""
    return {name: tensor.clone() for name, tensor in worker.backend.full_parameters()}


def write_file(worker: LearnerWorker, path: str) -> None:
    """Say to the other ranks that this one came so far."""
    Path(path).touch()


def wait_for_file(worker: LearnerWorker, path: str, timeout_s: float = 30.0) -> None:
    """Wait until another rank came so far."""
    deadline = time.monotonic() + timeout_s
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"nobody wrote {path} within {timeout_s:g} s")
        time.sleep(0.02)


def die_in_next_backward(worker: LearnerWorker) -> None:
    """As when the system kills the process for its memory."""
    worker.policy.lm.model.layers[0].mlp.register_full_backward_pre_hook(
        lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    )


def export_weights(worker: LearnerWorker, version: int) -> tuple[WeightManifest, list[np.ndarray]] | None:
    """Manifest and copies of the buckets on rank 0."""
    manifest, buckets = worker.publisher.export(version)
    kept = [bucket.copy() for bucket in buckets]
    return (manifest, kept) if worker.rank == 0 else None


def failing_save(worker: LearnerWorker, folder: str) -> str:
    """What a save that fails says."""
    try:
        worker.save(folder)
    except RuntimeError as error:
        return str(error)
    return "it did not fail"


def slow_save(worker: LearnerWorker, folder: str, seconds: float) -> None:
    """A save to a disk that takes rank 0 so long."""
    write = worker.tokenizer.save_pretrained

    def write_slowly(path: Path) -> None:
        time.sleep(seconds)
        write(path)

    worker.tokenizer.save_pretrained = write_slowly  # only rank 0 writes it
    worker.save(folder)


CHECKPOINTS = (failing_save, slow_save)
OWN_FUNCTIONS = (
    export_weights,
    gradients,
    parameters,
    states,
    full_parameters,
    write_file,
    wait_for_file,
    die_in_next_backward,
    *CHECKPOINTS,
)
OWN_METHODS = {function.__name__: function for function in OWN_FUNCTIONS}


def find_rank_0(worker: LearnerWorker, ports: Path) -> StoreAddress:
    """Rank 0's store, which the ranks tell each other by a file."""
    store = dist.FileStore(str(ports), worker.world_size)
    if worker.rank == 0:
        store.set("meeting", pickle.dumps(worker.host_store("127.0.0.1")).hex())
    return pickle.loads(bytes.fromhex(store.get("meeting").decode()))


def run_scenario(scenario: Scenario, rank: int, world_size: int, ports: Path | None = None) -> list[Any]:
    """Results of all calls, in order. `ports`: a file for the ranks to find each other."""
    worker = LearnerWorker(scenario.config, rank, world_size, scenario.total_steps)
    results = []
    try:
        found = worker.setup(scenario.checkpoint, find_rank_0(worker, ports) if ports else None)
        for method, arguments in scenario.calls:
            own = arguments[rank] if isinstance(arguments, list) else arguments
            if own is None:
                results.append(None)
            elif method == "found":  # in setup()
                results.append(found)
            elif method in OWN_METHODS:
                results.append(OWN_METHODS[method](worker, *own))
            else:
                results.append(
                    getattr(worker, method)(**own) if isinstance(own, dict) else getattr(worker, method)(*own)
                )
    finally:
        worker.close()
    return results


def _live(folder: Path, rank: int, world_size: int, environment: dict[str, str]) -> None:
    """The life of a rank: its scenarios, one after another, what it prints, and what they gave."""
    with open(folder / f"said.{rank}", "w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    scenarios = pickle.loads((folder / "scenarios").read_bytes())
    answers = {}
    for number, (name, scenario) in enumerate(scenarios.items()):
        answers[name] = run_scenario(scenario, rank, world_size, folder / f"ports.{number}")
    (folder / f"answers.{rank}").write_bytes(pickle.dumps(answers))


def start_ranks(folder: Path, scenarios: dict[Any, Scenario], world_size: int) -> list[BaseProcess]:
    """Start scenarios on `world_size` processes."""
    (folder / "scenarios").write_bytes(pickle.dumps(scenarios))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [FORKS.Process(target=_live, args=(folder, rank, world_size, environment)) for rank in range(world_size)]
    for rank in ranks:
        start_fork(rank)
    return ranks


def end_ranks(folder: Path, ranks: list[BaseProcess]) -> list[str]:
    """Wait for all; what each said. None is left behind when one hangs."""
    deadline = time.monotonic() + 240.0
    try:
        for number, rank in enumerate(ranks):
            rank.join(max(0.0, deadline - time.monotonic()))
            assert rank.exitcode is not None, f"rank {number} hangs"
    finally:
        for rank in ranks:
            rank.kill()
    return [(folder / f"said.{number}").read_text() for number in range(len(ranks))]


def run_ranks(folder: Path, scenarios: dict[Any, Scenario], world_size: int) -> list[dict[Any, list[Any]]]:
    """Run scenarios on `world_size` processes; results[rank][name] is the list of its calls' results."""
    ranks = start_ranks(folder, scenarios, world_size)
    said = end_ranks(folder, ranks)
    assert [rank.exitcode for rank in ranks] == [0] * world_size, "\n".join(said)
    return [pickle.loads((folder / f"answers.{rank}").read_bytes()) for rank in range(world_size)]

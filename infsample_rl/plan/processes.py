"""The processes of a run and what each holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from infsample_rl.config import Config
from infsample_rl.plan.devices import Device, gpu_of, host
from infsample_rl.plan.learner_memory import frozen_row, learner_lines, resting_bytes, row_groups
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.placement import worker_groups
from infsample_rl.plan.rollout_memory import rollout_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessPlan:
    """What every process of a role holds at its fullest moment, its idle footprint (interpreter, libraries, CUDA
    context) apart.

    Example: ProcessPlan(role="learner", count=2, gpus=1.0, lines={"weights": 16_000_000, "gradients": 16_000_000})
    """

    role: str
    count: int
    gpus: float  # of one of them; 0: its tensors are in host memory
    lines: Mapping[str, int]  # name -> bytes where it computes
    host_lines: Mapping[str, int] = field(default_factory=dict)  # of a process on a GPU: bytes it keeps in host memory

    @property
    def sum_bytes(self) -> int:
        """The predicted peak: the sum of the lines and nothing else."""
        return sum(self.lines.values())

    @property
    def host_bytes(self) -> int:
        """Those of one in its machine's memory."""
        return sum(self.host_lines.values()) if self.gpus else self.sum_bytes

    def record(self) -> dict[str, Any]:
        """As plan.json has it."""
        return {
            "role": self.role,
            "count": self.count,
            "gpus": self.gpus,
            "lines": [{"name": name, "bytes": size} for name, size in self.lines.items()],
            "sum_bytes": self.sum_bytes,
            "host_lines": [{"name": name, "bytes": size} for name, size in self.host_lines.items()],
        }


def device_of(config: Config, role: str) -> Device:
    """Where a process of the role computes; a part of a GPU is a GPU with as much less memory. ValueError where no GPU
    is known."""
    gpus = getattr(config.cluster, f"{role}_gpus")
    if gpus == 0:
        return host()
    gpu = gpu_of(config)
    if gpu is None:
        raise ValueError(
            f"cluster.device_type must be set where no GPU is found and cluster.{role}_gpus={gpus:g}, got null; e.g. "
            "cluster.device_type=h100"
        )
    return gpu if gpus == 1 else replace(gpu, name=f"{gpus:g} of {gpu.name}", memory_bytes=int(gpus * gpu.memory_bytes))


def is_here(config: Config) -> bool:
    """Whether all GPUs of a run are this machine's, so that the host memory beside them is known."""
    gpus = sum(group.count * group.gpus for group in worker_groups(config))
    return config.cluster.device_type is None and gpus <= torch.cuda.device_count()


def place_of(config: Config, model: ModelOutline, role: str) -> Device:
    """As device_of(), of a role as plans name it; an engine that takes turns with a learner rank has what that leaves
    at rest."""
    device = device_of(config, "learner" if role == "colocated" else role)
    if role != "rollout" or not config.takes_turns:
        return device
    left = max(0, device.memory_bytes - resting_bytes(config, model))
    return replace(device, name=f"{device.name} beside the learner at rest", memory_bytes=left)


def sampling_place(config: Config, model: ModelOutline) -> Device:
    """What an engine finds for its weights and its pool: as place_of(), and in a learner rank's process what the rank
    leaves."""
    if not config.shares_process:
        return place_of(config, model, "rollout")
    return _beside(config, model, learner_lines(config, model)[0])


def plan_processes(config: Config, model: ModelOutline) -> list[ProcessPlan]:
    """Every role that holds a model. Reward workers are not among them: rules take little, and a reward model is not
    known here."""
    plans = [
        _plan(config, model, group.role, group.count, group.gpus)
        for group in worker_groups(config)
        if group.role != "reward"
    ]
    return [plan for plan in plans if plan is not None]


def plan_role(config: Config, model: ModelOutline, role: str) -> ProcessPlan:
    """One role of these settings."""
    group = next(group for group in worker_groups(config) if group.role == role)
    return _plan(config, model, role, group.count, group.gpus)


def _plan(config: Config, model: ModelOutline, role: str, count: int, gpus: float) -> ProcessPlan:
    if role == "rollout":
        lines, host_lines = rollout_lines(config, model, place_of(config, model, "rollout"))
    elif role == "reference":
        lines, host_lines = reference_lines(config, model), {}
    else:
        lines, host_lines = learner_lines(config, model)
        if config.shares_process:
            role, lines = "colocated", _together(config, model, lines)
    if config.takes_turns and role in ("rollout", "learner"):
        gpus = config.cluster.learner_gpus  # all of them in its turn, half of them in Ray's books
    return ProcessPlan(role=role, count=count, gpus=gpus, lines=lines, host_lines=host_lines)


def _together(config: Config, model: ModelOutline, learner: dict[str, int]) -> dict[str, int]:
    """A learner rank and a rollout worker in one process, which take turns."""
    rollout, _ = rollout_lines(config, model, _beside(config, model, learner))
    is_shared = _shares_weights(config)
    sampling = {f"sampling: {name}": size for name, size in rollout.items() if not (is_shared and name == "weights")}
    sampling.pop("sampling: prefill of a prompt", None)  # a row of the learner does not run beside it
    return learner | sampling


def _beside(config: Config, model: ModelOutline, learner: dict[str, int]) -> Device:
    """What a rank with these lines leaves, weights that are shared among it: the pool of kv_budget_bytes=auto is a
    share of it."""
    device, weights = device_of(config, "learner"), getattr(torch, config.model.dtype).itemsize * model.num_parameters
    left = device.memory_bytes - sum(learner.values()) + (weights if _shares_weights(config) else 0)
    return replace(device, memory_bytes=left)


def _shares_weights(config: Config) -> bool:
    """Whether a rank and the engine in its process have one copy: a single rank without adapters."""
    return config.cluster.learner_ranks == 1 and config.learner.backend == "fsdp" and config.learner.lora_rank == 0


def reference_lines(config: Config, model: ModelOutline) -> dict[str, int]:
    """A process of a reference worker: weights or its shard of them, and the fullest row it runs, without gradient."""
    model = model.reference_of(config)
    lengths = (config.data.max_prompt_tokens, config.rollout.max_new_tokens)
    row = row_groups(*lengths, config.reference.max_tokens_per_micro_batch, config.rollout.micro_group, 1)
    ranks, size = config.cluster.reference_ranks, getattr(torch, config.model.dtype).itemsize
    lines = {"weights": size * model.num_parameters // ranks}
    lines |= frozen_row(config, model, row, on_gpu=config.cluster.reference_gpus > 0)
    if ranks == 1:
        return lines
    gathered = {"gathered: two layers": 2 * size * model.layer_parameters}
    return lines | gathered | {"gathered: embeddings and head": size * model.root_parameters}

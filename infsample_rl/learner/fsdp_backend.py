"""FSDP2: parameters, gradients and optimizer state of the policy sharded over the ranks, or over groups of them (HSDP).

With learner.grad_sync=every_row parameters are gathered and gradients reduced in every row, layer by layer. With
last_row every rank holds all parameters, and the gradients of its rows in float32, from the end of one update to the
last row of the next: rows then run without any collective. The one gathering happens where all ranks are anyway, so
that none waits in it while another samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from infsample_rl.config import LearnerConfig
from infsample_rl.learner.checkpoint import SavedState
from infsample_rl.learner.optimizer import build_optimizer, load_moments, moments, step
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.packing import PackedRow


class FsdpBackend:
    """The calls of Backend, for a policy sharded by fully_shard: each decoder layer, then the wrapper with embeddings,
    norm and head."""

    def __init__(
        self, policy: PackedPolicy, learner: LearnerConfig, *, device: torch.device, dtype: torch.dtype, world_size: int
    ) -> None:
        """`policy` is float32 when given; its shards stay float32, gathered parameters are in `dtype`."""
        layers = policy.decoder_layers()
        if not layers:
            raise ValueError(
                f"{type(policy.lm).__name__} names no decoder layers in _no_split_modules: it cannot be sharded"
            )
        self.policy: Any = policy  # an FSDPModule too, once it is sharded
        self.device, self.dtype, self.world_size = device, dtype, world_size
        self.runs_free = learner.grad_sync == "last_row"
        self.units: list[Any] = [*layers, policy]  # fully_shard() makes them FSDPModules
        mesh = rank_mesh(device, world_size, learner.shard_ranks)
        precision = (
            MixedPrecisionPolicy()
            if dtype == torch.float32
            else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        )
        # On a CPU machine everything is in host memory already; the policy would ask for an accelerator to pin memory
        # for.
        offload = CPUOffloadPolicy() if learner.offload_optimizer and device.type != "cpu" else OffloadPolicy()
        for unit in self.units:
            fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
        # While whole parameters are gathered the modules name those; the shards are what the optimizer steps and
        # checkpoints hold.
        self.shards: dict[str, nn.Parameter] = dict(policy.lm.named_parameters())
        self.trained = {name: shard for name, shard in self.shards.items() if shard.requires_grad}
        self.optimizer = build_optimizer(self.trained.values(), learner)
        self.optimizer_steps = 0
        if self.runs_free:
            self.units[-1].set_reshard_after_forward(False)  # the policy
        self._gather()

    def _gather(self) -> None:
        """Forget gathered parameters, which are old now; with grad_sync=last_row take all new ones, and keep gradients
        to this rank."""
        for unit in self.units:
            unit.reshard()
        if self.runs_free:
            self.policy.set_requires_gradient_sync(False)
            self.policy.set_reshard_after_backward(False)
            for unit in self.units:
                unit.unshard()

    def forward(self, row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        """As PackedPolicy.forward."""
        return self.policy(row, temperature)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, this rank's part of the sum over ranks."""
        (loss * self.world_size).backward()  # FSDP averages over ranks

    def reduce_with_next_backward(self) -> None:
        """grad_sync=last_row: the next backward() reduces what the rank has kept, and frees the whole parameters."""
        self.policy.set_requires_gradient_sync(True)
        self.policy.set_reshard_after_backward(True)

    def update(self, *, factor: float, max_norm: float, lr: float) -> float:
        """Scale, clip, step; the norm before clipping."""
        norm = step(self.optimizer, self.trained.values(), factor=factor, max_norm=max_norm, lr=lr)
        self.optimizer_steps += math.isfinite(norm)
        self.discard()
        return norm

    def discard(self) -> None:
        """Drop the gradients, which the update's last row has reduced."""
        self.optimizer.zero_grad(set_to_none=True)
        self._gather()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor in the model's dtype) of every parameter, gathered one at a time."""
        for name, shard in self.shards.items():
            yield name, _full(shard.detach().to(self.device, self.dtype))

    def training_states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(name, full float32 state) of every trained parameter, gathered one at a time."""
        for name, shard in self.trained.items():
            state = {"master": shard.detach()} | moments(self.optimizer, shard)
            yield name, {key: _full(value.to(self.device)) for key, value in state.items()}

    @torch.no_grad()
    def load_training_states(self, saved: SavedState) -> None:
        """Take this rank's shards of masters and moments from a checkpoint."""
        for name, shard in self.trained.items():
            state = {key: _shard_like(value, shard) for key, value in saved.read(name, shard.shape).items()}
            shard.copy_(state.pop("master"))
            load_moments(self.optimizer, shard, state, saved.optimizer_steps)
        self.optimizer_steps = saved.optimizer_steps
        self._gather()


def rank_mesh(device: torch.device, world_size: int, shard_ranks: int | None) -> DeviceMesh:
    """All ranks in a line, or [world_size / shard_ranks, shard_ranks]: neighbours share one copy of the policy, copies
    are kept equal (HSDP)."""
    if shard_ranks is None or shard_ranks == world_size:
        return init_device_mesh(device.type, (world_size,))
    return init_device_mesh(
        device.type, (world_size // shard_ranks, shard_ranks), mesh_dim_names=("replicate", "shard")
    )


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _shard_like(full: Tensor, parameter: Any) -> Tensor:
    """This rank's part of a full tensor that every rank has read: no communication."""
    return distribute_tensor(full.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)

"""FSDP2: parameters, gradients and optimizer state of the policy sharded over the ranks, or over groups of them (HSDP).

With learner.grad_sync=every_row parameters are gathered and gradients reduced in every row, layer by layer. With
last_row every rank holds all parameters, and the gradients of its rows in float32, from the end of one update to the
last row of the next: rows then run without any collective. The one gathering happens where all ranks are anyway, so
that none waits in it while another samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from infsample_rl.config import LearnerConfig
from infsample_rl.learner.backend import Backend
from infsample_rl.learner.optimizer import build_optimizer
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.weight_slices import WeightSlices, materialize


class FsdpBackend(Backend):
    """The calls of Backend, for a policy sharded by fully_shard: each decoder layer, then the wrapper with embeddings,
    norm and head."""

    def __init__(
        self,
        policy: PackedPolicy,
        learner: LearnerConfig,
        slices: WeightSlices | None = None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        world_size: int,
    ) -> None:
        """`policy` is float32 when given; its shards stay float32, gathered parameters are in `dtype`. `slices`: it is
        an outline, of which this rank reads its own shards alone."""
        layers = policy.decoder_layers()
        if not layers:
            raise ValueError(
                f"{type(policy.lm).__name__} names no decoder layers in _no_split_modules: it cannot be sharded"
            )
        self.policy = policy  # an FSDPModule too, once it is sharded
        self.device, self.dtype, self.world_size = device, dtype, world_size
        self.runs_free = learner.grad_sync == "last_row"
        self.units: list[Any] = [*layers, policy]  # fully_shard() makes them FSDPModules
        mesh = rank_mesh(device, world_size, learner.shard_ranks)
        # Layers get what they would unsharded: a cast would round the rotary angles that OLMo 2 has in float32,
        # and copy the row's cuts, with their masks, for every layer.
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        # In host memory already on a CPU machine, where the policy would ask for an accelerator to pin memory for.
        in_host_memory = learner.offload_optimizer and device.type != "cpu"
        offload = CPUOffloadPolicy() if in_host_memory else OffloadPolicy()
        unread = {name for name, parameter in policy.lm.named_parameters() if parameter.is_meta}
        for unit in self.units:
            fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
        if slices is not None:
            materialize(policy, "cpu" if in_host_memory else device)
        # While whole parameters are gathered the modules name those; the shards are what the optimizer steps and
        # checkpoints hold.
        self.shards: dict[str, nn.Parameter] = dict(policy.lm.named_parameters())
        if slices is not None:
            for name in unread:
                slices.read(name, self.shards[name])
        self.masters = {name: shard for name, shard in self.shards.items() if shard.requires_grad}
        self.optimizer = build_optimizer(self.masters.values(), learner)
        if self.runs_free:
            self.units[-1].set_reshard_after_forward(False)  # the policy
        self._take_masters()

    def _take_masters(self) -> None:
        """Forget gathered parameters, which are old now; with grad_sync=last_row take all new ones, and keep gradients
        to this rank."""
        for unit in self.units:
            unit.reshard()
        if self.runs_free:
            self.policy.set_requires_gradient_sync(False)
            self.policy.set_reshard_after_backward(False)
            for unit in self.units:
                unit.unshard()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, this rank's part of the sum over ranks."""
        (loss * self.world_size).backward()  # FSDP averages over ranks

    def reduce_with_next_backward(self) -> None:
        """grad_sync=last_row: the next backward() reduces what the rank has kept, and frees the whole parameters."""
        self.policy.set_requires_gradient_sync(True)
        self.policy.set_reshard_after_backward(True)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor in the model's dtype) of every parameter, gathered one at a time."""
        for name, shard in self.shards.items():
            yield name, self._gathered(shard.detach().to(self.device, self.dtype))

    def _gathered(self, part: Tensor) -> Tensor:
        part = part.to(self.device)
        return part.full_tensor() if isinstance(part, DTensor) else part

    def _own_part(self, full: Tensor, master: Any) -> Tensor:
        return distribute_tensor(full.to(master.device), master.device_mesh, master.placements, src_data_rank=None)


def rank_mesh(device: torch.device, world_size: int, shard_ranks: int | None) -> DeviceMesh:
    """All ranks in a line, or [world_size / shard_ranks, shard_ranks]: neighbours share one copy of the policy, copies
    are kept equal (HSDP)."""
    if shard_ranks is None or shard_ranks == world_size:
        return init_device_mesh(device.type, (world_size,))
    return init_device_mesh(
        device.type, (world_size // shard_ranks, shard_ranks), mesh_dim_names=("replicate", "shard")
    )

"""DeepSpeed ZeRO 1, 2 and 3: the optimizer, gradients too, parameters too are sharded over the ranks.

DeepSpeed keeps the gradients and decides nothing: with managed_gradient_accumulation=false every backward only adds to
them, in float32 whatever the model's dtype, and one step a whole update ends them. Its loss scale, by which a step
divides the gradients in float32, is set to 1 / factor for that step. Stages 2 and 3 reduce in every row, stage 3
gathers in every row and every forward, so all ranks run the same number of rows; stage 1 reduces in the step. Needs
deepspeed >= 0.19.8.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn

from infsample_rl.config import LearnerConfig
from infsample_rl.learner.backend import Backend
from infsample_rl.learner.checkpoint import KINDS, SavedState
from infsample_rl.learner.cpu_adam import cpu_adam
from infsample_rl.learner.deepspeed_config import engine_config
from infsample_rl.learner.optimizer import build_optimizer, set_lr
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.weight_slices import WeightSlices, materialize, move_buffers

OLDEST = "0.19.8"  # older ones ignore managed_gradient_accumulation=false
MOMENTS = KINDS[1:]


class DeepSpeedBackend(Backend):
    """The calls of Backend, for a policy sharded by a DeepSpeed engine at learner.zero_stage."""

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
        """`policy` is float32 when given, in bfloat16 or float32, its `dtype`, afterwards; the process group exists.
        `slices`, at stage 3: it is an outline, of which one layer after another is read and partitioned."""
        deepspeed = _import_deepspeed(device)
        self.world_size = world_size
        self.stage, self.offloaded = learner.zero_stage, learner.offload_optimizer
        self.names = dict(policy.lm.named_parameters())
        # not masters but what they are of, with what ZeRO adds to parameters
        self.masters: dict[str, Any] = {name: each for name, each in self.names.items() if each.requires_grad}
        # The engine casts first and takes its masters from what is left: what that would round is kept for them.
        exact = {
            name: value.detach().to("cpu", copy=True)
            for name, value in self.masters.items()
            if not value.is_meta and not torch.equal(value, value.to(dtype))
        }
        config = engine_config(policy, learner, dtype)
        read = set() if slices is None else self._partition(policy, slices, config, device=device, dtype=dtype)
        optimizer = build_optimizer(self.masters.values(), learner)
        self.optimizer = cpu_adam(optimizer) if learner.offload_optimizer else optimizer
        self.policy, *_ = deepspeed.initialize(model=policy, optimizer=self.optimizer, config=config)
        self.zero: Any = self.policy.optimizer
        self._make_moments()
        for name, value in exact.items():
            self._set_state(self.masters[name], value, None)
        if slices is not None and dtype != torch.float32:
            for name in sorted(read & self.masters.keys()):
                value = torch.empty(self._shape(self.masters[name]))
                slices.read(name, value)
                self._set_state(self.masters[name], value, None)

    def _partition(
        self,
        policy: PackedPolicy,
        slices: WeightSlices,
        config: dict[str, Any],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> set[str]:
        """Make the outline of each layer, then the rest, whole in `dtype`, and leave this rank its part; the names of
        what was read."""
        import deepspeed

        read: set[str] = set()
        for unit in (*policy.decoder_layers(), policy):
            within = {id(parameter) for parameter in unit.parameters()}
            names = [name for name, each in self.names.items() if each.is_meta and id(each) in within]
            materialize(unit, device, dtype)
            self.names = dict(policy.lm.named_parameters())
            for name in names:
                slices.read(name, self.names[name])
            deepspeed.zero.Init(module=unit, config_dict_or_path=config, mem_efficient_linear=False, dtype=dtype)
            read.update(names)
        move_buffers(policy, device)  # DeepSpeed leaves those of what zero.Init has partitioned
        self.masters = {name: each for name, each in self.names.items() if each.requires_grad}
        return read

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, this rank's part of the sum over ranks."""
        self.policy.backward(loss * self.world_size)  # ZeRO averages over ranks

    def update(self, *, factor: float, max_norm: float, lr: float) -> float:
        """Scale, clip, step; the norm before clipping, infinite where it is not a number."""
        if self._keeps_own_gradients:  # the one of its optimizers without a loss scale
            for gradients in self.zero.fp32_groups_gradients_flat:
                gradients.mul_(factor)
        else:
            self.zero.loss_scale = 1.0 / factor
        self.zero.clip_grad = max_norm
        set_lr(self.optimizer, lr)
        self.policy.step()
        if not self._keeps_own_gradients:
            self.zero.loss_scale = 1.0
        norm = float(self.policy.get_global_grad_norm())
        if math.isfinite(norm):
            self.optimizer_steps += 1
        self.discard()
        return norm

    @property
    def _keeps_own_gradients(self) -> bool:
        """Whether this is DeepSpeed's BF16_Optimizer, which it takes for stage 1 in bfloat16 without offload: whole
        float32 gradients."""
        return type(self.zero).__name__ == "BF16_Optimizer"

    def discard(self) -> None:
        """Drop the gradients, as the step of a ZeRO optimizer does when they overflow."""
        self.zero.zero_grad(set_to_none=True)
        if self._keeps_own_gradients:
            return
        if self.stage < 3:
            self.zero.micro_step_id = -1  # the next row is the first of an update
            self.zero._release_preflattened_grad_buffers()
            for group in range(len(self.zero.param_groups)):
                self.zero.averaged_gradients[group] = self.zero.all_grad_tensors[group] = None
        if self.offloaded:
            self.zero.reset_cpu_buffers()

    def _whole(self, parameter: nn.Parameter, *, writer: int | None = None) -> Any:
        """Inside of it the parameter is whole on every rank, and what rank `writer` writes there is kept."""
        if self.stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=writer)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor in the model's dtype) of every parameter; at stage 3 gathered one at a time."""
        for name, parameter in self.names.items():
            with self._whole(parameter):
                yield name, parameter.detach()

    def _shape(self, master: Any) -> torch.Size:
        return master.ds_shape if self.stage == 3 else master.shape

    def training_states(self, kinds: Sequence[str] = KINDS) -> Iterator[tuple[str, Tensor]]:
        """(name/kind, full float32 tensor) of every trained parameter, gathered one at a time."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for name, parameter in self.masters.items():
            for kind in kinds:
                if kind == "master":
                    yield f"{name}/{kind}", safe_get_full_fp32_param(parameter)
                elif self.optimizer_steps > 0:
                    yield f"{name}/{kind}", safe_get_full_optimizer_state(parameter, kind)

    @torch.no_grad()
    def load_training_states(self, saved: SavedState) -> None:
        """Take this rank's shards of masters and moments from a checkpoint; every rank reads all of it."""
        for shard in self._shards():
            step = self.optimizer.state[shard]["step"]
            self.optimizer.state[shard]["step"] = step * 0 + saved.optimizer_steps
        for name, parameter in self.masters.items():
            state = saved.read(name, self._shape(parameter))
            with self._whole(parameter, writer=0):
                parameter.copy_(state["master"])
            self._set_state(parameter, state["master"], None)
            for moment in state.keys() & set(MOMENTS):
                self._set_state(parameter, state[moment], moment)
        self.optimizer_steps = saved.optimizer_steps

    def _make_moments(self) -> None:
        """Moments of zero for the flat shards of masters that the optimizer steps: DeepSpeed would link only the first
        group's to the parameters."""
        for shard in self._shards():
            step = 0 if self.offloaded else torch.zeros((), device=shard.device)
            self.optimizer.state[shard] = {"step": step} | {moment: torch.zeros_like(shard) for moment in MOMENTS}
        if self.stage < 3:
            self.zero._lazy_init_hp_params_optimizer_state()

    def _shards(self) -> list[Tensor]:
        """This rank's part of the masters, one flat tensor or several for a group of parameters."""
        if self.stage == 3:
            return self.zero.fp32_partitioned_groups_flat
        return [shard for group in self.optimizer.param_groups for shard in group["params"]]

    @torch.no_grad()
    def _set_state(self, parameter: Any, value: Tensor, moment: str | None) -> None:
        """Set this rank's part of a parameter's master, or of a moment, from the full float32 tensor."""
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        # the shards are of equal length, the last one padded, which the calls for full tensors forget
        if self.stage == 3:
            length = parameter.ds_tensor.numel()
            padded = nn.functional.pad(value.flatten(), (0, length * self.world_size - value.numel()))
            value = padded[dist.get_rank() * length :][:length]
            set_master, set_moment = safe_set_local_fp32_param, safe_set_local_optimizer_state
        else:
            set_master, set_moment = safe_set_full_fp32_param, safe_set_full_optimizer_state
        if moment is None:
            set_master(parameter, value)
        else:
            set_moment(parameter, value, moment)


def _import_deepspeed(device: torch.device) -> ModuleType:
    """The package, in the state in which deepspeed.initialize joins the process group there is."""
    # What it reads from the environment, and takes for granted that its launcher has set.
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(torch.cuda.current_device() if device.type == "cuda" else 0)
    found = importlib.metadata.version("deepspeed") if importlib.util.find_spec("deepspeed") else "none"
    if found == "none" or Version(found) < Version(OLDEST):
        raise ValueError(
            f"learner.backend=deepspeed needs the package deepspeed >= {OLDEST}, got {found}; install it or take "
            "learner.backend=fsdp"
        )
    import deepspeed
    from deepspeed.utils import groups

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # One of torch 2.13's at every collective: DeepSpeed calls them by the names older versions have.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    # it would compile C++ for shared memory between the ranks of one host
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    groups._release_process_group_references()  # those of an earlier learner in this process, whose ranks have parted
    return deepspeed

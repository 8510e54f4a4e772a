"""The reference of the KL in the loss, on the learner ranks themselves (reference.placement=learner): no worker,
nothing sent.

With LoRA it is the policy with its adapters off, without a second copy of anything. Else a frozen copy beside the
policy, sharded over the same ranks wherever rows run in lockstep; with learner.grad_sync=last_row, where they do not,
every rank has a whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from infsample_rl.config import Config
from infsample_rl.learner.backend import Backend
from infsample_rl.model.frozen_policy import load_frozen_policy
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.lora import adapters_off
from infsample_rl.model.packing import PackedRow

if TYPE_CHECKING:
    from peft import PeftModel

Forward = Callable[[PackedRow, float], tuple[Tensor, Tensor]]  # as PackedPolicy.forward


class ReferencePolicy:
    """Reference log-probabilities of the rows a rank is about to train.

    They are computed at a row's first pass, before the step's first update, and kept for the passes after it: so all
    ranks of a wave compute them, those with a row of weight zero too, or none does, and the collectives of a sharded
    reference match.
    """

    def __init__(self, forward: Forward, temperature: float) -> None:
        self._forward, self._temperature = forward, temperature
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._is_updated = False  # whether the step has had its first update

    @torch.no_grad()
    def logprobs(self, row: PackedRow, pass_id: tuple[int, int] | None) -> Tensor:
        """[R] float32 for the response tokens of a pass; `pass_id`: its row's row_id and its number. A row of weight
        zero gets any numbers."""
        if not self._is_updated:
            logprobs = self._forward(row, self._temperature)[0]
            if pass_id is not None:
                self._kept[pass_id] = logprobs
            return logprobs
        if pass_id is None:
            return torch.zeros_like(row.labels, dtype=torch.float32)
        if pass_id not in self._kept:
            raise RuntimeError(
                f"row {pass_id[0]} has no reference log-probabilities: it was not seen before the step's first update"
            )
        return self._kept[pass_id]

    def end_update(self, *, is_last: bool) -> None:
        """The optimizer has stepped; `is_last` of the step: what was kept is dropped."""
        self._is_updated = not is_last
        if is_last:
            self._kept.clear()


def build_reference(
    config: Config, backend: Backend, adapted: PeftModel | None, *, device: torch.device, world_size: int
) -> ReferencePolicy:
    """The reference beside the policy that `backend` trains, whose adapters, if any, are `adapted`. A collective."""
    forward = _without_adapters(backend, adapted) if adapted is not None else _frozen_copy(config, device, world_size)
    return ReferencePolicy(forward, config.rollout.temperature)


def _without_adapters(backend: Backend, adapted: PeftModel) -> Forward:
    def forward(row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        with adapters_off(adapted):
            return backend.forward(row, temperature)

    return forward


def _frozen_copy(config: Config, device: torch.device, world_size: int) -> PackedPolicy:
    # On a CPU machine the weights are in host memory in any case.
    offload = config.reference.offload and device.type != "cpu"
    policy = load_frozen_policy(config, "cpu" if offload else device)
    if world_size > 1 and config.learner.grad_sync == "every_row":
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (world_size,)),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        for unit in (*policy.decoder_layers(), policy):
            # no backward comes that would free what was gathered
            fully_shard(unit, **options, reshard_after_forward=True)
    elif offload:
        keep_in_host_memory(policy, device)
    return policy


def keep_in_host_memory(policy: PackedPolicy, device: torch.device) -> None:
    """Bring a frozen policy's weights to `device` for the time of a forward only, its layers one at a time."""
    for module in policy.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    seen: set[nn.Parameter] = set()
    for unit in (*policy.decoder_layers(), policy):
        own = [parameter for parameter in unit.parameters() if parameter not in seen]
        seen.update(own)
        _move_around_forward(unit, own, device)


def _move_around_forward(unit: nn.Module, parameters: list[nn.Parameter], device: torch.device) -> None:
    held = [parameter.data.pin_memory() if device.type == "cuda" else parameter.data for parameter in parameters]

    def bring(*_: object) -> None:
        for parameter, host in zip(parameters, held, strict=True):
            parameter.data = host.to(device, non_blocking=True, copy=True)

    def drop(*_: object) -> None:
        for parameter, host in zip(parameters, held, strict=True):
            parameter.data = host

    unit.register_forward_pre_hook(bring)
    unit.register_forward_hook(drop)
    drop()

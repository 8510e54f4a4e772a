"""AdamW and its learning rate."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from infsample_rl.config import LearnerConfig

OPTIMIZER_8BIT = "adamw_8bit"


def build_optimizer(parameters: Iterable[nn.Parameter], learner: LearnerConfig) -> torch.optim.Optimizer:
    """AdamW over float32 masters, with moments in float32 or, with learner.optimizer=adamw_8bit, in 8 bits; weight
    decay on matrices only."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if _is_matrix(parameter)], "weight_decay": learner.weight_decay},
        {"params": [parameter for parameter in trained if not _is_matrix(parameter)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {"lr": learner.lr, "betas": (learner.beta1, learner.beta2), "eps": learner.adam_epsilon}
    if learner.optimizer == OPTIMIZER_8BIT:
        check_optimizer(learner.optimizer)
        from torchao.optim import AdamW8bit

        # Blocks of 256 values share a scale (Dettmers et al., arXiv 2110.02861); a tensor below 4,096 values or not of
        # whole blocks stays float32.
        return AdamW8bit(groups, **settings)
    # Fused: the same arithmetic, several times faster than a kernel for each operation.
    return torch.optim.AdamW(groups, **settings, fused=True)


def _is_matrix(parameter: Any) -> bool:
    # what ZeRO-3 has partitioned is flat, and knows the shape it had
    return len(getattr(parameter, "ds_shape", parameter.shape)) >= 2


def check_optimizer(name: str) -> None:
    """ValueError for a learner.optimizer whose library is not there."""
    if name == OPTIMIZER_8BIT and importlib.util.find_spec("torchao") is None:
        raise ValueError(f"learner.optimizer={name} needs the package torchao; install it or take adamw")


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, which its compiled step reads
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def step(
    optimizer: torch.optim.Optimizer,
    parameters: Collection[nn.Parameter],
    *,
    factor: float,
    max_norm: float,
    lr: float,
) -> float:
    """Multiply every gradient by `factor` in float32, clip their norm, step where it is finite; the norm before
    clipping. A parameter that saw no row has zeros."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif factor != 1.0:
                parameter.grad.mul_(factor)
    total = nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = (total.full_tensor() if isinstance(total, DTensor) else total).item()
    if math.isfinite(norm):
        set_lr(optimizer, lr)
        optimizer.step()
    return norm


def moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """exp_avg and exp_avg_sq of a parameter in float32, sharded and placed like it; empty before its first step."""
    state = optimizer.state.get(parameter, {})
    found = {name: state[name] for name in ("exp_avg", "exp_avg_sq") if name in state}
    if isinstance(optimizer, torch.optim.AdamW):
        return found
    return {name: _dequantized(value) for name, value in found.items()}


def _dequantized(value: Tensor) -> Tensor:
    """A moment of AdamW8bit as float32; it dequantises shard by shard, as DTensor has no operation for it."""
    if not isinstance(value, DTensor):
        return value.dequantize()  # of one kept in float32: itself
    local = value.to_local().dequantize()
    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


@torch.no_grad()
def load_moments(optimizer: Any, parameter: Tensor, values: dict[str, Tensor], steps: int) -> None:
    """Set a parameter's moments, sharded and placed like it, as after `steps` steps; without any it stays as before the
    first."""
    if not values:
        return
    state = {"step": torch.tensor(float(steps))}
    if isinstance(optimizer, torch.optim.AdamW):
        state = {"step": state["step"].to(parameter.device)}
        state |= {name: value.to(parameter.device) for name, value in values.items()}
    else:
        for name, value in values.items():
            # torchao's own choice of 8 bits or float32, signed or not
            state[name] = optimizer._new_buffer(parameter, name == "exp_avg")
            state[name].copy_(value)
    optimizer.state[parameter] = state


def lr_at(step: int, total_steps: int, learner: LearnerConfig) -> float:
    """Learning rate of update `step` (0, 1, ...) of `total_steps`.

    Warm-up rises in a line from 0 before the first update to lr at update warmup_steps - 1. Then constant, or linear or
    cosine down to min_lr_ratio x lr, which is reached after the last update.
    lr 1, warm-up 2, 4 steps, linear: 0.5, 1, 1, 0.5.
    """
    warmup_steps = learner.warmup_steps
    if step < warmup_steps:
        return learner.lr * (step + 1) / warmup_steps
    if learner.lr_schedule == "constant":
        return learner.lr
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = 1 - progress if learner.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return learner.lr * (learner.min_lr_ratio + (1 - learner.min_lr_ratio) * left)

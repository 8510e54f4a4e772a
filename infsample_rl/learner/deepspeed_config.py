"""DeepSpeed's own configuration, with every bucket stated: its defaults are of a billion elements."""

from __future__ import annotations

from typing import Any

import torch

from infsample_rl.config import LearnerConfig
from infsample_rl.model.logprobs import PackedPolicy

BUCKET_ELEMENTS = 20_000_000  # gradients reduced at a time: 80 MB in float32, held about twice meanwhile


def engine_config(policy: PackedPolicy, learner: LearnerConfig, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's own configuration, as its JSON file would have it."""
    bucket = min(BUCKET_ELEMENTS, sum(parameter.numel() for parameter in policy.parameters()))
    zero: dict[str, Any] = {
        "stage": learner.zero_stage,
        "overlap_comm": False,  # only stage 2 could, with the update's end in our hands
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": 2 * BUCKET_ELEMENTS,
    }
    if learner.zero_stage == 3:
        zero |= {
            # Norms and biases stay whole: gathering each would cost a message for a few bytes.
            "stage3_param_persistence_threshold": max(
                (p.numel() for p in policy.parameters() if p.ndim < 2), default=0
            ),
            "stage3_prefetch_bucket_size": bucket,
            # Two layers are whole at a time, none waits to be used again.
            "stage3_max_live_parameters": 2 * _largest_unit(policy),
            "stage3_max_reuse_distance": 0,
            "memory_efficient_linear": False,  # it would replace torch.nn.functional.linear for the whole process
        }
    if learner.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": next(policy.parameters()).device.type == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": learner.max_grad_norm,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": dtype == torch.bfloat16, "immediate_grad_update": True, "check_grad_overflow": True},
        "zero_optimization": zero,
    }


def _largest_unit(policy: PackedPolicy) -> int:
    """Elements of the largest decoder layer, or of what is outside them."""
    layers = [sum(each.numel() for each in layer.parameters()) for layer in policy.decoder_layers()]
    return max(*layers, sum(each.numel() for each in policy.parameters()) - sum(layers), 1)

"""What bench.train asks of the model before it measures, in the process that `process.measure` starts."""

from __future__ import annotations

from typing import Any

from benchmarks import models
from benchmarks.workload import ModelOptions
from infsample_rl.config import (
    Config,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    RunConfig,
)
from infsample_rl.data.prompts import build_train_prompts


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Prompts as ids, parameters and device. Prompts are random ones of one length, or with `data` its problems."""
    workload = ModelOptions.of(spec)
    model, tokenizer = models.load(workload)
    context = model.config.get_text_config().max_position_embeddings
    if spec["data"] is None:
        prompts = models.make_prompts(workload, tokenizer, spec["count"])
    else:
        prompts = problem_prompts(spec, tokenizer, context)
    return models.machine(model.device) | {
        "prompts": prompts,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "on_cuda": model.device.type == "cuda",
    }


def problem_prompts(spec: dict[str, Any], tokenizer: Any, context: int) -> list[list[int]]:
    """spec["count"] prompts in a run's seeded order."""
    config = Config(
        run=RunConfig(seed=spec["seed"]),
        model=ModelConfig(path=spec["model"]),
        data=DataConfig(**spec["data"], prompts_per_step=1),
        rollout=RolloutConfig(max_new_tokens=spec["max_new_tokens"]),
        objective=ObjectiveConfig(kl="none", kl_coef=0.0),
        reward=RewardConfig(functions=[RewardFunctionConfig(name="reasoning_gym")]),
    )
    stream = build_train_prompts(config, tokenizer, context)
    return [stream.next_batch()[0].token_ids.tolist() for _ in range(spec["count"])]

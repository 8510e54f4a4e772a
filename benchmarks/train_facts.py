"""What bench.train asks of the model before it measures: python -m benchmarks.train_facts SPEC RESULT, both JSON.

SPEC has `what`: `random`, prompts of one length; or `problems` of `data` in the order of a run, with their columns for
the reward.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

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
    """Prompts as ids, parameters and device."""
    workload = ModelOptions(**{field.name: spec[field.name] for field in dataclasses.fields(ModelOptions)})
    model, tokenizer = models.load(workload)
    context = model.config.get_text_config().max_position_embeddings
    prompts = (
        models.make_prompts(workload, tokenizer, spec["count"])
        if spec["what"] == "random"
        else problem_prompts(spec, tokenizer, context)
    )
    return {
        "prompts": prompts,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "on_cuda": model.device.type == "cuda",
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu",
    }


def problem_prompts(spec: dict[str, Any], tokenizer: Any, context: int) -> list[list[int]]:
    """spec["count"] prompts in a run's seeded order; their columns go to the file spec["reward_file"], if there is
    one."""
    config = Config(
        run=RunConfig(seed=spec["seed"]),
        model=ModelConfig(path=spec["model"]),
        data=DataConfig(**spec["data"], prompts_per_step=1),
        rollout=RolloutConfig(max_new_tokens=spec["max_new_tokens"]),
        objective=ObjectiveConfig(kl="none", kl_coef=0.0),
        reward=RewardConfig(functions=[RewardFunctionConfig(name="reasoning_gym")]),
    )
    stream = build_train_prompts(config, tokenizer, context)
    found = [stream.next_batch()[0] for _ in range(spec["count"])]
    if spec["reward_file"] is not None:
        Path(spec["reward_file"]).write_text(json.dumps([prompt.columns for prompt in found]))
    return [prompt.token_ids.tolist() for prompt in found]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(sys.argv[1]))))

"""Settings of a run whose trackers are off, and what its driver logs."""

from __future__ import annotations

from infsample_rl.config import (
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    RunConfig,
)


def logged_config(name: str = "tiny", **logging: object) -> Config:
    """Two prompts of four samples a step, logged to files only, apart from `logging`."""
    return Config(
        run=RunConfig(name=name),
        model=ModelConfig(path="model"),
        data=DataConfig(source="rows.jsonl", prompts_per_step=2),
        rollout=RolloutConfig(group_size=4, max_new_tokens=256),
        reward=RewardConfig(functions=[RewardFunctionConfig(name="kk")]),
        logging=LoggingConfig(**{"wandb": "disabled", **logging}),
    )


def sample(step: int, index: int = 0, reward: float | None = 1.0) -> dict:
    """A completion as the driver gives it."""
    return {
        "step": step, "prompt_index": 0, "sample_index": index, "prompt": "1 + 1 = ?", "response": "2",
        "reward": reward, "components": {"kk": reward}, "advantage": 0.5, "length": 2, "finish_reason": "stop",
        "policy_version": step - 1,
    }  # fmt: skip

"""Keys and tokens: which worker gets which, handed over as an argument and never part of Ray's runtime environment.
Standard library only.

The runtime environment stands in dashboards, logs and the job table. So a key of the driver's environment travels as an
argument of the worker's constructor, and every worker begins by removing from its own environment what it was not
given: a node may have been started with keys.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from infsample_rl.config import Config
from infsample_rl.config.secrets import is_secret_name
from infsample_rl.plan.placement import worker_groups

HUB_NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
DRIVER_ONLY = "WANDB_"  # prefix: the driver alone reports to W&B

Secrets = dict[str, str | None]  # name -> value; None: the worker keeps what its node was started with, if anything


def check_reward_environment(config: Config) -> None:
    """ValueError for a name in reward.environment that is not set here, or that reward functions must not have."""
    for name in config.reward.environment:
        if name.startswith(DRIVER_ONLY):
            raise ValueError(
                f"reward.environment must not hold {name}: only the driver reports to W&B, reward functions must not "
                "see its key"
            )
        if name not in os.environ:
            raise ValueError(f"reward.environment names {name}, which is not set in the driver's environment")


def worker_secrets(config: Config) -> dict[str, Secrets]:
    """Role -> the keys its workers are given: the hub's where a model or predictor comes from it, reward.environment
    for reward.

    Roles are those of placement.worker_groups. W&B's key is nobody's but the driver's.
    """
    hub = {name: os.environ.get(name) for name in HUB_NAMES}
    given: dict[str, Secrets] = {}
    for group in worker_groups(config):
        given[group.role] = dict(hub) if any(is_hub_name(path) for path in _models_of(group.role, config)) else {}
        if group.role == "reward":
            given[group.role] |= {name: os.environ.get(name) for name in config.reward.environment}
    return given


def is_hub_name(path: str | None) -> bool:
    """Whether a model's path is a name on the Hugging Face hub; local ones have been made absolute."""
    return path is not None and path != "" and not os.path.isabs(path)


def _held_secrets() -> list[str]:
    """Names of the keys in this process's environment. Ray's own stay: its processes need them to reach each other."""
    return [name for name in os.environ if is_secret_name(name) and not name.startswith("RAY_")]


def take_secrets(secrets: Secrets) -> None:
    """Make this worker's environment hold the given keys and no others. The first thing a worker does; nothing of it is
    logged."""
    for name in set(_held_secrets()) - secrets.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in secrets.items() if value is not None})


@contextlib.contextmanager
def without_secrets() -> Iterator[None]:
    """Keys are out of this process's environment inside the block: what it starts there, Ray's local processes, does
    not inherit them."""
    kept = {name: os.environ.pop(name) for name in _held_secrets()}
    try:
        yield
    finally:
        os.environ.update(kept)


def _models_of(role: str, config: Config) -> list[str | None]:
    """Folders and hub names the workers of a role load from."""
    policy, reference = config.model.path, config.reference.path or config.model.path
    if role == "reward":
        return [
            function.name.removeprefix("model:")
            for function in config.reward.functions
            if function.name.startswith("model:")
        ]
    if role == "reference":
        return [reference]
    tokenizer, predictor = config.model.tokenizer_path, config.rollout.predictor_path
    beside = [reference] if role == "learner" and config.reference.placement == "learner" else []
    if role == "rollout" or config.cluster.colocate:
        return [policy, tokenizer, predictor, *beside]
    return [policy, tokenizer, *beside]

"""Keys and tokens: which worker gets which, handed over as an argument and never part of Ray's runtime environment.
Standard library only.

The runtime environment stands in dashboards, logs and the job table. So a key of the driver's environment travels as an
argument of the worker's constructor, and every worker begins by removing from its own environment what it was not
given: a node may have been started with keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from infsample_rl.config import Config
from infsample_rl.config.secrets import is_secret_name
from infsample_rl.plan.placement import worker_groups

HUB_NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
DRIVER_ONLY = "WANDB_"  # prefix: the driver alone reports to W&B

Secrets = dict[str, str | None]  # name -> value; None: the worker keeps what its node was started with, if anything


def check_reward_environment(config: Config) -> None:
    """ValueError for a name in reward.environment, or of a judge's key, that is not set here or that only the driver
    may have."""
    named = [("reward.environment", name) for name in config.reward.environment]
    for setting, name in [*named, *(("reward.functions: judge: key", name) for name in _keys_of_judges(config))]:
        if name.startswith(DRIVER_ONLY):
            raise ValueError(
                f"{setting} must not name {name}: only the driver reports to W&B, reward functions must not see its key"
            )
        if name not in os.environ:
            raise ValueError(f"{setting} names {name}, which is not set in the driver's environment")


def worker_secrets(config: Config) -> dict[str, Secrets]:
    """Role -> the keys its workers are given: the hub's who load models, reward.environment's who run rewards or
    environments, judges' for reward.

    Roles are those of placement.worker_groups. W&B's key is nobody's but the driver's.
    """
    hub, named = _values(HUB_NAMES), _values(config.reward.environment)
    given: dict[str, Secrets] = {group.role: dict(hub) for group in worker_groups(config)}
    if config.environment.is_set:
        given["learner" if config.shares_process else "rollout"] |= named
    names = [function.name for function in config.reward.functions]
    # functions run others' code: only a reward model by hub name brings the hub's token; local paths are absolute
    from_hub = any(name.startswith("model:") and not os.path.isabs(name.removeprefix("model:")) for name in names)
    return given | {"reward": named | _values(_keys_of_judges(config)) | (hub if from_hub else {})}


def _values(names: Iterable[str]) -> Secrets:
    return {name: os.environ.get(name) for name in names}


def _keys_of_judges(config: Config) -> list[str]:
    return [judge.key for judge in config.reward.judges if judge.key is not None]


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """These variables less the keys. Ray's own stay: its processes need them to reach each other."""
    return {name: value for name, value in environment.items() if name.startswith("RAY_") or not is_secret_name(name)}


def take_secrets(secrets: Secrets) -> None:
    """Make this worker's environment hold the given keys and no others, before it does anything else."""
    for name in os.environ.keys() - without_secrets(os.environ).keys() - secrets.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in secrets.items() if value is not None})

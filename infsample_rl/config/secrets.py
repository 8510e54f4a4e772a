"""Keys do not belong into settings, which the run folder, W&B and checkpoints keep: found and refused before anything
is written. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from infsample_rl.config.peer_flags import read_flags

_KEY_NAME = re.compile(
    r"^token$|(^|_)(api_?key|access_?key|private_?key|secret(_?key)?|passw(or)?d|passphrase|credentials?|(api|auth|access|hf|wandb)_?token|authorization)$",
    re.I,
)
_MAYBE_KEY_NAME = re.compile(r"_(key|token)$", re.I)  # data has columns of such names too
_LIKE_A_KEY = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])[\w.~+=-]{16,}")
_KEY_PREFIX = re.compile(
    r"^(Bearer\s+\S{8,}|sk-[\w-]{12,}|hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{12,}|xox[abp]-[\w-]{8,})$"
)
_SECRET_VARIABLE = re.compile(
    r"(^|_)(KEY|TOKEN|SECRET|PASSPHRASE|PASSWD|CREDENTIALS?)(_|$)|PASSWORD|APIKEY", re.IGNORECASE
)
_LOGIN_IN_URL = re.compile(r":/{1,2}[^/@:\s]*:[^/@\s]+@")  # one slash where a path was made of it
_NO_SECRETS = frozenset({"HF_TOKEN_PATH", "HF_HUB_DISABLE_IMPLICIT_TOKEN"})  # how the hub's token is found
SHORTEST = 8  # a shorter value of a variable could stand anywhere by chance


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name is taken for a key.

    Examples: WANDB_API_KEY, HF_TOKEN, AWS_SECRET_ACCESS_KEY, PGPASSWORD are; PATH, TOKENIZERS_PARALLELISM,
    HF_TOKEN_PATH are not.
    """
    return name not in _NO_SECRETS and _SECRET_VARIABLE.search(name) is not None


def check_no_secrets(config: Any, environment: Mapping[str, str]) -> None:
    """ValueError for a setting that is a key by its name, or holds the value of a variable that is one, or a URL with a
    password.

    The message names the setting, never its value.
    """
    secrets = {value: name for name, value in environment.items() if is_secret_name(name) and len(value) >= SHORTEST}
    flags = read_flags(config.environment.script[1:])  # of a TRL script that gives the environment
    for name, value in (*_leaves("", dataclasses.asdict(config)), *_leaves("environment.factory", flags)):
        key = name.rpartition(".")[2].replace("-", "_")
        if not isinstance(value, str) or not value:
            continue
        held = next((variable for secret, variable in secrets.items() if secret in value), None)
        if held is not None:
            raise ValueError(f"{name} holds the value of {held}: settings are written down and logged{_instead(name)}")
        if _KEY_NAME.search(key):
            raise ValueError(f"{name} is a key by its name: settings are written down and logged{_instead(name)}")
        if _KEY_PREFIX.search(value) or (_MAYBE_KEY_NAME.search(key) and _LIKE_A_KEY.fullmatch(value)):
            raise ValueError(
                f"{name} holds what looks like a key: settings are written down and logged{_instead(name)}"
            )
        if _LOGIN_IN_URL.search(value):
            raise ValueError(
                f"{name} holds a URL with a password: settings are written down and logged{_instead(name)}"
            )


def _instead(name: str) -> str:
    if name.startswith("reward."):
        return "; set an environment variable, name it in reward.environment=[NAME], and read it in the function"
    return "; take it out, and let the library read it from its own environment variable"


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """("reward.functions[0].kwargs.x", value) of every value in nested dicts and lists."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _leaves(f"{name}[{index}]", inner)
    else:
        yield name, value

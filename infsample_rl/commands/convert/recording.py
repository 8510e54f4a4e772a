"""What a launch script would start, and what a TRL script gives its trainer: they are run, in the sandbox of rewards.

bash runs a launch script with the launchers on its PATH replaced by a recorder of arguments; Python runs a TRL script
against modules that record (trl_run.py). No network, no file but of FILE's and the current folder, nothing written.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import yaml

from infsample_rl.config import RewardConfig, RewardFunctionConfig
from infsample_rl.config.peer_flags import yaml_loader
from infsample_rl.config.secrets import is_secret_name
from infsample_rl.reward.isolation import holds_home, isolation_of, start_keeper

TIME_LIMIT_S = 60.0


def words_of(path: Path, arguments: list[str], training: str, last: str = "") -> list[str]:
    """The folder and the words of a shell script's last command in which `training` is found, up to the first with
    `last`, else `training`. ValueError in one line where there is none, which says how the script ended."""
    how, record = _run(["bash", str(path), *arguments], path, {"INFSAMPLE_RL_TRAINING": last or training})
    fields = iter(record.split("\0")[:-1])
    commands = [[next(fields) for _ in range(int(count) + 2)] for count in fields]
    commands = [words for words in commands if re.search(training, " ".join(words[1:]))]
    if not commands:
        raise ValueError(f"{path} {how or 'ended'} before it started a trainer: no command has {training}")
    in_shells = re.compile("-[a-z]*c")  # what `bash -c` is given is a command in one word
    pairs = pairwise(["", *commands[-1]])
    return [part for before, word in pairs for part in (shlex.split(word) if in_shells.fullmatch(before) else [word])]


def trainer_of(path: Path, arguments: list[str], flags: dict[str, Any]) -> dict[str, Any]:
    """What a TRL script with these flags has given its trainer when it calls train(), as trl_run.py writes it.
    ValueError in one line where it gets no trainer."""
    program = [sys.executable, "-m", "infsample_rl.commands.convert.trl_run", json.dumps(flags)]
    how, record = _run([*program, str(path), *arguments], path, {"PYTHONPATH": os.pathsep.join(sys.path)})
    if not record:
        raise ValueError(f"{path} {how or 'ended'} before it called train() of a trainer")
    return json.loads(record)


def _run(program: list[str], path: Path, variables: dict[str, str]) -> tuple[str, str]:
    """Run a program in the sandbox: how it failed, "" where it did not, and what was recorded up to then."""
    beside = [folder for folder in (str(path.resolve().parent), os.getcwd()) if not holds_home(folder)]
    rewards = RewardConfig(
        functions=[RewardFunctionConfig(name="math")], isolation="sandbox", read_paths=[str(path.resolve()), *beside]
    )
    isolation = isolation_of(rewards, [])
    kept = {name: value for name, value in os.environ.items() if not is_secret_name(name)}
    with start_keeper(isolation, "infsample_rl.commands.convert.sandboxed_run", stderr=DEVNULL) as keeper:
        assert keeper.stdin is not None and keeper.stdout is not None
        late = threading.Timer(TIME_LIMIT_S, keeper.terminate)
        late.start()
        keeper.stdin.write(json.dumps({"program": program, "environment": kept | variables}).encode() + b"\n")
        keeper.stdin.flush()
        replies = [json.loads(line) for line in keeper.stdout if line.strip()]
        too_late = not late.is_alive()
        late.cancel()
    reply = replies[0] if replies else {"died": "without a word"}
    if "error" in reply:
        raise ValueError(f"{path} is run to be read, in the sandbox of reward functions: {reply['error']}")
    if "died" in reply:
        return f"did not end within {TIME_LIMIT_S:.0f} s" if too_late else f"was ended ({reply['died']})", ""
    return f"ended with exit code {reply['code']} ({reply['said']})" if reply["code"] else "", reply["record"]


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping. ValueError otherwise."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), yaml_loader())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a mapping of settings, got {type(content).__name__}")
    return content


def flatten(content: Mapping[str, Any], keep: tuple[str, ...] = (), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("a.b", value) of every leaf; what is under a name of `keep` stays whole."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in keep:
            yield from flatten(value, keep, f"{name}.")
        else:
            yield name, value

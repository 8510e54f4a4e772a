"""Compose `configs/` with Hydra into one checked Config. Every problem is one line of ConfigError, found before Ray
starts."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infsample_rl.config import DATA_NAMES, Config
from infsample_rl.config.fields import default_of, did_you_mean
from infsample_rl.config.files import check_experiments, check_not_hidden, where_set, where_written
from infsample_rl.config.overrides import (
    PACKAGE,
    SECTIONS,
    ConfigError,
    as_list,
    check_override,
    config_folder,
    normalise,
    not_a_setting,
)
from infsample_rl.config.secrets import check_no_secrets

DEFAULT_EXPERIMENT = "kk_tiny"
RESUME = ("auto", "never")
RESUME_FORMS = f"{', '.join(RESUME)}, or a checkpoint RUN/checkpoints/step_N"


def cache_folder() -> Path:
    """Where converted models are kept: $INFSAMPLE_RL_CACHE, else infsample_rl in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infsample_rl"
    return Path(os.environ.get("INFSAMPLE_RL_CACHE") or default)


def compose(overrides: list[str], config_dir: str | None = None) -> dict[str, Any]:
    """The composed settings as plain nested dicts, types checked, bounds not yet. ConfigError on anything wrong."""
    return _compose(overrides, config_dir)[0]


def _compose(overrides: list[str], config_dir: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings, and which choice was made of every group."""
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    overrides = [normalise(override) for override in overrides]
    for override in overrides:
        check_override(override, config_dir)
    if not any(override.startswith("+experiment=") for override in overrides):
        overrides = [f"+experiment={DEFAULT_EXPERIMENT}", *overrides]
    check_experiments(overrides, config_dir)
    if config_dir is not None:
        overrides.append(f"hydra.searchpath=['file://{Path(config_dir).resolve()}']")
    _register_schema()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            composed = hydra_compose("config", overrides=overrides, return_hydra_config=True)
            choices = dict(composed.hydra.runtime.choices)
            if config_dir is not None:
                check_not_hidden(choices, config_dir)
            own = OmegaConf.masked_copy(composed, [str(name) for name in composed if name != "hydra"])
            _check_sections(own, overrides, config_dir)
            settings: Any = OmegaConf.to_container(own, resolve=True)
            return {name: settings[name] for name in SECTIONS}, choices
    except (HydraException, OmegaConfBaseException) as error:
        line = _one_line(error, overrides)
        raise ConfigError(line + where_written(line.split(" ")[0].rstrip(":"), overrides, config_dir)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("a file of the config folders is not YAML: " + " ".join(str(error).split())) from None


def _check_sections(composed: Any, overrides: list[str], config_dir: str | None) -> None:
    """ConfigError for a section that is empty, and for what is none: Hydra composes it, and nothing would read it. A
    name that values refer to, as ${name}, is a user's own."""
    from omegaconf import DictConfig, OmegaConf

    for section in map(str, composed):
        if section in SECTIONS and composed[section] is not None:
            continue
        where = where_written(section, overrides, config_dir)
        if section in SECTIONS:
            raise ConfigError(f"{section} is empty{where}: write a setting below it, or leave it out")
        if not re.search(rf"\${{{re.escape(section)}[}}.\[]", OmegaConf.to_yaml(composed)):
            name, node = section, composed._get_node(section)
            while isinstance(node, DictConfig) and len(node) > 0:
                key = str(next(iter(node)))
                name, node = f"{name}.{key}", node._get_node(key)
            raise ConfigError(not_a_setting(name, config_dir) + where)


@functools.cache
def _register_schema() -> None:
    """Tell Hydra what sections and resolvers there are, once for a process."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("asset", lambda name: str(PACKAGE / "assets" / name), replace=True)
    OmegaConf.register_new_resolver("cache", lambda name: str(cache_folder() / name), replace=True)
    schema = OmegaConf.create({name: OmegaConf.structured(section) for name, section in SECTIONS.items()})
    ConfigStore.instance().store(name="schema", node=schema)


def load_config(overrides: list[str], config_dir: str | None = None) -> Config:
    """Compose, make every path absolute, check every bound and contradiction. ConfigError with one line otherwise,
    which names the files that have set what it speaks of."""
    settings, choices = _compose(overrides, config_dir)
    _make_paths_absolute(settings)
    try:
        config = Config(**{name: section(**settings[name]) for name, section in SECTIONS.items()})
        check_no_secrets(config, os.environ)
        return config
    except ValueError as error:
        raise ConfigError(f"{error}{where_set(str(error), overrides, choices, config_dir)}") from None


def _one_line(error: Exception, overrides: list[str]) -> str:
    """Hydra's and OmegaConf's pages as one line with the setting's name; the overrides have the value of a list."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    key = getattr(cause, "full_key", None) or getattr(error, "full_key", None) or ""
    text = str(cause).strip()
    lines = text.split("\n")
    first = lines[1] if "raised while composing" in lines[0] and len(lines) > 1 else lines[0]
    found = re.search(r"full_key: (\S+)", text)
    key = key or (found.group(1) if found else "")
    types = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "bool": "true or false"}
    wrong_type = re.match(r"Value '(.*?)' (?:of type '\w+' )?(?:could not be converted to|is not a valid) (\w+)", first)
    if wrong_type:
        return (
            f"{key} must be {types.get(wrong_type.group(2), wrong_type.group(2))}, got "
            f"{wrong_type.group(1)!r}{_default_of(key)}"
        )
    given = {name.lstrip("+"): value for name, _, value in (override.partition("=") for override in overrides)}
    if "is not a ListConfig" in first:
        return f"{key}: {as_list(key, given.get(key, '...'))}"
    if no_mapping := re.match(r"Cannot assign (\w+) to Dict", first):
        got = given.get(key, no_mapping[1])
        return f"{key} must be a mapping, got {got}: write {key}.NAME=VALUE for each of its keys"
    if added := re.match(r"Could not append .* already at '(.*)'|Multiple values for (\w+)\.", first):
        name = added[1] or added[2]
        return f"{name} has a value, and a plus only adds what is not there: write {name}={given.get(name, '...')}"
    unknown = re.search(r"Key '(\w+)' (?:is )?not in '?(\w+)'?", text)
    if unknown:
        return not_a_setting(key or unknown.group(1))
    return (f"{key}: " if key and key not in first else "") + first


def _default_of(name: str) -> str:
    section, _, key = name.partition(".")
    specs = {spec.name: spec for spec in dataclasses.fields(SECTIONS[section])} if section in SECTIONS else {}
    return f"; the default is {json.dumps(default_of(specs[key]))}" if key in specs else ""


def _run_of(checkpoint: str) -> Path:
    """The run folder that run.resume=RUN/checkpoints/step_N goes on in. ConfigError for another folder: run.dir has to
    say it then."""
    parent = Path(checkpoint).expanduser().resolve().parent
    folder = parent.parent if parent.name == "superseded" else parent
    if folder.name != "checkpoints":
        raise ConfigError(
            f"run.resume must be {RESUME_FORMS}, got {checkpoint!r}; for one that lies elsewhere give run.dir too"
        )
    return folder.parent


def _check_resume(resume: str) -> None:
    """ConfigError for a word that is neither a choice nor a folder. A path may be elsewhere or gone: a run's settings
    are read again long after the checkpoint it went on from."""
    if resume not in RESUME and "/" not in resume and not Path(resume).expanduser().is_dir():
        hint = did_you_mean(resume.lower(), RESUME)
        raise ConfigError(f"run.resume must be {RESUME_FORMS}, got {resume!r}, which is no folder{hint}")


def _make_paths_absolute(settings: dict[str, Any]) -> None:
    """Resolve every local path against the current directory; a Ray worker starts elsewhere."""
    run, model, data = settings["run"], settings["model"], settings["data"]
    _check_resume(run["resume"])
    if run["dir"] is None:
        if run["resume"] not in RESUME:
            run["dir"] = str(_run_of(run["resume"]))
        else:
            run["dir"] = f"runs/{run['name']}-{time.strftime('%Y%m%d-%H%M%S')}"
    if run["dir"] == "":
        raise ConfigError("run.dir is empty, as a shell's variable that is not set: give a folder, or leave it out")
    run["dir"] = _absolute(run["dir"])
    if run["resume"] not in RESUME:
        run["resume"] = _absolute(run["resume"])
    for section, key in (
        (model, "path"),
        (model, "tokenizer_path"),
        (settings["reference"], "path"),
        (settings["rollout"], "predictor_path"),
    ):
        section[key] = _absolute_if_local(section[key])
    for section, key in ((model, "chat_template"), (settings["rollout"], "vllm_python")):
        if section[key] is not None:
            section[key] = _absolute(section[key])
    for key in ("source", "eval_source"):
        data[key] = _absolute_source(data[key])
        data["sources"] = [_with_absolute(entry, key, _absolute_source) for entry in data["sources"]]
    for entry in (entry for entry in data["sources"] if isinstance(entry, dict)):
        given = entry.get("reward", [])
        entry["reward"] = [
            _with_absolute(name, "name", _absolute_function) for name in (given if isinstance(given, list) else [given])
        ]
    environment, rollout = settings["environment"], settings["rollout"]
    environment["tools"] = list(map(_absolute_function, environment["tools"]))
    if environment["factory"] is not None:
        environment["factory"] = _absolute_factory(environment["factory"])
    if "/" in rollout["preemption"]:
        rollout["preemption"] = _absolute(rollout["preemption"])
    reward = settings["reward"]
    reward["functions"] = [
        _with_absolute(named, "prompt", _absolute) if isinstance(named, dict) else named
        for named in (_with_absolute(entry, "name", _absolute_function) for entry in reward["functions"])
    ]
    reward["read_paths"] = list(map(_absolute, reward["read_paths"]))


def _with_absolute(entry: Any, key: str, absolute: Callable[[Any], Any]) -> Any:
    """An entry of a list, a text or the keys of a setting, with an absolute path in it; what is neither as it is."""
    if isinstance(entry, dict):
        return {**entry, key: absolute(entry[key])} if isinstance(entry.get(key), str) else entry
    return absolute(entry) if isinstance(entry, str) else entry


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _absolute_source(source: str | None) -> str | None:
    return source if source in DATA_NAMES else _absolute_if_local(source)


def _absolute_function(function: str) -> str:
    """A reward function by the absolute path of its file or of its model."""
    path, colon, name = function.rpartition(":")
    if path.endswith(".py"):
        return f"{Path(path).expanduser().absolute()}{colon}{name}"
    return f"model:{_absolute_if_local(name)}" if function.startswith("model:") else function


def _absolute_factory(factory: str) -> str:
    """environment.factory by the absolute path of its file, which is the first word of a script and its arguments."""
    try:
        first, *arguments = shlex.split(factory)
    except ValueError:
        return factory  # its own check says why
    return shlex.join([_absolute(first), *arguments]) if first.endswith(".py") else _absolute_function(factory)


def _absolute_if_local(path: str | None) -> str | None:
    """A hub name stays as it is; what exists here, or can only be a file, becomes absolute."""
    if path is None or path.startswith("reasoning_gym:"):
        return path
    local = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or local.suffix in (".json", ".jsonl", ".parquet")
    return str(local.absolute()) if path and (looks_local or local.exists()) else path

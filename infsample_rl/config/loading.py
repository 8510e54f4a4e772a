"""Compose `configs/` with Hydra into one checked Config. Every problem is one line of ConfigError, found before Ray
starts."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from infsample_rl.config import DATA_NAMES, Config, RewardFunctionConfig
from infsample_rl.config.fields import default_of
from infsample_rl.config.removed import why_removed
from infsample_rl.config.secrets import check_no_secrets

SECTIONS: dict[str, type] = {spec.name: spec.default_factory for spec in dataclasses.fields(Config)}  # type: ignore[misc]
DEFAULT_EXPERIMENT = "kk_tiny"
PACKAGE = Path(__file__).resolve().parents[1]


class ConfigError(ValueError):
    """A wrong setting, in one line: its name, the value, the bound, and the nearest thing that works."""


def config_folder() -> Path:
    """The checkout's `configs/` beside the package, else the copy inside the installed wheel."""
    checkout = PACKAGE.parent / "configs"
    return checkout if (checkout / "config.yaml").is_file() else PACKAGE / "configs"


def cache_folder() -> Path:
    """Where converted models are kept: $INFSAMPLE_RL_CACHE, else infsample_rl in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infsample_rl"
    return Path(os.environ.get("INFSAMPLE_RL_CACHE") or default)


def compose(overrides: list[str], config_dir: str | None = None) -> dict[str, Any]:
    """The composed settings as plain nested dicts, types checked, bounds not yet. ConfigError on anything wrong."""
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    overrides = [_normalise(override) for override in overrides]
    for override in overrides:
        _check_override(override, config_dir)
    if not any(override.startswith("+experiment=") for override in overrides):
        overrides = [f"+experiment={DEFAULT_EXPERIMENT}", *overrides]
    if config_dir is not None:
        overrides.append(f"hydra.searchpath=['file://{Path(config_dir).resolve()}']")
    OmegaConf.register_new_resolver("asset", lambda name: str(PACKAGE / "assets" / name), replace=True)
    OmegaConf.register_new_resolver("cache", lambda name: str(cache_folder() / name), replace=True)
    schema = OmegaConf.create({name: OmegaConf.structured(section) for name, section in SECTIONS.items()})
    ConfigStore.instance().store(name="schema", node=schema)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            return OmegaConf.to_container(hydra_compose("config", overrides=overrides), resolve=True)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from None
    except yaml.YAMLError as error:
        raise ConfigError("a file of the config folders is not YAML: " + " ".join(str(error).split())) from None


def load_config(overrides: list[str], config_dir: str | None = None) -> Config:
    """Compose, make every path absolute, check every bound and contradiction. ConfigError with one line otherwise."""
    settings = compose(overrides, config_dir)
    _make_paths_absolute(settings)
    try:
        settings["reward"]["functions"] = [RewardFunctionConfig(**entry) for entry in settings["reward"]["functions"]]
        config = Config(**{name: section(**settings[name]) for name, section in SECTIONS.items()})
        check_no_secrets(config, os.environ)
        return config
    except ValueError as error:
        raise ConfigError(str(error)) from None


def experiments(config_dir: str | None = None) -> list[str]:
    """Names `+experiment=` takes, the user's own folder included."""
    return _choices(config_dir)["experiment"]


def _choices(config_dir: str | None) -> dict[str, list[str]]:
    """Group of the config folders -> what it may be set to."""
    folders = [config_folder()] + ([Path(config_dir)] if config_dir else [])
    groups = {path.name for folder in folders for path in folder.glob("*") if path.is_dir()}
    return {
        group: sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")}) for group in groups
    }


def _normalise(override: str) -> str:
    """Let `experiment=NAME` and new keys of dictionaries, `data.chat_template_kwargs.x=1`, be written without Hydra's
    plus."""
    if override.startswith("experiment="):
        return "+" + override
    section, *keys = override.partition("=")[0].split(".")
    is_in_dict = len(keys) > 1 and f"{section}.{keys[0]}" in setting_names()
    return "++" + override if is_in_dict else override


def _check_override(override: str, config_dir: str | None) -> None:
    """Refuse what Hydra would answer with a page: no `=`, an unknown name, a value that needs quotes."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    name, equals, value = override.partition("=")
    name = name.lstrip("+")
    if name.startswith("~"):
        raise ConfigError(f"{override}: settings cannot be deleted; give a value instead, e.g. {name[1:]}=null")
    if not equals or not name:
        raise ConfigError(
            f"{override!r} is not name=value{_nearest(name, config_dir)}; a value with spaces needs quotes, as in "
            "'data.instruction=\"Think first.\"'"
        )
    _check_name(name, value, config_dir)
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        quoted = value.replace('"', '\\"')
        raise ConfigError(
            f"{name}: the value {value!r} cannot be read; a value with =, spaces, commas, quotes or brackets "
            f"needs two pairs of quotes: '{name}=\"{quoted}\"'"
        ) from None


def _check_name(name: str, value: str, config_dir: str | None) -> None:
    options = _choices(config_dir).get(name)
    if options is not None and value not in options:
        close = difflib.get_close_matches(value, options, n=1, cutoff=0.3)
        hint = f"; did you mean {name}={close[0]}?" if close else ""
        raise ConfigError(f"{name}={value}: there is no such choice; there are {', '.join(options)}{hint}")
    if name.startswith("hydra"):
        raise ConfigError(
            f"{name}: Hydra only composes the settings here and writes nothing; set run.dir, and --config-dir for a "
            "folder of your own"
        )
    # a key of a dictionary, or an item of a list, belongs to its setting
    known = re.match(r"[^.]*\.[^.\[]*", name)
    if options is None and (known is None or known[0] not in setting_names()):
        raise ConfigError(_not_a_setting(name, config_dir))


def setting_names() -> list[str]:
    """Every `section.key` there is."""
    return [f"{name}.{spec.name}" for name, section in SECTIONS.items() for spec in dataclasses.fields(section)]


def _not_a_setting(name: str, config_dir: str | None = None) -> str:
    return why_removed(name) or f"{name} is not a setting{_nearest(name, config_dir)}"


def _nearest(name: str, config_dir: str | None) -> str:
    by_key = {full.partition(".")[2]: full for full in setting_names()}
    close = difflib.get_close_matches(name, setting_names() if "." in name else sorted(_choices(config_dir)), n=1)
    close = close or [by_key[key] for key in difflib.get_close_matches(name.rpartition(".")[2], list(by_key), n=1)]
    return (
        f"; did you mean {close[0]}?"
        if close
        else f"; sections are {', '.join(SECTIONS)} (python -m infsample_rl.main --cfg job prints all)"
    )


def _one_line(error: Exception) -> str:
    """Hydra's and OmegaConf's pages as one line with the setting's name."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    key = getattr(cause, "full_key", None) or getattr(error, "full_key", None) or ""
    text = str(cause).strip()
    first = text.split("\n")[0]
    found = re.search(r"full_key: (\S+)", text)
    key = key or (found.group(1) if found else "")
    types = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "bool": "true or false"}
    wrong_type = re.match(r"Value '(.*?)' (?:of type '\w+' )?(?:could not be converted to|is not a valid) (\w+)", first)
    if wrong_type:
        key = (
            f"reward.functions: an entry's {key}"
            if key in {spec.name for spec in dataclasses.fields(RewardFunctionConfig)}
            else key
        )
        return (
            f"{key} must be {types.get(wrong_type.group(2), wrong_type.group(2))}, got "
            f"{wrong_type.group(1)!r}{_default_of(key)}"
        )
    unknown = re.search(r"Key '(\w+)' (?:is )?not in '?(\w+)'?", text)
    if unknown and unknown.group(2) == RewardFunctionConfig.__name__:
        takes = ", ".join(spec.name for spec in dataclasses.fields(RewardFunctionConfig))
        return f"reward.functions: an entry takes {takes}, not {unknown.group(1)}"
    if unknown:
        return _not_a_setting(key or unknown.group(1))
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
        known = "auto, never, or a checkpoint RUN/checkpoints/step_N"
        raise ConfigError(
            f"run.resume must be {known}, got {checkpoint!r}; for one that lies elsewhere give run.dir too"
        )
    return folder.parent


def _make_paths_absolute(settings: dict[str, Any]) -> None:
    """Resolve every local path against the current directory; a Ray worker starts elsewhere."""
    run, model, data = settings["run"], settings["model"], settings["data"]
    if run["dir"] is None:
        if run["resume"] not in ("auto", "never"):
            run["dir"] = str(_run_of(run["resume"]))
        else:
            run["dir"] = f"runs/{run['name']}-{time.strftime('%Y%m%d-%H%M%S')}"
    run["dir"] = str(Path(run["dir"]).expanduser().absolute())
    if run["resume"] not in ("auto", "never"):
        run["resume"] = str(Path(run["resume"]).expanduser().absolute())
    for section, key in (
        (model, "path"),
        (model, "tokenizer_path"),
        (settings["reference"], "path"),
        (settings["rollout"], "predictor_path"),
    ):
        section[key] = _absolute_if_local(section[key])
    for key in ("source", "eval_source"):
        data[key] = data[key] if data[key] in DATA_NAMES else _absolute_if_local(data[key])
    for function in settings["reward"]["functions"]:
        path, colon, name = function["name"].rpartition(":")
        if path.endswith(".py"):
            function["name"] = f"{Path(path).expanduser().absolute()}{colon}{name}"
        elif function["name"].startswith("model:"):
            function["name"] = f"model:{_absolute_if_local(name)}"
    reward = settings["reward"]
    reward["read_paths"] = [str(Path(path).expanduser().absolute()) for path in reward["read_paths"]]


def _absolute_if_local(path: str | None) -> str | None:
    """A hub name stays as it is; what exists here, or can only be a file, becomes absolute."""
    if path is None or path.startswith("reasoning_gym:"):
        return path
    local = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or local.suffix in (".json", ".jsonl", ".parquet")
    return str(local.absolute()) if path and (looks_local or local.exists()) else path

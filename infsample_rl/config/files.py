"""Which file of the config folders has set a setting, so that an error can name it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from infsample_rl.config.fields import default_of
from infsample_rl.config.overrides import SECTIONS, ConfigError, choices, config_folder, setting_names

IS_GLOBAL = "@package _global_"  # in a comment, as Hydra reads it
PACKAGE_LINE = f"# {IS_GLOBAL}"


def check_experiments(overrides: list[str], config_dir: str | None) -> None:
    """ConfigError for an experiment of the user's that Hydra would misread, or refuse in words of its own."""
    for name in (override.partition("=")[2] for override in overrides if override.startswith("+experiment=")):
        path = Path(config_dir or ".") / "experiment" / f"{name}.yaml"
        if config_dir is None or not path.is_file():
            continue
        try:
            is_global = _is_global(path)
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8: save it in that encoding") from None
        content = _content(path) or {}
        if not isinstance(content, dict):
            raise ConfigError(f"{path} must be sections of settings, got a {type(content).__name__}")
        if not is_global:
            raise ConfigError(f"{path}: the first line must be `{PACKAGE_LINE}`, or none of its settings counts")
        for section in SECTIONS.keys() & content.keys():
            _check_section(section, content[section], path)
        for entry in content.get("defaults") or []:
            _check_default(entry, path, choices(config_dir))


def check_not_hidden(chosen: dict[str, str], config_dir: str) -> None:
    """ConfigError for a file of the user's whose name is chosen and that of a shipped one, which Hydra takes."""
    for group, choice in chosen.items():
        own, shipped = (Path(folder, group, f"{choice}.yaml") for folder in (config_dir, config_folder()))
        if own.is_file() and shipped.is_file() and own.read_bytes() != shipped.read_bytes():
            raise ConfigError(f"{own} is never read: {group}={choice} is a shipped choice; give it another name")


def _check_section(section: str, given: Any, path: Path) -> None:
    """ConfigError for a section, or a list in it, that is something else."""
    if given is not None and not isinstance(given, dict):
        raise ConfigError(f"{section} must be a section of settings, got {given!r} (in {path})")
    lists = {spec.name for spec in fields(SECTIONS[section]) if isinstance(default_of(spec), list)}
    for key, value in (given or {}).items():
        if key in lists and not isinstance(value, list) and "${" not in str(value):
            raise ConfigError(f"{section}.{key} must be a list, got {value!r} (in {path})")


def _check_default(entry: Any, path: Path, known: dict[str, list[str]]) -> None:
    """ConfigError for a choice that does not override the one that is made already, or is none."""
    for group, choice in entry.items() if isinstance(entry, dict) else ():
        name = str(group).removeprefix("override ").lstrip("/ ")
        if name not in known:
            continue
        if group != f"override /{name}":
            raise ConfigError(f"{path}: its defaults must say `override /{name}: {choice}`, got `{group}: {choice}`")
        if isinstance(choice, str) and choice not in known[name]:
            raise ConfigError(f"{path}: {group}: {choice}: there is no such choice; there are {', '.join(known[name])}")


def where_written(name: str, overrides: list[str], config_dir: str | None) -> str:
    """ " (in FILE)" of the user's own files that write `name`, a setting or what stands beside sections; those that
    overrides choose, if any does. Empty where none does."""
    files = [] if config_dir is None else sorted(Path(config_dir).rglob("*.yaml"))
    found = [path for path in files if name in _names_in(path)]
    chosen = {override.partition("=")[2] for override in overrides}
    found = [path for path in found if path.stem in chosen] or found
    return f" (in {', '.join(map(str, found))})" if found else ""


def where_set(message: str, overrides: list[str], choices: dict[str, str], config_dir: str | None) -> str:
    """ "; FILE sets NAME, NAME" of the settings that a message speaks of and no override has set. A choice's own file
    goes before those that its defaults list names, as in Hydra."""
    given = {override.partition("=")[0].lstrip("+") for override in overrides}
    names = [name for name in setting_names() if name not in given and re.search(rf"\b{re.escape(name)}\b", message)]
    folders = [folder for folder in (config_dir, config_folder()) if folder is not None]
    groups = sorted(choices, key=lambda group: group != "experiment")  # it has the last word
    said: dict[Path, list[str]] = {}
    for name in names:
        paths = (path for group in groups for path in _files_of(group, choices[group], folders))
        path = next((path for path in paths if name in _names_in(path)), None)
        if path is not None:
            said.setdefault(path, []).append(name)
    return "".join(f"; {_short(path)} sets {', '.join(found)}" for path, found in said.items())


def _files_of(group: str, choice: str, folders: list[Any]) -> Iterator[Path]:
    """The files of a choice, then those of the same group that their defaults lists name, the last word first."""
    for path in (Path(folder) / group / f"{choice}.yaml" for folder in folders):
        content = _content(path)
        if content is not None:
            yield path
            defaults = content.get("defaults") if isinstance(content, dict) else None
            for parent in reversed(defaults or []):
                name = parent.removeprefix(f"/{group}/") if isinstance(parent, str) else choice
                if name not in ("_self_", choice):
                    yield from _files_of(group, name, folders)


def _names_in(path: Path) -> set[str]:
    """Names of all settings that a file gives, and what one of whole settings has at its top; none of one that is
    missing or no YAML."""
    content = _content(path)
    is_whole = isinstance(content, dict) and _is_global(path)
    sections = content if is_whole else {path.parent.name: content}
    names = {f"{name}.{key}" for name, keys in sections.items() if isinstance(keys, dict) for key in keys}
    return names | set(map(str, content)) if is_whole else names


def _is_global(path: Path) -> bool:
    return IS_GLOBAL in path.read_text(encoding="utf-8")


def _content(path: Path) -> Any:
    """What a YAML file holds; None of one that is missing or no YAML."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)

"""Names and values on the command line: which settings and choices there are, and what is wrong with others."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import shlex
from pathlib import Path
from typing import Any, NoReturn

from infsample_rl.config import Config
from infsample_rl.config.removed import why_removed

SECTIONS: dict[str, type] = {  # every section of a Config has a factory
    spec.name: spec.default_factory  # type: ignore[misc]
    for spec in dataclasses.fields(Config)
}
PACKAGE = Path(__file__).resolve().parents[1]
OWN = {
    "model": "model.path={}",
    "data": "data.source={}",
    "reward": "reward.functions=[{}]",
}  # beside a group's choices


class ConfigError(ValueError):
    """A wrong setting, in one line: its name, the value, the bound, and the nearest thing that works."""


def config_folder() -> Path:
    """The checkout's `configs/` beside the package, else the copy inside the installed wheel."""
    checkout = PACKAGE.parent / "configs"
    return checkout if (checkout / "config.yaml").is_file() else PACKAGE / "configs"


def parse_flags(arguments: list[str], flags: dict[str, dict[str, Any]] | None = None) -> argparse.Namespace:
    """`words`, the name=value among the arguments, apart from `config_dir` and further `flags` (add_argument's
    keywords). ConfigError for one that there is not, or a --config-dir that is no folder."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # --config FILE means no --config-dir
    flags = {"--config-dir": {}} | (flags or {})
    for name, options in flags.items():
        parser.add_argument(*name.split(), **options)
    parser.add_argument("words", nargs="*")

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; flags are {', '.join(flags)}")

    parser.error = refuse  # type: ignore[method-assign]  # as argparse's own page says for another way to exit
    found, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0]
        own = "; a file is given as DIR/experiment/NAME.yaml by --config-dir DIR +experiment=NAME"
        hint = own if name.startswith("--config") else ""
        refuse(f"{name} is no flag{hint}; settings are given without dashes, as rollout.slots=4")
    if found.config_dir is not None and not os.path.isdir(found.config_dir):
        raise ConfigError(f"--config-dir {found.config_dir} is not a folder")
    return found


def experiments(config_dir: str | None = None) -> list[str]:
    """Names `+experiment=` takes, the user's own folder included."""
    return choices(config_dir)["experiment"]


def choices(config_dir: str | None) -> dict[str, list[str]]:
    """Group of the config folders -> what it may be set to."""
    folders = [config_folder()] + ([Path(config_dir)] if config_dir else [])
    groups = {path.name for folder in folders for path in folder.glob("*") if path.is_dir()}
    return {
        group: sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")}) for group in groups
    }


def normalise(override: str) -> str:
    """Let `experiment=NAME` and new keys of dictionaries, `data.chat_template_kwargs.x=1` or `={x: 1}`, be written
    without Hydra's plus, and null as none, which messages say."""
    if override.startswith("experiment="):
        return "+" + override
    name, _, value = override.partition("=")
    section, *keys = name.split(".")
    if not keys or f"{section}.{keys[0]}" not in setting_names():
        return override
    spec = next(spec for spec in dataclasses.fields(SECTIONS[section]) if spec.name == keys[0])
    if value == "none" and str(spec.type).endswith(" | None"):
        return f"{name}=null"
    gives_keys = len(keys) > 1 or (value.startswith("{") and str(spec.type).startswith("dict"))
    return "++" + override if gives_keys else override


def sweep(overrides: list[str], config_dir: str | None) -> list[list[str]]:
    """The overrides of every run of a multirun: `a=1,2 b=3` -> [[a=1, b=3], [a=2, b=3]]. ConfigError as ever."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    overrides = [normalise(override) for override in overrides]
    for override in overrides:
        check_override(override, config_dir, in_sweep=True)
    return BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), max_batch_size=None)[0]


def check_override(override: str, config_dir: str | None, *, in_sweep: bool = False) -> None:
    """Refuse what Hydra would answer with a page: no `=`, an unknown name, a value that needs quotes, or several."""
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
    _check_name(name, config_dir)
    try:
        is_sweep = OverridesParser.create().parse_override(override).is_sweep_override()
    except HydraException:
        raise ConfigError(
            f"{name}: the value {value!r} cannot be read; a value with =, spaces, commas, quotes or brackets "
            f"needs two pairs of quotes: {_quoted(name, value)}"
        ) from None
    if is_sweep and not in_sweep:
        raise ConfigError(f"{override} gives several values: -m runs one after another{_as_one(name, value)}")
    if not is_sweep:
        _check_choice(name, value, config_dir)


def _quoted(name: str, value: str) -> str:
    """What a shell is given for a text that Hydra would read otherwise: 'data.instruction="a, b"'."""
    escaped = value.replace('"', '\\"')
    return shlex.quote(f'{name}="{escaped}"')


def as_list(name: str, value: str) -> str:
    """ "give a list, reward.functions=[kk]" of a setting that is one, where a value alone was given."""
    return f"give a list, {name}=[{value}]"


def _as_one(name: str, value: str) -> str:
    """How to give values with commas between as one: a list or a text, as the setting is; "" where it is neither."""
    section, _, key = name.partition(".")
    specs = [spec for spec in dataclasses.fields(SECTIONS[section]) if spec.name == key] if section in SECTIONS else []
    if any(str(spec.type).startswith("list") for spec in specs):
        return f"; for all of them in one run {as_list(name, value)}"
    if any(str(spec.type).startswith("str") and not spec.metadata["choices"] for spec in specs):
        return f"; a text with commas needs two pairs of quotes: {_quoted(name, value)}"
    return ""


def _check_choice(name: str, value: str, config_dir: str | None) -> None:
    """ConfigError for a choice that a group has not, with the setting for what the user has of his own."""
    options = choices(config_dir).get(name)
    if options is not None and value not in options:
        own = f"; for one of your own give {OWN[name].format(value)}" if name in OWN else ""
        close = difflib.get_close_matches(value, options, n=1, cutoff=0.6 if own else 0.3)
        hint = f"; did you mean {name}={close[0]}?" if close else ""
        raise ConfigError(f"{name}={value}: there is no such choice; there are {', '.join(options)}{own}{hint}")


def _check_name(name: str, config_dir: str | None) -> None:
    """ConfigError for what is neither a setting nor a group."""
    if name.startswith("hydra"):
        raise ConfigError(
            f"{name}: Hydra only composes the settings here and writes nothing; set run.dir, and --config-dir for a "
            "folder of your own"
        )
    # a key of a dictionary, or an item of a list, belongs to its setting
    known = re.match(r"[^.]*\.[^.\[]*", name)
    if name not in choices(config_dir) and (known is None or known[0] not in setting_names()):
        raise ConfigError(not_a_setting(name, config_dir))


def setting_names() -> list[str]:
    """Every `section.key` there is."""
    return [f"{name}.{spec.name}" for name, section in SECTIONS.items() for spec in dataclasses.fields(section)]


def not_a_setting(name: str, config_dir: str | None = None) -> str:
    return why_removed(name) or f"{name} is not a setting{_nearest(name, config_dir)}"


def _nearest(name: str, config_dir: str | None) -> str:
    names, (section, _, key) = setting_names(), name.rpartition(".")
    if section in SECTIONS:  # names of a section have its name in common, which says nothing
        of_section = [full.partition(".")[2] for full in names if full.startswith(f"{section}.")]
        close = [f"{section}.{found}" for found in difflib.get_close_matches(key, of_section, n=1)]
    else:
        close = difflib.get_close_matches(name, names if section else sorted(choices(config_dir)), n=1, cutoff=0.7)
    if not close:  # the nearest key, of every section that has it
        keys = difflib.get_close_matches(key, [full.partition(".")[2] for full in names], n=1, cutoff=0.7)
        close = [full for full in names if full.partition(".")[2] in keys]
    return (
        f"; did you mean {' or '.join(close)}?"
        if close
        else f"; sections are {', '.join(SECTIONS)} (python -m infsample_rl.main --cfg job prints all)"
    )

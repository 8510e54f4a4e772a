"""A conversion as an experiment file of ours: a comment behind every setting says where it comes from, comments below
what is left."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from infsample_rl.commands.convert.conversion import Conversion, Setting
from infsample_rl.config.loading import SECTIONS


def experiment_yaml(conversion: Conversion, *, command: str, name: str) -> str:
    """The text of configs/experiment/NAME.yaml."""
    lines = [
        "# @package _global_",
        f"# Made by `{' '.join(command.split())}`; what it leaves out has the defaults of {conversion.peer.version}.",
        f"# Save it as DIR/experiment/{name}.yaml and run: python -m infsample_rl.main --config-dir DIR "
        f"+experiment={name}",
    ]
    for section in SECTIONS:
        inside = {key: setting for key, setting in conversion.settings.items() if key.startswith(section + ".")}
        if inside:
            lines += ["", f"{section}:"]
            lines += [_line(key.partition(".")[2], setting) for key, setting in inside.items()]
    for heading, entries in (
        ("No equivalent here", conversion.no_equivalent),
        ("Differs in meaning", conversion.differs),
        ("Changes nothing that is learnt", conversion.without_effect),
        ("Unknown, not converted", conversion.unknown),
    ):
        if entries:
            lines += ["", f"# {heading}:", *(f"#   {' '.join(entry.split())}" for entry in entries)]
    return "\n".join(lines) + "\n"


def _line(key: str, setting: Setting) -> str:
    return f"  {key}: {_flow(setting.value)}  # {' '.join(setting.origin.split())}"


def _flow(value: Any) -> str:
    """A value on one line of YAML: JSON where texts need quotes, 1.0e-06 for small numbers."""
    if isinstance(value, float):
        return yaml.safe_dump(value).split("\n")[0]
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w./-]*", value) and isinstance(yaml.safe_load(value), str):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(str(key))}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)

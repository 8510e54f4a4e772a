"""A conversion as an experiment file of ours: a comment behind every setting says where it comes from, comments below
what is left."""

from __future__ import annotations

import json

from infsample_rl.commands.convert.conversion import Conversion, Setting
from infsample_rl.config.overrides import SECTIONS


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
    value = json.dumps(setting.value, ensure_ascii=False)  # flow style of YAML, on one line
    return f"  {key}: {value}  # {' '.join(setting.origin.split())}"

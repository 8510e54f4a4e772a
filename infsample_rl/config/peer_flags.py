"""Flags of other trainers' command lines, as argparse reads them, with values as YAML has them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any


@cache
def yaml_loader() -> Any:
    """Reads YAML in which 1e-6 is a number."""
    import yaml  # here: processes of reward functions need it not

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?[\d.]+[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def scalar(word: str) -> Any:
    """A word as YAML has it; as it stands where it is no YAML, or nothing."""
    import yaml

    try:
        return yaml.load(word, yaml_loader()) if word else word
    except yaml.YAMLError:
        return word


def read_flags(words: list[str]) -> dict[str, Any]:
    """Flags as argparse reads them: --name value, --name=value, --name a b c (a list), --name (True)."""
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            flags[name] = [value] if equals else []
        elif name:
            flags[name].append(word)
    values = {name: [scalar(word) for word in words] for name, words in flags.items()}
    return {name: (found if len(found) > 1 else found[0]) if found else True for name, found in values.items()}

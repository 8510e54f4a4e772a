"""Values as they stand in words, flags and YAML files, read alike; and the checks of what kind they are."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None}
_UNRESOLVED = re.compile(r"\$[({]")


class NoEquivalent(ValueError):
    """A value of theirs that no setting here stands for; the message says why, or what to use instead."""


def read_scalar(text: str) -> Any:
    """A word as number, true, false, null, list or object; else as text without its quotes. Not as YAML 1.1: `no` and
    `off` stay text."""
    word = text.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _NUMBER.fullmatch(word):
        plain = word.replace("_", "")
        return int(plain) if re.fullmatch(r"[+-]?\d+", plain) else float(plain)
    if word[:1] in ("[", "{"):
        try:
            return _numbers(yaml.safe_load(word))
        except yaml.YAMLError:
            return text
    if len(word) >= 2 and word[0] == word[-1] and word[0] in "'\"":
        return word[1:-1]
    return text


def read_flags(words: list[str]) -> dict[str, Any]:
    """Flags as argparse reads them: --name value, --name=value, --name a b c (a list), --name (True)."""
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            flags[name] = [value] if equals else []
            name = "" if equals else name
        elif name:
            flags[name].append(word)
    return {
        name: True if not values else read_scalar(values[0]) if len(values) == 1 else list(map(read_scalar, values))
        for name, values in flags.items()
    }


def read_yaml(text: str, label: str) -> dict[str, Any]:
    """A YAML file that holds a mapping; 1e-6 is a number in it. ValueError otherwise."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{label} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{label} must hold a mapping of settings, got {type(content).__name__}")
    return _numbers(content)


def flatten(content: dict[str, Any], keep: tuple[str, ...] = (), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("a.b", value) of every leaf; what is under a name of `keep` stays whole."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in keep:
            yield from flatten(value, keep, f"{name}.")
        else:
            yield name, value


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads 1e-6 as text."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and "e" in value.lower() and _NUMBER.fullmatch(value) else value


def is_unresolved(value: object) -> bool:
    """Whether a text, or one in a list or a dict, holds ${NAME} or $(CODE), of which nobody knew the value."""
    if isinstance(value, (list, dict)):
        return any(map(is_unresolved, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and _UNRESOLVED.search(value) is not None


def number(value: Any) -> float:
    """A finite number, also where their file has it as text; ValueError otherwise."""
    found = math.nan if isinstance(value, bool) else float(value)
    if not math.isfinite(found):
        raise ValueError(value)
    return found


def whole(value: Any) -> int:
    """A whole number; ValueError otherwise."""
    if number(value) != int(number(value)):
        raise ValueError(value)
    return int(number(value))


def positive(value: Any) -> int:
    """A whole number above 0; ValueError otherwise."""
    if whole(value) < 1:
        raise ValueError(value)
    return whole(value)


def not_negative(value: Any) -> int:
    """A whole number; 0 for the -1 by which they mean never."""
    return max(0, whole(value))


def truth(value: Any) -> bool:
    """True or false, also as text; ValueError otherwise."""
    found = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(str(value).lower())
    if found is None:
        raise ValueError(value)
    return found


def as_list(value: Any) -> list[Any]:
    """A list, of one where it is a single value."""
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def texts(value: Any) -> list[str]:
    """A list of texts."""
    return [str(item) for item in as_list(value)]


def local_path(path: Any) -> str:
    """A path as our settings take it: ~ and $HOME resolved, `file://` off."""
    return os.path.expanduser(os.path.expandvars(str(path).removeprefix("file://")))


def choose(table: Mapping[Any, Any], otherwise: str) -> Callable[[Any], Any]:
    """A Row's function that looks a value up; NoEquivalent with `otherwise` for all others."""

    def look_up(value: Any) -> Any:
        if value not in table:
            raise NoEquivalent(otherwise)
        return table[value]

    return look_up

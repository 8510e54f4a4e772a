"""Values as they are written in shell words and YAML files, read alike."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None}


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

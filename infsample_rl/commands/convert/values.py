"""The functions of a Row: one value of theirs into ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infsample_rl.data.rows import FILE_SUFFIXES, read_rows


class NoEquivalent(Exception):
    """A value of theirs that no setting here stands for; the message says why, or what to use instead."""


def positive(value: Any) -> int:
    """A whole number above 0; ValueError otherwise."""
    if int(value) < 1 or int(value) != float(value):
        raise ValueError(value)
    return int(value)


def not_negative(value: Any) -> int:
    """A whole number; 0 for the -1 by which they mean never."""
    return max(0, int(value))


def truth(value: Any) -> bool:
    """True or false, false for None; ValueError otherwise."""
    return {"true": True, "1": True, "false": False, "0": False, "none": False}[str(value).lower()]


def texts(value: Any) -> list[str]:
    """A list of texts, of one where it is a single value."""
    return [] if value is None else [str(item) for item in (value if isinstance(value, list) else [value])]


def dictionary(value: Any) -> dict[str, Any]:
    """A dictionary, or JSON of one; ValueError otherwise."""
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise ValueError(value)
    return found


def numbers(value: Any) -> dict[str, float]:
    """A dictionary of numbers, or JSON of one, empty for None; ValueError otherwise."""
    return {name: float(number) for name, number in dictionary(value or {}).items()}


def count_rows(file: str) -> int | None:
    """Rows of a file of data; None where it is not here, or no such file."""
    path = Path(file)
    try:
        return len(read_rows(path, file)) if path.suffix in FILE_SUFFIXES else None
    except (OSError, ValueError):
        return None


def local_path(path: Any) -> str:
    """A path as our settings take it: ~ and $HOME resolved, `file://` off."""
    return os.path.expanduser(os.path.expandvars(str(path).removeprefix("file://")))


def local_paths(value: Any) -> list[str]:
    """Paths, of a list or of a text with commas."""
    return [local_path(path) for text in texts(value) for path in text.split(",") if path]


def only(*neutral: Any, why: str) -> Callable[[Any], None]:
    """A Row's function for what nothing here stands for: NoEquivalent but for values that change nothing."""

    def check(value: Any) -> None:
        if value not in neutral:
            raise NoEquivalent(why)

    return check


def choose(table: Mapping[Any, Any], otherwise: str) -> Callable[[Any], Any]:
    """A Row's function that looks a value up; NoEquivalent with `otherwise` for all others."""

    def look_up(value: Any) -> Any:
        if value not in table:
            raise NoEquivalent(otherwise)
        return table[value]

    return look_up

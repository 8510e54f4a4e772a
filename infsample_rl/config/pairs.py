"""The check of settings that may not stand together: rows of (when, needs, why). Standard library only.

    ("learner.backend=deepspeed", "model.dtype=float32|bfloat16", "learner.backend=fsdp has float16")

`when`: conditions apart by spaces, all of which hold; "" always does. `needs`: what must hold then. A condition is
SECTION.KEY, one of = < <= > >=, and values apart by |, or another setting. A number that is not set is within every
bound.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Pairs = Sequence[tuple[str, str, str]]


def check_pairs(pairs: Pairs, **sections: Any) -> None:
    """ValueError for the first row that these sections break: the setting, its bound, the value, and why."""
    for when, needs, why in pairs:
        conditions = [_split(condition) for condition in when.split()]
        name, relation, bounds = _split(needs)
        if not all(_holds(sections, *condition, unset=False) for condition in conditions):
            continue
        if _holds(sections, name, relation, bounds, unset=True):
            continue
        said = [f"{key}={text(_value(sections, key))}" for key, _, _ in conditions]
        bound = f"{bounds} = {text(_value(sections, bounds))}" if _is_setting(bounds) else bounds.replace("|", " or ")
        raise ValueError(
            f"{name} must be {'' if relation == '=' else f'{relation} '}{bound}{' with ' if said else ''}"
            f"{', '.join(said)}, got {text(_value(sections, name))}{': ' if why else ''}{why}"
        )


def text(value: Any) -> str:
    """A value as one types it: true, none, 0.5."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _split(condition: str) -> tuple[str, str, str]:
    name, relation, bounds = re.split(r"(<=|>=|<|>|=)", condition, maxsplit=1)
    return name, relation, bounds


def _is_setting(bound: str) -> bool:
    return re.fullmatch(r"[a-z]+\.[a-z_]+", bound) is not None


def _value(sections: dict[str, Any], name: str) -> Any:
    section, key = name.split(".")
    return getattr(sections[section], key)


def _holds(sections: dict[str, Any], name: str, relation: str, bounds: str, *, unset: bool) -> bool:
    """`unset`: what is said of a number that is not set."""
    value = _value(sections, name)
    bound = _value(sections, bounds) if _is_setting(bounds) else bounds
    if relation == "=":
        return text(value) in text(bound).split("|")
    if value is None or bound is None:
        return unset
    limit = float(bound)
    is_within = value > limit if relation[0] == ">" else value < limit
    return is_within or (relation[1:] == "=" and value == limit)

"""What a setting is: a dataclass field with its meaning and bound, and the check of both. Standard library only."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from numbers import Integral, Real
from typing import Any, TypeVar

Entry = TypeVar("Entry")
KINDS: dict[str, tuple[Any, str]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "a text"),
    "list": (list, "a list"),
    "dict": (dict, "{key: value}"),
}

LEAST_TEMPERATURE = 1e-3


def setting(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    key: str | None = None,
    read_if: Callable[[Any], bool] | None = None,
) -> Any:
    """A dataclass field with its meaning and bound: `low <= value <= high`, `value > above`, or one of `choices`.

    `key`: the name that a user gives, where it is not the field's. `read_if`: of a run's Config, whether anything reads
    the setting; none: always.
    """
    metadata: dict[str, Any] = {"doc": doc, "low": low, "high": high, "above": above, "choices": choices, "key": key}
    metadata["read_if"] = read_if
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(spec: dataclasses.Field[Any]) -> Any:
    """A setting's default; a list or a dict is a new one."""
    return spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()


def check_bounds(section: str, config: Any) -> None:
    """Raise ValueError for the first field of `config` whose value its type or its metadata does not allow."""
    for spec in dataclasses.fields(config):
        value, name = getattr(config, spec.name), f"{section}.{spec.name}"
        _check_type(name, value, str(spec.type))
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
        must, hint = out_of_bounds(value, spec.metadata)
        if must:
            raise ValueError(f"{name} {must}, got {value!r}{hint}")


def read_entry(name: str, entry: Any, kind: type[Entry], first: str) -> Entry:
    """An entry of a list of settings as a checked `kind`: of its keys, or a text alone for the key `first`.

    Example: read_entry("reward.functions[0]", "kk", RewardFunctionConfig, "name"). ValueError for an unknown key, a
    value out of bounds, and what is neither.
    """
    if not isinstance(entry, kind):
        given = {first: entry} if isinstance(entry, str) else entry
        if not isinstance(given, Mapping):
            raise ValueError(f"{name} must be a {first} or {{{first}: ...}}, got {entry!r}")
        keys = [spec.name for spec in dataclasses.fields(kind)]  # type: ignore[arg-type]
        for key in given:
            if key not in keys:
                raise ValueError(f"{name.partition('[')[0]}: an entry takes {', '.join(keys)}, not {key}")
        entry = kind(**given)
    check_bounds(name, entry)
    return entry


def out_of_bounds(value: Any, bound: Mapping[str, Any]) -> tuple[str, str]:
    """("must be >= 1", "; the nearest that works is 1") of a value, or an item of a list, that a setting's metadata
    does not allow; two empty texts where it does."""
    for item in value if isinstance(value, list) else [value]:
        if item is None:
            continue
        if bound["choices"] and item not in bound["choices"]:
            return f"must be one of {', '.join(bound['choices'])}", did_you_mean(str(item).lower(), bound["choices"])
        low, high, above = bound["low"], bound["high"], bound["above"]
        if low is not None and not item >= low:  # nan too
            return f"must be >= {low}", f"; the nearest that works is {low}"
        if high is not None and not item <= high:
            return f"must be <= {high}", f"; the nearest that works is {high}"
        if above is not None and not item > above:
            return f"must be > {above}", ""
    return "", ""


def did_you_mean(value: str, choices: Collection[str], cutoff: float = 0.6) -> str:
    """ "; did you mean kk?" of the choice that looks most like a value, or ""."""
    sizes = [choice for choice in choices if choice.startswith(f"{value}-")]  # a100: there are two of them
    nearest = sizes or difflib.get_close_matches(value, choices, n=1, cutoff=cutoff)
    return f"; did you mean {' or '.join(nearest)}?" if nearest else ""


def _check_type(name: str, value: Any, annotation: str) -> None:
    """ValueError unless `value` is of the type that `annotation`, as written in the source, names."""
    whole, _, optional = annotation.partition(" | ")
    kind, _, of_items = whole.rstrip("]").partition("[")
    if value is None and optional != "None":
        raise ValueError(f"{name} must not be none")
    if value is None or kind not in KINDS:
        return
    types, what = KINDS[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        raise ValueError(f"{name} must be {what}, got {value!r}")
    if kind == "list" and of_items in KINDS:
        for index, item in enumerate(value):
            _check_type(f"{name}[{index}]", item, of_items)


def unread_settings(config: Any) -> list[str]:
    """Names of settings that differ from their default though nothing reads them in this run, so that they are never
    silently ignored."""
    return [
        f"{section.name}.{spec.name}"
        for section in dataclasses.fields(config)
        for spec in dataclasses.fields(getattr(config, section.name))
        if spec.metadata["read_if"] is not None
        and not spec.metadata["read_if"](config)
        and getattr(getattr(config, section.name), spec.name) != default_of(spec)
    ]


def check_temperature(name: str, temperature: float) -> None:
    """ValueError for a temperature other than 0 (exact argmax) by which logits cannot be divided in float32."""
    if not (temperature == 0 or LEAST_TEMPERATURE <= temperature < math.inf):
        raise ValueError(f"{name} must be 0 (exact argmax) or >= {LEAST_TEMPERATURE}, got {temperature}")


def parse_bytes(text: str, expected: str = "rollout.kv_budget_bytes must be auto or a size") -> int:
    """Bytes of "1048576", "24GB" (10^9) or "512MiB" (2^20): "1.5KB" -> 1500. ValueError, beginning with `expected`, for
    anything else."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if found is None or found[2].upper() not in units or float(found[1]) <= 0:
        raise ValueError(f"{expected} as 24GB or 512MiB, got {text!r}")
    return int(float(found[1]) * units[found[2].upper()])


def kv_pages(rows: int, max_new_tokens: int, prompts: Sequence[int], page_size: int) -> int:
    """KV pages that hold `rows` full responses and prompts of these numbers of tokens: kv_pages(1, 30, [20], 16) -> 4.

    With one row and one prompt it is the smallest pool that there may be."""
    return rows * -(-max_new_tokens // page_size) + sum(-(-tokens // page_size) for tokens in prompts)

"""What a setting is: a dataclass field with its meaning and bound, and the check of both. Standard library only."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from dataclasses import field
from numbers import Integral, Real
from typing import Any

SCALARS = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "a text"),
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
) -> Any:
    """A dataclass field with its meaning and bound: `low <= value <= high`, `value > above`, or one of `choices`."""
    metadata = {"doc": doc, "low": low, "high": high, "above": above, "choices": choices}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_bounds(section: str, config: Any) -> None:
    """Raise ValueError for the first field of `config` whose value its type or its metadata does not allow."""
    for spec in dataclasses.fields(config):
        value, bound = getattr(config, spec.name), spec.metadata
        name = f"{section}.{spec.name}"
        if not bound:
            continue
        _check_type(name, value, str(spec.type))
        if value is None:
            continue
        if bound["choices"] and value not in bound["choices"]:
            # a100: two of them
            kinds = [choice for choice in bound["choices"] if choice.startswith(f"{str(value).lower()}-")]
            nearest = kinds or difflib.get_close_matches(str(value).lower(), bound["choices"], n=1)
            hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
            raise ValueError(f"{name} must be one of {', '.join(bound['choices'])}, got {value!r}{hint}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
        if bound["low"] is not None and value < bound["low"]:
            raise ValueError(f"{name} must be >= {bound['low']}, got {value}; the nearest that works is {bound['low']}")
        if bound["high"] is not None and value > bound["high"]:
            raise ValueError(
                f"{name} must be <= {bound['high']}, got {value}; the nearest that works is {bound['high']}"
            )
        if bound["above"] is not None and value <= bound["above"]:
            raise ValueError(f"{name} must be > {bound['above']}, got {value}")


def _check_type(name: str, value: Any, annotation: str) -> None:
    """ValueError unless `value` is of the type that `annotation`, as written in the source, names."""
    kind, _, optional = annotation.partition(" | ")
    if value is None:
        if optional != "None":
            raise ValueError(f"{name} must not be none")
        return
    if kind not in SCALARS:
        return
    types, what = SCALARS[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        raise ValueError(f"{name} must be {what}, got {value!r}")


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

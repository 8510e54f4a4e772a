"""The values of reward.environment, which no message and no output may show: replaced by their names. Standard library
only.

A value is looked for as it is, without the white space around it (a file's last newline), and as Python and JSON quote
it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

SHORTEST = 4  # a shorter value could stand anywhere by chance
_shown_as: dict[str, str] = {}  # form of a value -> <name>, long ones first


def hide_values_of(names: Iterable[str]) -> None:
    """From now on, in this process and those it forks, without_values() replaces what these environment variables hold
    now."""
    forms = dict[str, str]()
    for name in names:
        value = os.environ.get(name, "")
        for form in (value, value.strip(), repr(value)[1:-1], json.dumps(value)[1:-1], repr(value.strip())[1:-1]):
            if len(form) >= SHORTEST:
                forms[form] = f"<{name}>"
    _shown_as.clear()
    _shown_as.update(sorted(forms.items(), key=lambda item: -len(item[0])))


def without_values(text: str) -> str:
    """`text` with the names in the place of the values. To be cut only afterwards: part of a value is not found."""
    for form, name in _shown_as.items():
        text = text.replace(form, name)
    return text


def begun_value(output: bytes) -> int:
    """How many of the last bytes of `output` may be the beginning of a value that goes on in what is not read yet."""
    forms = [form.encode() for form in _shown_as]
    most = min(len(output), max(map(len, forms), default=1) - 1)
    return next((size for size in range(most, 0, -1) if any(form.startswith(output[-size:]) for form in forms)), 0)

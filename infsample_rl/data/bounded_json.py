"""JSON that somebody else has written, a policy or a client of it. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

MOST_LEVELS = 100  # far below where a JSON library, a chat template or pickle gives up


def load_json(text: str) -> Any:
    """The value. ValueError for text that is none, and for lists and objects of more than MOST_LEVELS levels."""
    try:
        found = json.loads(text)
        if not _is_deeper([found], MOST_LEVELS):
            return found
    except RecursionError:
        pass
    raise ValueError(f"it has more than {MOST_LEVELS} levels")


def _is_deeper(values: Iterable[Any], most: int) -> bool:
    """Level by level: a function that called itself would fail where JSON does."""
    for _ in range(most):
        inner = [each.values() if isinstance(each, dict) else each for each in values if isinstance(each, (dict, list))]
        values = [each for some in inner for each in some]
    return any(isinstance(each, (dict, list)) for each in values)

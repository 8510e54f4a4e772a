"""JSON that somebody else has written, a policy or a client of it. Standard library only."""

from __future__ import annotations

import json
from typing import Any

MOST_LEVELS = 100  # far below where a JSON library, a chat template or pickle gives up


def load_json(text: str) -> Any:
    """The value. ValueError for text that is none, and for lists and objects of more than MOST_LEVELS levels."""
    try:
        found = json.loads(text)
        values = [found]
        for _ in range(MOST_LEVELS):  # a function that called itself would fail where JSON does
            held = [each for each in values if isinstance(each, (dict, list))]
            values = [inner for each in held for inner in (each.values() if isinstance(each, dict) else each)]
        if not any(isinstance(each, (dict, list)) for each in values):
            return found
    except RecursionError:
        pass
    raise ValueError(f"it has more than {MOST_LEVELS} levels")

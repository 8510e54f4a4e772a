"""Reward `think_format`: 1.0 for a response that thinks within <think></think>, once, before it answers; else 0.0.
TRL's think_format_reward."""

from __future__ import annotations

import re
from typing import Any

_FORMAT = re.compile(r"<think>(?!.*<think>)(.*?)</think>.*", re.DOTALL)
NEEDS = list[list[str]]()


def score(response: str, columns: dict[str, Any]) -> float:
    """1.0 or 0.0; no column is read."""
    return float(_FORMAT.fullmatch(response) is not None)

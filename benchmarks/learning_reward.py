"""The reward of benchmarks.learning, for both sides: TRL's form of a reward function, which ours takes unchanged.
Standard library only."""

from __future__ import annotations

import re
from typing import Any


def last_number(prompts: list[Any], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for every response whose last number is the answer, else 0."""
    numbers = [re.findall(r"\d+", text) for text in completions]
    return [float(bool(found) and found[-1] == right) for found, right in zip(numbers, answer, strict=True)]

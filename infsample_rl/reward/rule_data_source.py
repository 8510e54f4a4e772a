"""Reward `data_source`: the rule for each row's own source, by verl's column of that name, so that its mixed data sets
need no choice.

The names are those of verl 0.9.1's default_compute_score whose answers are numbers or maths; scores are 0.0 or 1.0.
"""

from __future__ import annotations

import importlib
from typing import Any

GSM8K = ("openai/gsm8k", "gsm8k")
MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math")
MATH_PREFIXES = ("aime", "math_dapo", "numina_")
NEEDS = [["data_source", "answer"]]


def score(response: str, columns: dict[str, Any]) -> float:
    """1.0 or 0.0; the right answer is the column `answer`. ValueError for a source that has no rule here."""
    return importlib.import_module(f"infsample_rl.reward.rule_{rule_of(columns.get('data_source'))}").score(
        response, columns
    )


def rule_of(source: Any) -> str:
    """ "gsm8k" or "math"."""
    if source in GSM8K:
        return "gsm8k"
    if source in MATH or str(source).startswith(MATH_PREFIXES):
        return "math"
    raise ValueError(
        f"the column data_source is {source!r}, which has no rule here; give a reward function of your own"
    )

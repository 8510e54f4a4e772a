r"""Reward `reasoning_gym`: the score the task's own scorer gives, from 0 to 1.

What is scored is the text the response marks as its answer (<answer>, "Answer:", \boxed{}), else the whole response.
Where the right answer is a number, the last number is tried too (of a marked answer: of its first sentence) and the
better score counts: many scorers give a correct number inside a sentence only a share of the point, by length.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any

import reasoning_gym

from infsample_rl.reward.final_answer import explicit_answer, numbers_in

NEEDS = [["task", "entry"]]  # of data.source=reasoning_gym:<task>


def score(response: str, columns: dict[str, Any]) -> float:
    """The task's score of the response; columns `task` (name) and `entry` (question, answer, metadata)."""
    entry = columns["entry"]
    score_answer = _scorer(columns["task"])
    stated = explicit_answer(response)
    answer = (response if stated is None else stated).strip()
    best = float(score_answer(answer, entry))
    numbers = numbers_in(answer if stated is None else re.split(r"\.\s|\n", answer)[0])
    for candidate in _other_readings(answer, numbers, str(entry["answer"])):
        if best < 1.0:
            best = max(best, float(score_answer(candidate, entry)))
    return best


def _other_readings(answer: str, numbers: list[Decimal], gold: str) -> list[str]:
    """Further texts to score: without a final full stop, and the last of `numbers` where the right answer is a
    number."""
    readings = [answer[:-1].rstrip()] if answer.endswith(".") and not gold.endswith(".") else []
    if re.fullmatch(r"-?[\d,]*\.?\d+", gold.strip()):
        readings += [str(number) for number in numbers[-1:]]
    return readings


@lru_cache(maxsize=16)
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    return reasoning_gym.get_score_answer_fn(task)

r"""Reward `gsm8k`: 1.0 when the final number is right, else 0.0.

The final number of a response is the one after its last "####", else the one in its last \boxed{}, else its last
number.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from infsample_rl.data.fields import last_boxed
from infsample_rl.reward.final_answer import gold_answer, numbers_in

NEEDS = [["answer"]]


def score(response: str, columns: dict[str, Any]) -> float:
    """1.0 or 0.0; the right answer is the column `answer` (a number, or GSM8K's worked text with "####")."""
    answer = gold_answer(columns)
    gold = final_number(str(answer))
    if gold is None:
        raise ValueError(f"the column `answer` holds no number: {str(answer)[:80]!r}")
    return float(final_number(response) == gold)


def final_number(text: str) -> Decimal | None:
    """The number a text ends in; "So 3 boxes.\\n#### 1,200.0" gives 1200; None when there is no number at all."""
    _, hashes, after = text.rpartition("####")
    numbers = numbers_in(after.split("\n\n")[0]) if hashes else []
    if numbers:
        return numbers[0]
    boxed = last_boxed(text)
    if boxed is not None:
        # "x = 5", "5 \text{ m}^2": the value stands after the last "=", and what follows it are units
        numbers = numbers_in(re.sub(r"\\text\{[^}]*\}", " ", boxed.rpartition("=")[2]))
        if numbers:
            return numbers[0]
    numbers = numbers_in(text)
    return numbers[-1] if numbers else None

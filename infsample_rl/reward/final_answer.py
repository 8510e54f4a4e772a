r"""Where a response states its final answer: \boxed{}, <answer> tags, "Answer:", numbers. Standard library only."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from infsample_rl.data.fields import last_boxed

# "1,234.50", "$ 5", "-3": thousands need groups of three, so that "3,4" stays two numbers; "5-3" holds no minus three
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])-)?(?:\$(?P<inner>-)?)?(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?P<fraction>\.\d+)?"
)
_ANSWER_LABEL = re.compile(r"\banswer\b[ \t*_`]*(?:is)?[ \t*_`]*:", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.IGNORECASE | re.DOTALL)


def numbers_in(text: str) -> list[Decimal]:
    """Every number of a text in order: commas, currency and percent signs dropped ("$1,234.50%" is 1234.50)."""
    plain = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\$", "$").replace("\u2212", "-")
    found = []
    for match in _NUMBER.finditer(plain):
        if match["digits"] or match["fraction"]:
            value = Decimal((match["digits"] or "0").replace(",", "") + (match["fraction"] or ""))
            found.append(-value if match["sign"] or match["inner"] else value)
    return found


def explicit_answer(text: str) -> str | None:
    r"""The answer a response marks as such: what the last <answer>...</answer> holds (to the end when it is not
    closed), else the text after the last "Answer:", else \boxed{}; None without any."""
    tagged = _ANSWER_TAG.findall(text)
    if tagged:
        return tagged[-1].strip()
    labels = list(_ANSWER_LABEL.finditer(text))
    if labels:
        after = text[labels[-1].end() :].strip(" \t\r\n*_`")
        return last_boxed(after) or after
    return last_boxed(text)


def gold_answer(columns: dict[str, Any]) -> Any:
    """The row's right answer, the column `answer`; ValueError without one."""
    if columns.get("answer") is None:
        found = ", ".join(sorted(columns)) or "no columns"
        raise ValueError(f"the row has no right answer: no column `answer` among {found}")
    return columns["answer"]

r"""Reward `math`: 1.0 when math-verify finds the final answer equal to the right one, else 0.0. The final answer is one
statement: the last \boxed{}, else <answer> tags or "Answer:", else what math-verify takes from the text.

math-verify's own time limits are alarms, which only a main thread may set: they are off, and the process pool's limit
holds instead.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from infsample_rl.data.fields import last_boxed
from infsample_rl.reward.final_answer import explicit_answer, gold_answer

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its alarms are off
_EXTRACT = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
NEEDS = [["answer"]]


def score(response: str, columns: dict[str, Any]) -> float:
    r"""1.0 or 0.0; the right answer is the column `answer`: LaTeX, bare or in $ $ or \boxed{}, or a worked solution."""
    gold_text = str(gold_answer(columns)).strip()
    gold, bare_gold = _parse_gold(gold_text)
    boxed = last_boxed(response)
    stated = boxed or explicit_answer(response) or ""
    if boxed:
        given = _parse(f"\\boxed{{{boxed}}}")
    else:  # below the line of the answer a response may go on to check it
        given = _parse(stated.partition("\n")[0]) or _parse(stated or response)
    if gold and given and verify(gold, given, timeout_seconds=None):
        return 1.0
    return float(stated != "" and _squeeze(stated) == _squeeze(bare_gold))


def _parse(text: str) -> list[Any]:
    return parse(text, extraction_config=_EXTRACT, parsing_timeout=None)


@lru_cache(maxsize=256)
def _parse_gold(gold: str) -> tuple[list[Any], str]:
    """math-verify's reading of the right answer, and the answer as bare text."""
    boxed = last_boxed(gold)
    bare = gold.strip("$") if boxed is None else boxed
    wrapped = gold if boxed is None and "$" in gold else f"\\boxed{{{bare}}}"
    return _parse(wrapped), bare


def _squeeze(text: str) -> str:
    """A text without spaces, $, \\text{} wrappers and final full stop, for answers that are words or cannot be
    parsed."""
    plain = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", text)
    return (
        re.sub(r"[\s$]|\\[,!;:]", "", plain.replace("\\left", "").replace("\\right", "").replace("dfrac", "frac"))
        .rstrip(".")
        .lower()
    )

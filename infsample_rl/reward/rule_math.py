r"""Reward `math`: 1.0 when math-verify finds the final answer equal to the right one, else 0.0.

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
    given = parse(response, extraction_config=_EXTRACT, parsing_timeout=None)
    if gold and given and verify(gold, given, timeout_seconds=None):
        return 1.0
    stated = explicit_answer(response)
    return float(stated is not None and _squeeze(stated) == _squeeze(bare_gold))


@lru_cache(maxsize=256)
def _parse_gold(gold: str) -> tuple[list[Any], str]:
    """math-verify's reading of the right answer, and the answer as bare text."""
    boxed = last_boxed(gold)
    bare = gold.strip("$") if boxed is None else boxed
    wrapped = gold if boxed is None and "$" in gold else f"\\boxed{{{bare}}}"
    return parse(wrapped, extraction_config=_EXTRACT, parsing_timeout=None), bare


def _squeeze(text: str) -> str:
    """A text without spaces, $, \\text{} wrappers and final full stop, for answers that are words or cannot be
    parsed."""
    plain = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", text)
    return (
        re.sub(r"[\s$]|\\[,!;:]", "", plain.replace("\\left", "").replace("\\right", "").replace("dfrac", "frac"))
        .rstrip(".")
        .lower()
    )

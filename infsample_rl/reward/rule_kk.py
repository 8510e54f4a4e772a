"""Reward `kk` for knights-and-knaves puzzles: 1.0 when every inhabitant's role is right, else 0.0.

As in Logic-RL and mem-kk-logic, a response counts by the part it marks as its answer: the last <answer>, else what
follows the last "Answer:" or "Conclusion:", else what follows its thoughts (</think>), else nothing. The part opens
with one statement for each name, "Zoey is a knight, Ethan is a knave" or "(1) Zoey: knight", up to a sentence's end.
Anything less plain, a name left out and a role contradicted further down have no reward.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from infsample_rl.reward.final_answer import explicit_answer, gold_answer

_ROLE = r"\s*(?:\bis\b|:|=|->?)\s*(?:an?\s+|the\s+)?(knight|knave)\b"
_BETWEEN = r"(?:[^\w?]|\d|\band\b)*"
_END_OF_SENTENCE = re.compile(r"[ )\]}]*(?:[.;<\n]|$)")
NEEDS = [["answer"], ["names", "solution"]]


def score(response: str, columns: dict[str, Any]) -> float:
    """1.0 or 0.0. ValueError when the row has no solution."""
    gold = gold_roles(columns)
    return float(final_roles(response, gold) == gold)


def final_roles(response: str, names: Collection[str]) -> dict[str, bool] | None:
    """The role (True: knight) a response finally gives to each of `names`; None unless each has exactly one."""
    _, thought, rest = response.rpartition("</think>")
    rest = re.sub(r"\bconclusion\b", "answer", re.sub(r"[*`_]", "", rest), flags=re.IGNORECASE)
    part = explicit_answer(rest)
    part = rest if part is None and thought else part or ""
    statement = rf"\b({'|'.join(map(re.escape, names))}){_ROLE}"
    opening = re.compile(_BETWEEN + statement, re.IGNORECASE)
    end, roles = 0, dict[str, bool]()
    while match := opening.match(part, end):
        end = match.end()
        roles[match[1].lower()] = match[2].lower() == "knight"
    stated = {(name.lower(), role.lower() == "knight") for name, role in re.findall(statement, part, re.IGNORECASE)}
    if stated != set(roles.items()) or not _END_OF_SENTENCE.match(part, end):
        return None
    return {name: roles[name.lower()] for name in names} if all(name.lower() in roles for name in names) else None


def gold_roles(columns: dict[str, Any]) -> dict[str, bool]:
    """The solution as {name: whether a knight}: the columns `names` and `solution` (a list of booleans), else the
    statements of the column `answer`. ValueError when the columns give neither."""
    names, solution = columns.get("names"), columns.get("solution")
    if names is not None and isinstance(solution, list):
        return {str(name): bool(role) for name, role in zip(names, solution, strict=True)}
    gold = gold_answer(columns)
    text = str(gold["solution_text_format"] if isinstance(gold, dict) and "solution_text_format" in gold else gold)
    roles = {name: role.lower() == "knight" for name, role in re.findall(rf"\b(\w[\w'-]*){_ROLE}", text, re.IGNORECASE)}
    if not roles:
        raise ValueError(
            f"the right answer {text!r:.80} states no role: give e.g. 'Zoey is a knight, Ethan is a knave'"
        )
    return roles

"""Reward `kk` for knights-and-knaves puzzles: 1.0 when every inhabitant's role is right, else 0.0.

The right roles come from the columns `names` and `solution` (True: knight), else from the column `answer` or verl's
ground truth, as text ("Ava is a knight, Ben is a knave"), as {"Ava": "knight"} or as a list of booleans beside `names`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from infsample_rl.reward.final_answer import gold_answer
from infsample_rl.reward.kk_roles import KNAVE, KNIGHT, final_roles

_NAME_AND_ROLE = re.compile(
    r"\b(?!(?:and|but|so|while|the|is|are|a|an|answer|both)\b)(\w[\w'-]*)\W{1,4}(?:(?:is|are|was)\W+)?(?:(?:an?|the)\W+)?"
    rf"({KNIGHT}|{KNAVE})\b",
    re.IGNORECASE,
)


def score(response: str, columns: dict[str, Any]) -> float:
    """1.0 or 0.0; contradictory or missing roles in the final answer are 0.0. ValueError when the row has no
    solution."""
    gold = gold_roles(columns)
    return float(final_roles(response, list(gold)) == gold)


def gold_roles(columns: dict[str, Any]) -> dict[str, bool]:
    """The solution as {name: whether a knight}, in the puzzle's order; ValueError when the columns do not give it."""
    names = columns.get("names")
    solution = columns.get("solution")
    if solution is None or isinstance(solution, str):
        solution = gold_answer(columns)
    # the ground truth of Logic-RL's files for verl
    if isinstance(solution, dict) and "solution_text_format" in solution:
        solution = solution["solution_text_format"]
    if isinstance(solution, str):
        solution = _parsed(solution, names)
    if isinstance(solution, dict):
        roles = {str(name): _as_bool(role) for name, role in solution.items()}
    elif names is not None and len(names) == len(solution):
        roles = {str(name): _as_bool(role) for name, role in zip(names, solution, strict=True)}
    else:
        raise ValueError(f"the solution {solution!r:.80} and the column `names` {names!r:.80} do not fit together")
    if not roles or (names is not None and {str(name) for name in names} != set(roles)):
        raise ValueError(
            f"the solution gives roles to {', '.join(roles) or 'nobody'}, the column `names` is {names!r:.80}"
        )
    return roles


def _parsed(text: str, names: Any) -> Any:
    """A solution given as text: JSON, else a sentence, read like a response when the names are known."""
    if text.lstrip().startswith(("{", "[")):
        return json.loads(text)
    roles = final_roles(text, [str(name) for name in names]) if names is not None else None
    return roles or {name: _as_bool(role) for name, role in _NAME_AND_ROLE.findall(text)}


def _as_bool(role: Any) -> bool:
    """True for a knight, from a boolean (or 0 and 1) or a role's name."""
    if not isinstance(role, str):
        return bool(role)
    if re.fullmatch(KNIGHT, role.strip(), re.IGNORECASE):
        return True
    if re.fullmatch(KNAVE, role.strip(), re.IGNORECASE):
        return False
    raise ValueError(f"unknown role {role!r} in the solution: give knight or knave")

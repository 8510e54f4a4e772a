"""What a judge is told to end its reply with, and what a reply then says.

A verdict is the last of its kind in the reply, which may reason before it. Several on one line are none: so reads what
repeats its instruction.
"""

from __future__ import annotations

import re
from typing import Any

from infsample_rl.reward.hidden_values import without_values

PAIRWISE_END = "End your reply with a line `Verdict: first`, `Verdict: second` or `Verdict: tie`."
RUBRIC_END = "End your reply with a line for every criterion by its number: `1: yes` if it is met, `1: no` if not."
SCORE_END = "End your reply with a line `Score: N`, where N is a number from {low:g} to {high:g}."
SCORE = re.compile(
    r"\bscore\b(?:\s*[(\[][^()\[\]\n]*[)\]](?=\W{0,4}?[:=]))?"  # the scale, said once more
    r"(?:[\s:=*_`\"'<(\[]|[-–—](?=\s)){0,8}([-−]?(?:\d+(?:\.\d+)?|\.\d+))"
    r"(?![\d.,]*\d|\s*(?:[-–—]|to|or)\s*[-−]?\d)",  # a range
    re.IGNORECASE,
)
VERDICT = re.compile(  # up to where its reasons begin, which may name another choice
    r"\bverdict\b\W{0,6}(?=((?:first|second|tie)\b(?:(?!\s-|\b(?:because|since|between)\b)[^.!;:(\n—–])*))",
    re.IGNORECASE,
)
CHOICE = re.compile(r"\b(?:first|second|tie)\b")
ANSWER = re.compile(
    r"^\W*(\d+)\W{1,6}(yes|no)\b"
    r"(?!\W*(?:\bor\b|[/|])\W*(?:yes|no)\b)"  # "1: yes or no"
    r"(?!.*\b\1:\W{0,4}(?!\2)(?:yes|no)\b)",  # "1: yes if it is met, 1: no if not"
    re.IGNORECASE | re.MULTILINE,
)


class NoVerdict(Exception):
    """A reply, or what came instead of one, says nothing; the message is a problem as failure lines show it."""


def on_scale(text: str, low: float, high: float) -> float:
    """The share of the way from `low` to `high` that the reply's score is at."""
    found = [score.replace("−", "-") for score in _of_last_line(SCORE, text)]
    if not found:
        raise NoVerdict(f"gave no verdict: no `Score: N` in {start_of(text)}")
    if len(set(map(float, found))) > 1:
        raise NoVerdict(f"gave no verdict: scores of {', '.join(found)} on one line")
    score = float(found[0])
    if not low <= score <= high:
        raise NoVerdict(f"gave no verdict: Score: {found[0]} is outside {low:g} to {high:g}")
    return (score - low) / (high - low)


def share_of_first(text: str) -> float:
    """1 where the reply prefers the first, 0 the second, 0.5 neither."""
    clauses = _of_last_line(VERDICT, text)
    if not clauses:
        raise NoVerdict(f"gave no verdict: no `Verdict: first`, `second` or `tie` in {start_of(text)}")
    found = sorted({choice for clause in clauses for choice in CHOICE.findall(clause.lower())})
    if len(found) > 1:
        raise NoVerdict(f"gave no verdict: {' and '.join(found)} on one line")
    return {"first": 1.0, "second": 0.0, "tie": 0.5}[found[0]]


def share_met(text: str, count: int) -> float:
    """The share of `count` criteria that the reply says are met."""
    said = {int(number): answer.lower() == "yes" for number, answer in ANSWER.findall(text)}
    if any(number not in said for number in range(1, count + 1)):
        raise NoVerdict(f"gave no verdict: not every one of {count} criteria has a yes or no in {start_of(text)}")
    return sum(said[number] for number in range(1, count + 1)) / count


def _of_last_line(pattern: re.Pattern[str], text: str) -> list[str]:
    """The groups of all matches on the line of the last."""
    found = list(pattern.finditer(text))
    line = text.rfind("\n", 0, found[-1].start(1)) if found else 0
    return [match[1] for match in found if match.start(1) > line]


def start_of(value: Any) -> str:
    """A value's first characters, as problems show it."""
    text = " ".join(without_values(str(value)).split())
    return repr(text if len(text) <= 60 else f"{text[:57]}...")

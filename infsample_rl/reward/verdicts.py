"""What a judge is told to end its reply with, and what a reply then says.

A verdict is the last of its kind in the reply, which may reason before it.
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
    r"(?:[\s:=*_`\"'<(\[]|[-–—](?=\s)){0,8}([-−]?(?:\d+(?:\.\d+)?|\.\d+))(?![\d.,]*\d|\s*[-–—]\s*\d)",
    re.IGNORECASE,
)
VERDICT = re.compile(r"\bverdict\b\W{0,6}(first|second|tie)\b", re.IGNORECASE)
ANSWER = re.compile(r"^\W*(\d+)\W{1,6}(yes|no)\b", re.IGNORECASE | re.MULTILINE)


class NoVerdict(Exception):
    """A reply, or what came instead of one, says nothing; the message is a problem as failure lines show it."""


def on_scale(text: str, low: float, high: float) -> float:
    """The share of the way from `low` to `high` that the reply's score is at."""
    found = SCORE.findall(text)
    if not found:
        raise NoVerdict(f"gave no verdict: no `Score: N` in {start_of(text)}")
    score = float(found[-1].replace("−", "-"))
    if not low <= score <= high:
        raise NoVerdict(f"gave no verdict: Score: {found[-1]} is outside {low:g} to {high:g}")
    return (score - low) / (high - low)


def share_of_first(text: str) -> float:
    """1 where the reply prefers the first, 0 the second, 0.5 neither."""
    found = VERDICT.findall(text)
    if not found:
        raise NoVerdict(f"gave no verdict: no `Verdict: first`, `second` or `tie` in {start_of(text)}")
    return {"first": 1.0, "second": 0.0, "tie": 0.5}[found[-1].lower()]


def share_met(text: str, count: int) -> float:
    """The share of `count` criteria that the reply says are met."""
    said = {int(number): answer.lower() == "yes" for number, answer in ANSWER.findall(text)}
    if any(number not in said for number in range(1, count + 1)):
        raise NoVerdict(f"gave no verdict: not every one of {count} criteria has a yes or no in {start_of(text)}")
    return sum(said[number] for number in range(1, count + 1)) / count


def start_of(value: Any) -> str:
    """A value's first characters, as problems show it."""
    text = " ".join(without_values(str(value)).split())
    return repr(text if len(text) <= 60 else f"{text[:57]}...")

"""What replies of judges say: the last verdict counts, and what only repeats the choices is none."""

from __future__ import annotations

import pytest

from infsample_rl.reward.verdicts import (
    PAIRWISE_END,
    RUBRIC_END,
    SCORE_END,
    NoVerdict,
    on_scale,
    share_met,
    share_of_first,
)


def said(read, *arguments):
    """What is read, None for no verdict."""
    try:
        return read(*arguments)
    except NoVerdict:
        return None


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("Both are short.\nThe second is wrong, the first is not.\n\nVerdict: first", 1.0),
        ("Verdict: first? No: it skips a case.\nVerdict: second", 0.0),
        ("**Verdict:**\n\nsecond", 0.0),
        ("Verdict: [first]", 1.0),
        ("Verdict: tie.", 0.5),
        ("It is the first. Verdict: first. Verdict: **first**", 1.0),
        ("Verdict: first. The second is wrong.", 1.0),
        ("Verdict: first (the second is wrong)", 1.0),
        ("Verdict: first - the second is wrong", 1.0),
        ("Verdict: second, since the first is wrong", 0.0),
        ("Verdict: second because the first is wrong", 0.0),
        ("Verdict: tie between first and second", 0.5),
        (f"I am told: {PAIRWISE_END}\nVerdict: second", 0.0),
        ("Verdict: first or second?", None),
        ("Verdict: first/second/tie", None),
        ("Verdict: <first|second|tie>", None),
        ("Verdict: `first`, `second` or `tie`", None),
        ("Verdict: first = second", None),
        ("Verdict: first. No, Verdict: second.", None),
        ("Verdict: first\nVerdict: first or second", None),
        (PAIRWISE_END, None),
        ("Verdict: neither", None),
    ],
)
def test_a_choice_counts_where_no_other_stands_beside_it(reply, reward):
    assert said(share_of_first, reply) == reward


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("Score: 2 would be harsh.\nScore: 8", 0.8),
        ("Score: 8, that is Score: 8/10", 0.8),
        ("Score: 8 out of 10", 0.8),
        ("Score: 8 or better is what it merits", 0.8),
        ("Score: 8\n(on a scale of Score: 0 to 10)", 0.8),
        (f"{SCORE_END.format(low=0, high=10)}\nScore: 8", 0.8),
        (SCORE_END.format(low=0, high=10), None),
        ("Score: 0 to 10", None),
        ("Score: 7 or 8", None),
        ("Score: 0 if it is wrong, Score: 10 if it is right", None),
    ],
)
def test_a_score_counts_where_no_other_stands_beside_it(reply, reward):
    assert said(on_scale, reply, 0, 10) == reward


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("1: no, I thought, but it is\n1: yes\n2: no", 0.5),
        ("1: yes, no error is left\n2: yes / met", 1.0),
        ("1: yes (1: yes)\n2. **No**", 0.5),
        (f"{RUBRIC_END}\n1: yes\n2: no", 0.5),
        ("`1: yes` if it is met, `1: no` if not\n`2: yes` if it is met, `2: no` if not", None),
        ("1: yes or no\n2: yes or no", None),
        ("1: yes/no\n2: yes|no", None),
        ("1: `yes` or `no`\n2: yes", None),
        (RUBRIC_END, None),
    ],
)
def test_an_answer_counts_where_no_other_stands_beside_it(reply, reward):
    assert said(share_met, reply, 2) == reward

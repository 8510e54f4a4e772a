"""Reward `math` on real phrasings, on the main thread and off it."""

import threading

import pytest

from infsample_rl.reward.rule_math import score

RIGHT = [
    (r"\frac{1}{2}", "The answer is 0.5"),
    (r"\frac{1}{2}", r"so we get \boxed{\frac12}."),
    (r"$\frac{3}{4}$", "3/4"),
    (r"(3, \frac{\pi}{2})", r"so $\left( 3, \frac{\pi}{2} \right)$."),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}"),
    (r"\text{Evelyn}", "Answer: Evelyn."),
    ("1,234", r"\boxed{1234}"),
    (r"x \in [-2,7]", r"\boxed{[-2,7]}"),
    ("2x+3", "$3+2x$"),
    ("2x+3", r"Answer: \boxed{3+2x}"),
    ("6", r"\boxed{6}. Answer: 5"),
    ("5", "<answer>5</answer> so $7$"),
    (r"\frac{1}{2}", "<answer>$\\frac12$</answer>"),
    ("5", r"in \boxed{}: $5$"),
    ("5", "Answer: 5\n\nCheck: 2+4=6"),
    ("10", "Answer:\n$$\nx = 10\n$$"),
    (r"90^\circ", r"\boxed{90}"),
    (r"12 \text{ cm}", "it is 12"),
    (r"We have $x=3$, so \boxed{3}", "3"),
    (7, "#### 7"),
    (r"11\sqrt2", r"$$11\sqrt{2}$$"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}"),
]
WRONG = [
    ("5", r"\boxed{6}, not 5"),
    ("5", r"\boxed{6}. Answer: 5"),
    ("5", r"\boxed{5}, no: \boxed{6}"),
    ("7", "<answer>5</answer> so $7$"),
    ("6", "Answer: 5\n\nCheck: 2+4=6"),
    (r"\sqrt{2}", r"\boxed{1.41}"),
    ("p - q", r"\boxed{q - p}"),
    ("3", ""),
    ("3", r"\boxed{"),
    (r"\text{Evelyn}", "Bob"),
]


@pytest.mark.parametrize(("answer", "response", "reward"), [(*c, 1.0) for c in RIGHT] + [(*c, 0.0) for c in WRONG])
def test_equal_answers_score_one_and_others_zero(answer, response, reward):
    assert score(response, {"answer": answer}) == reward


def test_scores_outside_the_main_thread_where_alarms_are_refused():
    scores = []
    thread = threading.Thread(target=lambda: scores.append(score(r"\boxed{0.25}", {"answer": r"\frac{1}{4}"})))
    thread.start()
    thread.join()
    assert scores == [1.0]

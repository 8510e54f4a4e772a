"""Reward `kk`: the roles that the marked answer of a response states, and nothing less plain."""

import random

import pytest

from infsample_rl.reward.rule_kk import final_roles, gold_roles, score
from scripts.kk_puzzles import (
    STYLES,
    answer_text,
    parse_answer,
    random_names,
    random_puzzles,
    reasoning_text,
    record,
)

PAIR = ["Zoey", "Ethan"]
ANSWERS = [
    "Zoey is a knight, Ethan is a knave",
    "(1) Zoey is a knight\n(2) Ethan is a knave",
    "1. **Zoey**: Knight\n2. **Ethan**: Knave.",
    "- Zoey -> knight\n- Ethan -> knave",
    "zoey is a KNIGHT and Ethan is the knave. I hope this helps.",
    "[Zoey = knight; Ethan = knave]",
]
RESPONSES = [
    "Answer: {}",
    "Answer: Zoey is a knave, Ethan is a knave. No.\n**Answer:** {}",
    "**Conclusion:**\n{}",
    "<answer>{}</answer>\nCheck: Zoey is a knave, I first thought.",
    "<think>Answer: Zoey is a knave, Ethan is a knave. Wrong.</think>\n{}",
    "<think>Ethan is a knight.</think><answer>{}",
]
NO_ANSWERS = [
    "",
    "Zoey",
    "Zoey is a knight",
    "Zoey is a knight. Zoey is a knave. Ethan is a knave.",
    "Zoey is a knight and Ethan is a knight. Zoey is a knave and Ethan is a knave.",
    "Zoey is a knight, Ethan is a knave. But if so, Zoey is a knave.",
    "Zoey is a knight or a knave, Ethan is a knave",
    "Zoey is a knight or Ethan is a knave",
    "Zoey is a knight, Ethan is a knave or a knight",
    "Zoey is a knight, Ethan is a knave, or vice versa",
    "Zoey is a knight, Ethan is a knave, Will is a knave",
    "Zoey is a knight, Ethan is a knave?",
    "Is Zoey a knight? Is Ethan a knave?",
    "If Zoey is a knight then Ethan is a knave.",
    "Zoey may be a knight. Ethan is a knave.",
    "Zoey is not a knight, Ethan is not a knave",
    "Zoey and Ethan are not both knights",
    "Zoey says Ethan is a knave. Ethan says Zoey is a knight.",
    "knight, knave",
]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("response", RESPONSES)
def test_a_marked_answer_is_read(response, answer):
    assert final_roles(response.format(answer), PAIR) == {"Zoey": True, "Ethan": False}


@pytest.mark.parametrize("answer", NO_ANSWERS)
@pytest.mark.parametrize("response", RESPONSES)
def test_missing_contradicted_or_doubtful_roles_are_not_read(response, answer):
    assert final_roles(response.format(answer), PAIR) is None


def test_roles_outside_a_marked_answer_are_not_read():
    assert final_roles("So Zoey is a knight and Ethan is a knave.", PAIR) is None


def test_one_wrong_role_scores_zero():
    columns = {"names": PAIR, "solution": [True, False]}
    assert score("Answer: Zoey is a knight, Ethan is a knave", columns) == 1.0
    assert score("Answer: Zoey is a knight, Ethan is a knight", columns) == 0.0
    assert score("Answer: Zoey is a knave, Ethan is a knave", columns) == 0.0
    assert score("Zoey and Ethan", columns) == 0.0


def test_worked_reasoning_is_scored_as_its_own_generator_reads_it():
    rng = random.Random(0)
    puzzles = random_puzzles(rng)
    right = 0
    for _ in range(200):
        puzzle = next(puzzles)
        names = random_names(rng, len(puzzle.solution))
        response = reasoning_text(puzzle, names, rng.choice(STYLES), rng)
        expected = float(parse_answer(response, names) == list(puzzle.solution))
        right += expected
        assert score(response, record(puzzle, names)) == expected
        assert score(response, {"answer": answer_text(names, puzzle.solution)}) == expected
    assert 50 < right < 190


@pytest.mark.parametrize(
    "columns",
    [
        {"names": PAIR, "solution": [True, False]},
        {"names": PAIR, "solution": "worked text", "answer": "Zoey is a knight, Ethan is a knave"},
        {"answer": "(1) Zoey is a knight\n(2) Ethan is a knave"},
        {"answer": "Zoey: knight, Ethan: knave"},
        {"answer": {"solution_text_format": "(1) Zoey is a knight\n(2) Ethan is a knave"}},
    ],
)
def test_every_form_of_the_solution(columns):
    assert gold_roles(columns) == {"Zoey": True, "Ethan": False}


@pytest.mark.parametrize("columns", [{}, {"answer": "42"}, {"answer": [True]}, {"names": PAIR, "solution": [True]}])
def test_a_row_without_a_solution_is_an_error(columns):
    with pytest.raises(ValueError, match="no right answer|states no role|is shorter than"):
        score("Answer: Zoey is a knight", columns)

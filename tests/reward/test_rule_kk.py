"""Reward `kk`: the roles a response finally gives, whatever the phrasing."""

import random

import pytest

from infsample_rl.reward.kk_roles import final_roles
from infsample_rl.reward.rule_kk import gold_roles, score
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
TRIO = ["Zoey", "Ethan", "Will"]

ZOEY_KNIGHT_ETHAN_KNAVE = [
    "Zoey is a knight, Ethan is a knave",
    "(1) Zoey is a knight\n(2) Ethan is a knave",
    "1. Zoey is a knight.\n2. Ethan is a knave.",
    "Zoey: knight\nEthan: knave",
    "Zoey: knight, Ethan: knave",
    "Zoey = knight, Ethan = knave",
    "Zoey is a truth-teller and Ethan is a liar.",
    "**Zoey** is a **knight** and **Ethan** is a **knave**.",
    "- **Zoey**: Knight\n- **Ethan**: Knave",
    "| Zoey | knight |\n|---|---|\n| Ethan | knave |",
    "| Name | Role |\n|---|---|\n| Zoey | Knight |\n| Ethan | Knave |",
    "Zoey is not a knave and Ethan is not a knight",
    "Zoey isn't a knave. Ethan isn't a knight.",
    "Zoey is a knight, Ethan is not.",
    "Zoey is not a knave but a knight; Ethan is a knave.",
    "Knights: Zoey\nKnaves: Ethan",
    "Knights: Zoey. Knaves: Ethan.",
    "Knights:\n- Zoey\nKnaves:\n- Ethan",
    "The knight is Zoey and the knave is Ethan.",
    "The only knight is Zoey, Ethan is a knave",
    "Knight: Zoey, Knave: Ethan",
    '{"Zoey": "knight", "Ethan": "knave"}',
    '{"knights": ["Zoey"], "knaves": ["Ethan"]}',
    "\\boxed{\\text{Zoey is a knight, Ethan is a knave}}",
    "<think>Ethan is a knight. Zoey is a knave.</think><answer>(1) Zoey is a knight\n(2) Ethan is a knave</answer>",
    "If Zoey is a knave then Ethan is a knight. Contradiction. So Zoey is a knight and Ethan is a knave.",
    "Suppose Zoey is a knave. That fails.\nTherefore, Zoey is a knight, and Ethan must be a knave.",
    "Zoey is a knight. Ethan is a knave. This fits: Zoey says Ethan is a knave, and Ethan says Zoey is a knave.",
    'Answer: Zoey is a knight, Ethan is a knave, since Ethan said "Zoey is a knave".',
    "Zoey -> knight; Ethan -> knave",
    "Zoey \u2192 knight, Ethan \u2192 knave",
    "Zoey (knight), Ethan (knave)",
    "Zoey \u2014 knight, Ethan \u2014 knave",
    "Zoey - knight\nEthan - knave",
    "Zoey is the knight and Ethan the knave",
    "Zoey and Ethan are a knight and a knave, respectively",
    "Zoey and Ethan are knight and knave respectively.",
    "Zoey always tells the truth and Ethan always lies.",
    "Zoey tells the truth; Ethan is lying",
    "Zoey must be a knight, and Ethan cannot be a knight",
    "Zoey cannot be a knave. Ethan can't be a knight.",
    "zoey is a knight and ethan is a knave",
    "ZOEY: KNIGHT, ETHAN: KNAVE",
    "Zoey\u2019s a knight, Ethan\u2019s a knave",
    "The answer is Zoey is a knight and Ethan is a knave.",
    "### Final Answer\nZoey is a knight.\nEthan is a knave.",
    "**Conclusion:** Zoey is a knight (truth-teller), Ethan is a knave (liar).",
    "Answer: knight, knave",
    "Answer: Zoey is a knight, the other is a knave",
    "Zoey is a knight, Ethan, on the other hand, is a knave",
    "Try Zoey knave, Ethan knave.\nZoey knave: false, no.\nTry Zoey knight, Ethan knave.\nAll fit. Answer: Zoey is a "
    "knight, Ethan is a knave.",
    "Zoey:\nKnight\nEthan:\nKnave",
    "Zoey's role is knight. Ethan's role is knave.",
    "Zoey does not lie. Ethan does not tell the truth.",
    "Answer: Zoey is a knight and Ethan is a knave. I hope this answer helps.",
    "Neither is a liar? No. Zoey is a knight; Ethan is a knave",
    "Zoey is a knight, whereas Ethan is a knave.",
    "We conclude that Zoey is a knight and that Ethan is a knave.",
    "It follows that Ethan is a knave and Zoey, a knight.",
    "Zoey knight, Ethan knave",
    "Zoey is therefore a knight; Ethan is therefore a knave.",
    "Zoey is a knight because Ethan is a knave.",
    "Ethan is a knave, making Zoey a knight.",
    "Thus:\n\nZoey is a **knight**.\n\nEthan is a **knave**.",
    "Zoey is indeed telling the truth, so Zoey is a knight and Ethan is a knave",
    "Zoey must be telling the truth and Ethan must be lying",
    "[Zoey: knight] [Ethan: knave]",
    "Zoey is a Knight\\\\ Ethan is a Knave",
    "Solution: Zoey is one of the knights; Ethan is one of the knaves.",
]
BOTH_KNIGHTS = [
    "Zoey and Ethan are knights",
    "They are both knights",
    "Neither of them is a knave.",
    "Zoey is a knight and so is Ethan.",
    "Zoey is a knight. Ethan is a knight too.",
    "Everyone is a knight",
    "none of them is a knave",
    "Zoey, Ethan: knights",
    "The knights are Zoey and Ethan.",
    "Knights = {Zoey, Ethan}, Knaves = {}",
    "Answer: both inhabitants are knights",
]
BOTH_KNAVES = [
    "both are knaves",
    "Both Zoey and Ethan are knaves.",
    "neither Zoey nor Ethan is a knight",
    "Zoey is a knave and Ethan is too.",
    "All inhabitants are knaves.",
    "Both of them are knaves",
    "Knaves: Zoey and Ethan",
    "Zoey & Ethan are both knaves",
    "Zoey and Ethan are not knights",
    "Zoey and Ethan are both liars",
    "Knights: none\nKnaves: Zoey, Ethan",
    "both are not knights",
    "Answer: Zoey is a knight, Ethan is a knave. Answer: Zoey is a knave, Ethan is a knave",
]
MISSING_OR_CONTRADICTORY = [
    "Zoey is a knight",
    "",
    "Answer: Zoey is a knight. Zoey is a knave. Ethan is a knave.",
    "Zoey is a knight and Zoey is a knave, Ethan is a knave",
    "Zoey is a knight or a knave, Ethan is a knave",
    "Is Zoey a knight? Is Ethan a knave?",
    "If Zoey is a knight then Ethan is a knave.",
    "Zoey and Ethan are not both knights",
    "Zoey says Ethan is a knave. Ethan says Zoey is a knight.",
    "Not both are knaves.",
    "Zoey is a knight or Ethan is a knave",
    "Zoey is either a knight or a knave",
    "Knights always tell the truth and knaves always lie.",
    "Answer: Zoey",
    "Answer: Zoey may be a knight. Ethan is a knave.",
    "Zoey told Ethan is a knave",
    "knight, knave",
    "Answer: Zoey is a knight and Ethan is a knight. Zoey is a knave and Ethan is a knave.",
]
THREE = {  # 1: knight, 0: knave
    "Zoey is a knight and the others are knaves": "100",
    "Zoey and Ethan are knights, Will is a knave": "110",
    "Zoey is a knight, Ethan and Will are knaves": "100",
    "Knights: Zoey, Ethan\nKnaves: Will": "110",
    "Knights:\n* Zoey\n* Will\n\nKnaves:\n* Ethan": "101",
    "All three are knights": "111",
    "Zoey, Ethan, and Will are all knaves": "000",
    "Zoey is a knight, Ethan is a knave, and Will is a knight. This will be right.": "101",
    "Only Zoey is a knight; the rest are knaves": "100",
    "Zoey is a knight while both Ethan and Will are knaves": "100",
    "The knights are Zoey and Ethan, Will is a knave": "110",
    "Zoey is a knight, both Ethan and Will are not": "100",
    "Zoey is a knight, neither Ethan nor Will is": "100",
    "Zoey, Ethan are knights and Will is the only knave.": "110",
    "The knights are Zoey and Ethan, and the knave is Will": "110",
    "Knights: Zoey and Ethan; Knave: Will": "110",
    "Zoey, Ethan and Will are knight, knave and knight respectively": "101",
}


@pytest.mark.parametrize("response", ZOEY_KNIGHT_ETHAN_KNAVE)
def test_a_knight_and_a_knave(response):
    assert final_roles(response, PAIR) == {"Zoey": True, "Ethan": False}


@pytest.mark.parametrize("response", BOTH_KNIGHTS)
def test_two_knights(response):
    assert final_roles(response, PAIR) == {"Zoey": True, "Ethan": True}


@pytest.mark.parametrize("response", BOTH_KNAVES)
def test_two_knaves(response):
    assert final_roles(response, PAIR) == {"Zoey": False, "Ethan": False}


@pytest.mark.parametrize("response", MISSING_OR_CONTRADICTORY)
def test_missing_or_contradictory_roles_score_zero(response):
    assert final_roles(response, PAIR) is None
    for zoey in (True, False):
        for ethan in (True, False):
            assert score(response, {"names": PAIR, "solution": [zoey, ethan]}) == 0.0


@pytest.mark.parametrize(("response", "roles"), THREE.items())
def test_three_inhabitants(response, roles):
    assert final_roles(response, TRIO) == {name: role == "1" for name, role in zip(TRIO, roles, strict=True)}


def test_both_says_nothing_about_three_inhabitants():
    assert final_roles("Answer: both are knaves", TRIO) is None


def test_one_wrong_role_scores_zero():
    columns = {"names": PAIR, "solution": [True, False]}
    assert score("Answer: Zoey is a knight, Ethan is a knave", columns) == 1.0
    assert score("Answer: Zoey is a knight, Ethan is a knight", columns) == 0.0
    assert score("Answer: Zoey is a knave, Ethan is a knave", columns) == 0.0


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
        {"names": PAIR, "solution": "worked text", "answer": [1, 0]},
        {"answer": "Zoey is a knight, Ethan is a knave"},
        {"answer": "(1) Zoey is a knight\n(2) Ethan is a knave"},
        {"answer": '{"Zoey": "knight", "Ethan": "Knave"}'},
        {"answer": {"Zoey": True, "Ethan": False}},
        {"names": PAIR, "answer": "Only Zoey is a knight; the rest are knaves"},
        {"reward_model": {"ground_truth": "Zoey: knight, Ethan: knave"}},
        {
            "reward_model": {
                "ground_truth": {
                    "solution_text_format": "(1) Zoey is a knight\n(2) Ethan is a knave",
                    "statements": "...",
                }
            }
        },
    ],
)
def test_every_form_of_the_solution(columns):
    assert gold_roles(columns) == {"Zoey": True, "Ethan": False}


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"answer": "42"},
        {"answer": [True, False]},
        {"names": PAIR, "solution": [True]},
        {"answer": {"Zoey": "jester"}},
    ],
)
def test_a_row_without_a_solution_is_an_error(columns):
    with pytest.raises(
        ValueError, match="no right answer|gives roles to nobody|do not fit together|unknown role 'jester'"
    ):
        score("Zoey is a knight", columns)

"""Which of the answers that a response names is its final one."""

from __future__ import annotations

import pytest

from infsample_rl.reward import final_answer, kk_roles, rule_gsm8k, rule_kk


def test_an_empty_answer_marker_does_not_hide_a_boxed_answer():
    assert rule_gsm8k.score("#### Final answer\n\nStep 1 gives 3, so \\boxed{7}.", {"answer": "7"}) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [("<answer>3</answer> No, I slipped: <answer>4</answer>", "4"), ("**Answer:** $\\boxed{knight}$", "knight")],
)
def test_the_explicit_answer_is_the_last_one_without_its_markup(text, answer):
    assert final_answer.explicit_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "<think>First answer: Zoey is a knave, Ethan is a knave. Wrong.</think>\nZoey is a knight. Ethan is a knave.",
        "<answer>Zoey is a knight, Ethan is a knave</answer>\nCheck: Zoey is a knave, I first thought.",
    ],
)
def test_roles_are_read_neither_from_the_thoughts_nor_after_the_answer(text):
    assert kk_roles.final_roles(text, ["Zoey", "Ethan"]) == {"Zoey": True, "Ethan": False}


def test_a_solution_of_other_names_is_refused():
    with pytest.raises(ValueError):
        rule_kk.gold_roles({"names": ["Ava", "Ben"], "solution": {"Ava": True, "Bob": False}})

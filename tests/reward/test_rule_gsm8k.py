"""The final number of real phrasings, as reward `gsm8k` reads it."""

from decimal import Decimal

import pytest

from infsample_rl.reward.rule_gsm8k import final_number, score

PHRASINGS = {
    "She sold 48/2 = 24 clips in May, 48+24 = 72 in all.\n#### 72": "72",
    "#### $1,234.00": "1234",
    "#### 18 eggs (9 * 2 of them on Monday)": "18",
    "The answer is 72.": "72",
    "The answer is **$18.50**.": "18.5",
    "so 50% of them stay": "50",
    "the loss is -$5": "-5",
    "it changes by $-5 a day": "-5",
    "10 - 3 = 7": "7",
    "10-3": "3",
    "temperature: \u22123 degrees": "-3",
    "\\boxed{1{,}200}, not 7": "1200",
    "\\boxed{\\$18.50}": "18.50",
    "\\boxed{x = 5 \\text{ m}^2}": "5",
    "#### 3 first, later #### 4": "4",
    "about 1,234,567": "1234567",
    "3,4": "4",
    "a share of .5": "0.5",
    "x7": "7",
}


@pytest.mark.parametrize(("response", "number"), PHRASINGS.items())
def test_final_number_of_a_phrasing(response, number):
    assert final_number(response) == Decimal(number)


def test_no_number_scores_zero():
    assert final_number("I do not know.") is None
    assert score("I do not know.", {"answer": "72"}) == 0.0


@pytest.mark.parametrize("answer", ["72", 72, 72.0, "7*2 is not it\n#### 72", "72.0", "$72"])
def test_every_form_of_the_right_answer(answer):
    assert score("so it is 72 clips", {"answer": answer}) == 1.0
    assert score("so it is 73 clips", {"answer": answer}) == 0.0


@pytest.mark.parametrize("columns", [{}, {"solution": "3"}, {"answer": "none"}])
def test_a_row_without_a_right_answer_is_an_error(columns):
    with pytest.raises(ValueError, match="no right answer|holds no number"):
        score("72", columns)

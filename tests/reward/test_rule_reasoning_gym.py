"""Reward `reasoning_gym`: the task's own scorer, on the text marked as the answer."""

import pytest
import reasoning_gym

from infsample_rl.reward.rule_reasoning_gym import score

COLUMNS = {"task": "basic_arithmetic", "entry": {"question": "3 * 4 =", "answer": "12", "metadata": {}}}


@pytest.mark.parametrize(
    "response",
    ["12", " 12\n", "Answer: 12", "**Answer:** 12.", "<answer>12</answer>", r"\boxed{12}", "3 * 4 = 12", "That is 12."],
)
def test_a_right_number_scores_one_in_every_phrasing(response):
    assert score(response, COLUMNS) == 1.0


@pytest.mark.parametrize(
    "response", ["", "13", "Answer: 13", "I think 12, no, 13", "Answer: 13. 12 would be too little"]
)
def test_another_number_scores_less_than_one(response):
    assert score(response, COLUMNS) < 1.0


def test_only_what_follows_the_last_answer_label_counts():
    assert score("Answer: 12\nNo.\nAnswer: 13", COLUMNS) == 0.0


@pytest.mark.parametrize("task", ["chain_sum", "knights_knaves", "letter_counting"])
def test_a_tasks_own_answer_scores_one(task):
    entry = reasoning_gym.create_dataset(task, seed=1, size=1)[0]
    assert score(f"Let me think.\nAnswer: {entry['answer']}", {"task": task, "entry": entry}) == 1.0

"""The reward worker: weighted sums, failures that are None and shown, and order whatever ends first."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from infsample_rl.reward.worker import RewardWorker, Scored, weighted_sums
from infsample_rl.types import Completion, Episode, Prompt
from tests.configs import run_config
from tests.scored_texts import score_texts
from tests.tiny_models import finished

PROMPT = Prompt(
    prompt_index=0,
    row=17,
    messages=[{"role": "user", "content": "1 + 2 = ?"}],
    text="<user>1 + 2 = ?",
    token_ids=np.array([1], np.int32),
    columns={"answer": "3"},
)


def completion_of(worker: RewardWorker, sample_index: int, text: str, episode: Episode | None = None) -> Completion:
    return finished(0, sample_index, worker.tokenizer(text)["input_ids"], episode=episode)


@pytest.fixture
def open_worker(tiny_qwen3, user_file, closing):
    """Builds a worker from function names (":name" is one of the user file) and closes it after the test."""

    def build(*functions, stop_strings=(), factory=None, teacher=None, **settings) -> RewardWorker:
        entries = [function if isinstance(function, dict) else {"name": function} for function in functions]
        listed = [entry | {"name": re.sub("^:", f"{user_file}:", entry["name"])} for entry in entries]
        config = run_config(
            model={"path": str(tiny_qwen3)},
            data={"source": "kk"},
            rollout={"stop_strings": list(stop_strings)},
            environment={"factory": factory},
            objective={"reward_coef": 0.0, "distill_coef": 1.0} if teacher else {},
            reference={"path": teacher},
            reward={"functions": listed, **settings},
        )
        return closing(RewardWorker(config))

    return build


def test_completions_are_decoded_without_special_tokens(open_worker):
    worker = open_worker("gsm8k", ":brevity")
    texts = ("It is 3<|im_end|>", "4<|im_end|>", "")
    before = time.time()
    (result,) = worker.score([(PROMPT, [completion_of(worker, index, text) for index, text in enumerate(texts)])])
    assert result.components == {"gsm8k": [1.0, 0.0, 0.0], "brevity": [-7.0, -1.0, 0.0]}
    assert (result.rewards, result.failures) == ([-6.0, -1.0, 0.0], [])
    assert before <= result.started_at <= result.finished_at <= time.time()
    (nothing,) = worker.score([(PROMPT, [])])
    assert (nothing.rewards, nothing.components, nothing.failures) == ([], {"gsm8k": [], "brevity": []}, [])


def test_where_no_function_is_asked_nothing_fails(open_worker):
    worker = open_worker(teacher="teacher")
    (result,) = worker.score([(PROMPT, [completion_of(worker, index, "3") for index in range(2)])])
    assert (result.rewards, result.components, result.failures) == ([None, None], {}, [])


@pytest.mark.parametrize("functions", [["gsm8k"], ["gsm8k", "environment"], ["environment"]])
def test_a_trajectory_whose_environment_failed_has_no_reward_of_any_function(open_worker, functions):
    worker = open_worker(*functions, factory="a.py:A")
    figures = {"turns": 1, "calls": 1, "waited_s": 1.0}
    episodes = [
        Episode(reward=1.0, failure="", **figures),
        Episode(reward=None, failure="timed out after 1 s", **figures),
    ]
    completions = [completion_of(worker, index, "3", episode) for index, episode in enumerate(episodes)]
    (result,) = worker.score([(PROMPT, completions)])
    assert result.rewards == [float(len(functions)), None]
    assert result.components == {name: [1.0, None] for name in functions}
    assert result.failures == ["environment: timed out after 1 s on prompt row 17 (1 sample)"]


def test_rewards_get_the_text_before_the_first_stop_string(open_worker):
    worker = open_worker("gsm8k", stop_strings=["\n\n", "</a>"])
    given = []
    worker._begin = lambda prompt, texts, token_ids, *_: given.append((texts, [len(row) for row in token_ids]))
    worker._finish = lambda begun: None
    texts = ("3</a>", "4\n\n5</a>", "6</b", "</a")
    worker.score([(PROMPT, [completion_of(worker, index, text) for index, text in enumerate(texts)])])
    assert given == [(["3", "4", "6</b", "</a"], [5, 8, 4, 3])]  # the tokens are all there


def test_rewards_are_the_weighted_sum(open_worker):
    scored = {"name": ":compute_score", "kwargs": {"bonus": 0.25}}
    worker = open_worker({"name": "gsm8k", "weight": 2.0}, {"name": ":brevity", "weight": 0.5}, scored)
    result = score_texts(worker, PROMPT, ["3", "13"])
    scores = {"gsm8k": [1.0, 0.0], "brevity": [-1.0, -2.0], "compute_score": [1.25, 0.25]}
    assert result.components == scores | {"compute_score/acc": [1.0, 1.0]}
    assert result.rewards == [2.0 - 0.5 + 1.25, -1.0 + 0.25]


def test_only_finite_numbers_are_rewards(open_worker):
    result = score_texts(open_worker(":mixed"), PROMPT, list("abcdef"))
    assert result.rewards == [1.5, None, None, None, None, 1.0]
    said = ("returned nan", "returned inf", "returned 'high', which is not a number", "returned None")
    assert sorted(result.failures) == sorted(f"mixed: {problem} on prompt row 17 (1 sample)" for problem in said)


@pytest.mark.parametrize(
    ("function", "failure"),
    [
        ("raises", r"ValueError: no such thing \(.*user_rewards.py:\d+\) on prompt row 17 \(2 samples\)"),
        ("leaves", r"SystemExit: 3 \(.*user_rewards.py:\d+\) on prompt row 17 \(2 samples\)"),
        ("too_few", "ValueError: the function returned 1 values for 2 samples"),
        ("no_list", "ValueError: the function must return a list of 2 rewards, got 1.0"),
        ("no_score", "ValueError: the function returned a dict without 'score'; its keys are acc"),
        ("needs_level", r"TypeError: needs_level\(\) missing 1 required positional argument: 'level'"),
    ],
)
def test_a_failed_call_is_none_for_its_samples_and_shown(open_worker, function, failure):
    result = score_texts(open_worker("gsm8k", f":{function}"), PROMPT, ["3", "4"])
    assert result.rewards == [None, None]
    assert result.components == {"gsm8k": [1.0, 0.0], function: [None, None]}
    assert len(result.failures) == 1 and re.match(f"{function}: raised {failure}", result.failures[0])


def test_printing_reading_and_flooding_do_not_disturb(open_worker):
    assert score_texts(open_worker(":prints", "gsm8k"), PROMPT, ["3", "4"]).rewards == [2.0, 1.0]


def test_a_hang_costs_one_sample_and_progress_grows_meanwhile(open_worker):
    worker = open_worker(":acts", timeout_s=3.0)
    with ThreadPoolExecutor(1) as thread:
        scored = thread.submit(score_texts, worker, PROMPT, ["a", "abc", "hang"])
        while worker.progress() < 2:
            assert not scored.done()
            time.sleep(0.01)
        assert not scored.done() and worker.progress() == 2
    assert scored.result().rewards == [1.0, 3.0, None]
    assert scored.result().failures == ["acts: timed out after 3 s on prompt row 17 (1 sample)"]
    assert worker.progress() == 4, "and by one for the whole"


def test_order_is_kept_over_several_processes_and_threads(open_worker):
    worker = open_worker(":acts", ":brevity", processes=2)
    texts = ["x" * length for length in (5, 1, 4, 2, 3)]
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda first: score_texts(worker, PROMPT, texts[first:]), range(3)))
    for first, result in enumerate(results):
        lengths = [float(len(text)) for text in texts[first:]]
        assert result.components == {"acts": lengths, "brevity": [-length for length in lengths]}


@pytest.mark.parametrize(
    ("columns", "rewards"),
    [
        ([(1e17, [1e308, 1.0])], [None, 1e17]),
        ([(1.0, [1.7e308]), (1.0, [1.7e308])], [None]),
        ([(1e300, [1e300]), (1e300, [-1e300])], [None]),
        ([(1.0, [1.0]), (2.0, [None])], [1.0]),  # left out
        ([(1.0, [None]), (2.0, [None])], [None]),
    ],
)
def test_a_sum_that_overflows_or_has_no_term_is_none_and_said(columns, rewards):
    scored = [Scored(weight, values, [""] * len(values)) for weight, values in columns]
    assert weighted_sums(scored, len(rewards)) == rewards
    assert [bool(problem) for problem in scored[0].problems] == [reward is None for reward in rewards]


def test_a_reward_that_no_advantage_could_hold_is_said(open_worker):
    result = score_texts(open_worker(":huge"), PROMPT, ["a", "b"])
    assert result.rewards == [None, 1.0]
    assert result.failures == ["huge: no reward: a weighted value is above 1e+18 on prompt row 17 (1 sample)"]

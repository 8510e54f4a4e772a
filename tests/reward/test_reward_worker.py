"""The reward worker: weighted sums, failures that are None and shown, TRL's and verl's forms."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from infsample_rl.config import Config, DataConfig, ModelConfig, RewardConfig, RewardFunctionConfig, RolloutConfig
from infsample_rl.reward.worker import RewardWorker, failure_lines, weighted_sum
from infsample_rl.types import Completion, Prompt

COLUMNS = {
    "answer": "3",
    "level": 2,
    "data_source": "sums",
    "reward_model": {"ground_truth": "3"},
    "extra_info": {"split": "train"},
}


def make_prompt(columns=None) -> Prompt:
    messages = [{"role": "user", "content": "1 + 2 = ?"}]
    columns = COLUMNS if columns is None else columns
    return Prompt(
        prompt_index=0,
        row=17,
        messages=messages,
        text="<user>1 + 2 = ?",
        token_ids=np.array([1], np.int32),
        columns=columns,
    )


def completion_of(worker: RewardWorker, sample_index: int, text: str) -> Completion:
    ids = np.array(worker.tokenizer(text)["input_ids"], np.int32)
    figures = {
        "logprobs": np.zeros(len(ids), np.float32),
        "sampling_logprobs": None,
        "finish_reason": "stop",
        "policy_version": 0,
    }
    return Completion(prompt_index=0, sample_index=sample_index, token_ids=ids, **figures)


@pytest.fixture
def open_worker(tiny_qwen3, user_file):
    """Builds a worker from function names (":name" is one of the user file) and closes it after the test."""
    workers = []

    def build(*functions, **settings) -> RewardWorker:
        configs = [function if isinstance(function, dict) else {"name": function} for function in functions]
        configs = [
            {**config, "name": f"{user_file}{config['name']}" if config["name"].startswith(":") else config["name"]}
            for config in configs
        ]
        reward = RewardConfig(functions=[RewardFunctionConfig(**config) for config in configs], **settings)
        config = Config(model=ModelConfig(path=str(tiny_qwen3)), data=DataConfig(source="kk"), reward=reward)
        workers.append(RewardWorker(config))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()


def test_completions_are_decoded_without_special_tokens(open_worker):
    worker = open_worker("gsm8k", ":brevity")
    completions = [
        completion_of(worker, index, text) for index, text in enumerate(("It is 3<|im_end|>", "4<|im_end|>", ""))
    ]
    before = time.time()
    result = worker.score(make_prompt(), completions)
    assert result.components == {"gsm8k": [1.0, 0.0, 0.0], "brevity": [-7.0, -1.0, 0.0]}
    assert result.rewards == [-6.0, -1.0, 0.0]
    assert result.failures == []
    assert before <= result.started_at <= result.finished_at <= time.time()


def test_rewards_get_the_text_before_the_first_stop_string(tiny_qwen3):
    reward = RewardConfig(functions=[RewardFunctionConfig(name="gsm8k")])
    rollout = RolloutConfig(stop_strings=["\n\n", "</a>"])
    worker = RewardWorker(
        Config(model=ModelConfig(path=str(tiny_qwen3)), data=DataConfig(source="kk"), rollout=rollout, reward=reward)
    )
    given = []
    worker.score_texts = lambda prompt, texts, token_ids, step: given.append((texts, [len(row) for row in token_ids]))
    try:
        worker.score(
            make_prompt(),
            [completion_of(worker, index, text) for index, text in enumerate(("3</a>", "4\n\n5</a>", "6</b", "</a"))],
        )
    finally:
        worker.close()
    assert given == [(["3", "4", "6</b", "</a"], [5, 8, 4, 3])]  # the tokens are all there


def test_rewards_are_the_weighted_sum(open_worker):
    worker = open_worker(
        {"name": "gsm8k", "weight": 2.0},
        {"name": ":brevity", "weight": 0.5},
        {"name": ":compute_score", "kwargs": {"bonus": 0.25}},
    )
    result = worker.score_texts(make_prompt(), ["3", "13"])
    scores = {"gsm8k": [1.0, 0.0], "brevity": [-1.0, -2.0], "compute_score": [1.25, 0.25]}
    assert result.components == scores | {"compute_score/acc": [1.0, 1.0]}
    assert result.rewards == [2.0 - 0.5 + 1.25, -1.0 + 0.25]


def test_what_trl_functions_are_given(open_worker):
    worker = open_worker(":sees", ":contains_answer", ":awaited", ":numpy_values")
    result = worker.score_texts(make_prompt(), ["it is 3", "no"], token_ids=[[5, 6], [7]])
    assert result.failures == []
    assert result.components["sees"] == [15 + 20 + 200, 15 + 10 + 200]
    assert result.components["contains_answer"] == [1.0, 0.0]
    assert result.components["numpy_values"] == [0.5, 0.5]


def test_a_prompt_column_of_messages_gives_completions_as_messages(open_worker):
    worker = open_worker(":chat_length")
    conversational = make_prompt({"prompt": [{"role": "user", "content": "1 + 2 = ?"}]})
    assert worker.score_texts(conversational, ["abc", "de"]).rewards == [3.0, 2.0]


def test_what_verl_functions_are_given(open_worker):
    result = open_worker(":verl_sees", ":compute_score").score_texts(make_prompt(), ["3", "4"])
    assert result.components == {"verl_sees": [1.0, 1.0], "compute_score": [1.0, 0.0], "compute_score/acc": [1.0, 1.0]}
    assert open_worker(":compute_score").score_texts(make_prompt({"answer": "3"}), ["3"]).rewards == [1.0]


def test_only_finite_numbers_are_rewards(open_worker):
    result = open_worker(":mixed").score_texts(make_prompt(), list("abcdef"))
    assert result.rewards == [1.5, None, None, None, None, 1.0]
    assert result.failures == [
        "mixed: returned nan on prompt row 17 (1 sample)",
        "mixed: returned inf on prompt row 17 (1 sample)",
        "mixed: returned None on prompt row 17 (1 sample)",
        "mixed: returned 'high', which is not a number on prompt row 17 (1 sample)",
    ]


@pytest.mark.parametrize(
    ("function", "failure"),
    [
        (":raises", "raises: raised ValueError: no such thing (FILE:34) on prompt row 17 (2 samples)"),
        (":leaves", "leaves: raised SystemExit: 3 (FILE:37) on prompt row 17 (2 samples)"),
        (":too_few", "too_few: raised ValueError: the function returned 1 values for 2 samples"),
        (":no_list", "no_list: raised ValueError: the function must return a list of 2 rewards, got 1.0"),
        (":no_score", "no_score: raised ValueError: the function returned a dict without 'score'; its keys are acc"),
    ],
)
def test_a_failed_call_is_none_for_its_samples_and_shown(open_worker, user_file, function, failure):
    result = open_worker("gsm8k", function).score_texts(make_prompt(), ["3", "4"])
    assert result.rewards == [None, None]
    assert result.components == {"gsm8k": [1.0, 0.0], function[1:]: [None, None]}
    assert len(result.failures) == 1 and result.failures[0].startswith(failure.replace("FILE", str(user_file)))


def test_a_missing_column_is_named(open_worker):
    result = open_worker(":needs_level").score_texts(make_prompt({"answer": "3"}), ["3"])
    assert result.rewards == [None]
    assert "needs the column 'level'; the row has answer" in result.failures[0]


def test_printing_reading_and_flooding_do_not_disturb(open_worker):
    result = open_worker(":prints", "gsm8k").score_texts(make_prompt(), ["3", "4"])
    assert result.rewards == [2.0, 1.0]


def test_a_hang_costs_one_sample(open_worker):
    worker = open_worker(":acts", timeout_s=0.5)
    result = worker.score_texts(make_prompt(), ["a", "hang", "abc"])
    assert result.rewards == [1.0, None, 3.0]
    assert result.failures == ["acts: timed out after 0.5 s on prompt row 17 (1 sample)"]
    assert worker.score_texts(make_prompt(), ["abcd"]).rewards == [4.0]


def test_progress_grows_within_a_micro_group(open_worker):
    worker = open_worker(":acts", timeout_s=3.0)
    with ThreadPoolExecutor(1) as thread:
        scored = thread.submit(worker.score_texts, make_prompt(), ["a", "abc", "hang"])
        while worker.progress() < 2:
            assert not scored.done()
            time.sleep(0.01)
        assert not scored.done() and worker.progress() == 2
    assert worker.progress() == 4, "and by one for the whole"


def test_order_is_kept_over_several_processes_and_threads(open_worker):
    worker = open_worker(":acts", ":brevity", processes=2)
    texts = ["x" * length for length in (5, 1, 4, 2, 3)]
    results = {}
    threads = [
        threading.Thread(target=lambda key=key: results.update({key: worker.score_texts(make_prompt(), texts[key:])}))
        for key in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key in range(3):
        assert results[key].components == {
            "acts": [float(len(t)) for t in texts[key:]],
            "brevity": [-float(len(t)) for t in texts[key:]],
        }


def test_no_samples_give_no_rewards(open_worker):
    result = open_worker("gsm8k").score_texts(make_prompt(), [])
    assert (result.rewards, result.components, result.failures) == ([], {"gsm8k": []}, [])


def test_a_function_that_cannot_be_loaded_is_refused_at_start(open_worker):
    with pytest.raises(ValueError, match="has no function nothing"):
        open_worker(":nothing")


def test_a_sum_that_overflows_is_none():
    assert weighted_sum({"a": [1e308, 1.0]}, {"a": 1e17}, 2) == [None, 1e17]
    assert weighted_sum({"a": [1.7e308], "b": [1.7e308]}, {"a": 1.0, "b": 1.0}, 1) == [None]
    assert weighted_sum({"a": [1e300], "b": [-1e300]}, {"a": 1e300, "b": 1e300}, 1) == [None]
    assert weighted_sum({"a": [1.0], "b": [None]}, {"a": 1.0, "b": 0.0}, 1) == [None]


def test_a_reward_that_no_advantage_could_hold_is_said(open_worker, tmp_path):
    path = tmp_path / "huge.py"
    path.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1e200 if solution_str == 'a' "
        "else 1.0\n"
    )
    result = open_worker(f"{path}:score").score_texts(make_prompt(), ["a", "b"])
    assert result.rewards == [None, 1.0]
    assert result.failures == ["score: no reward: a weighted value is above 1e+18 on prompt row 17 (1 sample)"]


def test_equal_failures_are_one_line():
    problems = {"gsm8k": ["late", "", "late"], "kk": ["bad", "late", ""]}
    expected = [
        "gsm8k: late on prompt row 3 (2 samples)",
        "kk: bad on prompt row 3 (1 sample)",
        "kk: late on prompt row 3 (1 sample)",
    ]
    assert failure_lines(problems, 3) == expected

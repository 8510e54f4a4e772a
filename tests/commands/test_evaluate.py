"""The evaluate and chat commands on a small model: same engine, same rewards, figures that add up."""

from __future__ import annotations

import io
import json
import time
from itertools import combinations

import numpy as np
import pytest

from infsample_rl.commands import chat, evaluate
from infsample_rl.commands.chat import Chat, ChatOptions, chat_config, talk
from infsample_rl.commands.estimates import mean_over_problems, pass_at_k
from tests.observe.logged import logged_config
from tests.tiny_models import finished, prompt_of

REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {'score': "
    "float(len(solution_str) % 2), 'acc': 1.0}\n"
)


@pytest.fixture
def arguments(tiny_qwen3, tmp_path):
    """Arguments of evaluate on five problems."""
    data, reward = tmp_path / "problems.jsonl", tmp_path / "reward.py"
    data.write_text("".join(json.dumps({"question": f"{n} + 1 = ?", "answer": str(n + 1)}) + "\n" for n in range(5)))
    reward.write_text(REWARD)
    return [
        str(tiny_qwen3),
        f"data.source={data}",
        f"reward.functions=[{{name: '{reward}:compute_score'}}]",
        "rollout.max_new_tokens=12",
    ]


def test_figures_are_those_of_the_completions_written(arguments, tmp_path, capsys):
    out = tmp_path / "completions.jsonl"
    assert evaluate.main([*arguments, "samples=4", "k=[1,4]", f"out={out}", "json=true"]) == 0
    figures = json.loads(capsys.readouterr().out)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert (figures["problems"], figures["samples"], len(records)) == (5, 4, 20)
    rewards = [[record["reward"] for record in records if record["row"] == row] for row in range(1, 6)]
    assert figures["pass@1"]["value"] == pytest.approx(sum(map(sum, rewards)) / 20)
    assert figures["pass@4"]["value"] == sum(max(group) for group in rewards) / 5
    assert figures["pass@4"]["interval"] == "wilson"  # of 4 samples all are drawn: each problem passes or not
    assert figures["length"]["value"] == pytest.approx(sum(record["length"] for record in records) / 20)
    assert figures["cut"] == sum(record["finish_reason"] == "length" for record in records) / 20
    assert records[0]["components"]["compute_score/acc"] == 1.0
    assert evaluate.main([*arguments, "samples=4", "run.eval_prompts=2"]) == 0
    shown = capsys.readouterr().out
    assert "pass@4" in shown and "over problems" in shown and "a sample passes at a reward of 0.5" in shown


GAME = """
class Game:
    def reset(self, seed=0, options=None):
        self.turns = 0
        return f"Of {options['answer']}."

    def step(self, action):
        self.turns += 1
        assert "!" not in action
        return f"turn {self.turns}", 0.25, self.turns == 2, False, {}
"""


def test_trajectories_of_several_turns_are_evaluated_with_what_their_environment_gave(arguments, tmp_path, capsys):
    game, out = tmp_path / "game.py", tmp_path / "completions.jsonl"
    game.write_text(GAME)
    own = ["reward.functions=[environment]", "rollout.max_new_tokens=96", f"rollout.stop_token_ids={list(range(48))}"]
    code = evaluate.main([*arguments[:2], *own, f"environment.factory={game}:Game", "samples=4", f"out={out}"])
    shown = capsys.readouterr()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    failed = [record for record in records if record["failure"]]
    assert len(records) == 20 and code == bool(failed), shown.err
    assert all("AssertionError" in record["failure"] and record["reward"] is None for record in failed)
    whole = [record for record in records if record["turn_rewards"] == [0.25, 0.25]]
    assert len(whole) > 5 and all(record["reward"] == 0.5 for record in whole) and "Of 1." in records[0]["prompt"]
    for record in whole:
        [(start, end)] = record["observed"]  # of the last turn nothing is read any more
        assert "turn 1" in record["response"][start:end] and "turn 1" not in record["response"][:start]


def test_samples_that_wait_for_their_rewards_are_left_when_sampling_is_broken_off(monkeypatch):
    scored = []

    class Slow:
        def __init__(self, _: object) -> None:
            pass

        def score(self, asked: list) -> None:
            time.sleep(0.1)
            scored.append(asked)

        def close(self) -> None:
            pass

    def broken_off(*_: object):
        yield from ([finished(index, 0, [0])] for index in range(20))
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "RewardWorker", Slow)
    monkeypatch.setattr(evaluate, "sample_held_out", broken_off)
    with pytest.raises(KeyboardInterrupt):
        evaluate.evaluate(logged_config(), None, [prompt_of(index) for index in range(20)])
    assert len(scored) < 20


def test_a_failed_reward_never_passes():
    ended = {index: finished(0, index, [0, 0]) for index in range(2)}
    found = evaluate.Sampled(prompt=prompt_of(row=1), completions=ended, rewards={0: None, 1: 0.0})
    figures = evaluate.summarise([found], evaluate.EvaluateOptions(samples=2, k=[1], threshold=0.0), seed=0)
    assert figures["pass@1"].value == 1.0 and figures["failed rewards"] == 1


def test_a_broken_reward_is_no_figure_and_exit_code_1_and_a_missing_column_is_told_before(arguments, tmp_path, capsys):
    (tmp_path / "broken.py").write_text(
        "def broken(completions, **columns):\n    return [1 / 0 for _ in completions]\n"
        "def level(completions, level):\n    return level\n"
    )
    broken = [*arguments[:2], f"reward.functions=[{tmp_path}/broken.py:broken]", *arguments[3:], "samples=2"]
    assert evaluate.main(broken) == 1
    shown = capsys.readouterr()
    assert "error: 10 of 10 rewards failed" in shown.err and "broken: raised ZeroDivisionError" in shown.err
    assert all(line.split()[1:] == ["-"] for line in shown.out.splitlines() if line.startswith(("reward", "pass")))
    assert evaluate.main([*broken, "json=true"]) == 1
    assert json.loads(capsys.readouterr().out)["reward"] is None
    assert evaluate.main([*broken, f"reward.functions=[{tmp_path}/broken.py:level]"]) == 2
    expected = (
        f"broken.py:level needs the column 'level', which no row of data.eval_source={tmp_path}/problems.jsonl has"
    )
    assert f"{expected}; the columns are question, answer" in capsys.readouterr().err


def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, tmp_path, capsys):
    for wrong, message in (
        (["samples=2", "k=[4]"], "k must be between 1 and samples = 2, got 4"),
        (["run.eval_samples=2"], "run.eval_samples is of a run; give samples= here"),
        (["rollout.group_size=2"], "rollout.group_size is of a run; give samples= here"),
        (["data.split=train"], "data.split is of a run; give data.eval_split= here"),
        (["smaples=2"], "did you mean samples=...?"),
        (["out=/no/such/folder/x.jsonl"], "cannot be written; give a file in a folder that is there"),
        ([f"out={tmp_path}"], "cannot be written; give a file"),
        ([f"out={tmp_path / 'problems.jsonl'}"], "is the data that is evaluated on; give another file"),
        (["data.sauce=x"], "did you mean data.source?"),
    ):
        assert evaluate.main([*arguments, *wrong]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert evaluate.main([arguments[0], arguments[2]]) == 2
    assert "lies in no run folder: nothing says what to evaluate it on; give data.source=" in capsys.readouterr().err


def test_a_run_that_was_never_evaluated_has_all_its_problems(tiny_qwen3, tmp_path):
    data, run = tmp_path / "problems.jsonl", tmp_path / "run"
    data.write_text(json.dumps({"question": "1 + 1 = ?", "answer": "2"}) + "\n")
    (run / "checkpoints" / "step_000001").mkdir(parents=True)
    data_settings = {"source": "gsm8k", "eval_source": str(data)}
    run_settings = {"eval_prompts": 0, "eval_temperature": 0.0}
    settings = {"model": {"path": str(tiny_qwen3)}, "run": run_settings, "data": data_settings}
    (run / "config.yaml").write_text(json.dumps(settings | {"reward": {"functions": [{"name": "gsm8k"}]}}))
    checkpoint = str(run / "checkpoints" / "step_000001")

    def config(*overrides: str, folder: str = checkpoint):
        return evaluate.evaluation_config(folder, evaluate.EvaluateOptions(), list(overrides))

    assert config().run.eval_prompts == evaluate.ALL_PROBLEMS and config("run.eval_prompts=7").run.eval_prompts == 7
    assert config("++data.source=math").data.eval_source == "math"
    assert config("rollout.max_new_tokens=32768").rollout.max_new_tokens == 32768, "nothing is trained"
    assert config().run.eval_temperature == 0.0 and config("rollout.temperature=0.6").run.eval_temperature is None
    assert config("rollout.temperature=0.6", "run.eval_temperature=0.3").run.eval_temperature == 0.3
    (tmp_path / "latest").symlink_to(checkpoint)
    assert config(folder=str(tmp_path / "latest")).data.eval_source == str(data)
    (run / "checkpoints" / "step_000001" / "driver_state.json").write_text("{}")
    with pytest.raises(ValueError, match=f"CHECKPOINT={run} is a run folder; give a checkpoint of it: {checkpoint}"):
        config(folder=str(run))


def test_of_generated_problems_there_are_as_many_as_a_run_would_take(tiny_qwen3):
    generated = ["data.source=reasoning_gym:leg_counting", "reward.functions=[{name: reasoning_gym}]"]
    for changed, expected in (([], 100), (["run.eval_prompts=7"], 7)):
        config = evaluate.evaluation_config(str(tiny_qwen3), evaluate.EvaluateOptions(), [*generated, *changed])
        assert config.run.eval_prompts == expected


def test_a_model_of_no_run_may_be_evaluated_on_several_sources(tiny_qwen3):
    sources = ["data.sources=[{source: gsm8k}, {source: math}]", "reward.functions=[{name: math}]"]
    config = evaluate.evaluation_config(str(tiny_qwen3), evaluate.EvaluateOptions(), sources)
    assert [part.held_out for part in config.data.parts.values()] == ["gsm8k", "math"]
    assert config.run.eval_prompts == evaluate.ALL_PROBLEMS


def test_a_talk_does_not_need_the_runs_memory(tiny_qwen3, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    data = {"source": "none.jsonl", "max_prompt_tokens": 64}
    settings = {"model": {"path": str(tiny_qwen3)}, "rollout": {"kv_budget_tokens": 512}, "data": data}
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(settings | {"reward": {"functions": [{"name": "math"}]}}))
    config = chat_config(str(checkpoint), ChatOptions(max_new_tokens=512), [])
    assert (config.rollout.max_new_tokens, config.rollout.kv_budget_tokens) == (512, None)


def test_a_talk_streams_remembers_and_forgets(tiny_qwen3):
    options = ChatOptions(temperature=0.0, max_new_tokens=8)
    config = chat_config(str(tiny_qwen3), options, [])
    one = Chat(config, options)
    pieces = list(one.answer("hello"))
    assert one.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "".join(pieces)}]
    first = one.messages[1]["content"]
    assert len(pieces) > 1  # not all at once
    list(one.answer("and now?"))
    assert len(one.messages) == 4
    assert (one.obey("/reset"), one.obey("/help")) == ("forgotten", chat.HELP)
    assert "".join(one.answer("hello")) == first  # greedy, nothing of before is left
    with pytest.raises(ValueError, match=r"temperature must be 0 .* or >= 0.001, got nan"):
        chat_config(str(tiny_qwen3), ChatOptions(temperature=float("nan")), [])
    with pytest.raises(ValueError, match="rollout.temperature is of a run; give temperature= here"):
        chat_config(str(tiny_qwen3), ChatOptions(), ["rollout.temperature=0.1"])


def test_lines_come_through_a_pipe_and_a_talk_that_grows_too_long_says_so(tiny_qwen3):
    options = ChatOptions(temperature=0.0, max_new_tokens=6)
    out = io.StringIO()
    one = Chat(chat_config(str(tiny_qwen3), options, []), options)
    # the last: a byte that is no UTF-8, as Python reads it
    talk(one, io.StringIO("hi\n\n/reset\n" + "x" * 5000 + "\nhi\udce9\n"), out)
    lines = out.getvalue().split("\n")
    assert "forgotten" in lines
    assert any(line.startswith("error: prompt 0 of") and "/reset forgets" in line for line in lines)
    assert len(one.messages) == 2  # what did not fit is not in the talk


@pytest.mark.parametrize(("num_samples", "num_right"), [(5, 0), (5, 1), (6, 3), (4, 4), (1, 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(num_samples, num_right):
    samples = [index < num_right for index in range(num_samples)]
    for k in range(1, num_samples + 1):
        draws = [any(draw) for draw in combinations(samples, k)]
        assert pass_at_k(num_samples, num_right, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_one_sample_a_problem_has_wilsons_interval():
    estimate = mean_over_problems([1.0] * 8 + [0.0] * 2)
    assert (estimate.value, estimate.interval) == (0.8, "wilson")
    assert (round(estimate.low, 4), round(estimate.high, 4)) == (0.4902, 0.9433)  # Wilson's 8 of 10
    assert mean_over_problems([0.0] * 10).high == pytest.approx(0.2775, abs=1e-4)  # none of 10 still leaves room


def test_the_bootstrap_covers_the_true_mean_about_as_often_as_it_says():
    generator, covered = np.random.default_rng(0), 0
    for trial in range(50):
        estimate = mean_over_problems(generator.uniform(0, 1, 60).round(2), seed=trial)
        covered += estimate.low <= 0.5 <= estimate.high
        assert estimate.interval == "bootstrap"
    assert 0.86 <= covered / 50 <= 1.0

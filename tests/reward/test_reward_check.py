"""Reward functions that cannot work are refused before a run starts, in one line that says what would work."""

import json
import re
from dataclasses import replace

import pytest

from infsample_rl.config import RewardConfig, RewardFunctionConfig
from infsample_rl.config.environment import EnvironmentConfig
from infsample_rl.config.reward import JudgeConfig
from infsample_rl.data.sources import load_problems
from infsample_rl.reward.checks import check_columns, check_environment_columns, check_reward_functions
from infsample_rl.reward.functions import component_names
from tests.configs import run_config


def check(name, **kwargs):
    check_reward_functions(RewardConfig(functions=[RewardFunctionConfig(name=str(name), kwargs=kwargs)]))


def refusal(name, **kwargs) -> str:
    with pytest.raises(ValueError) as caught:
        check(name, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_that_works_passes(user_file):
    names = ["gsm8k", "kk", "math", "reasoning_gym", f"{user_file}:brevity", f"{user_file}:compute_score"]
    check_reward_functions(RewardConfig(functions=[RewardFunctionConfig(name=name) for name in names]))
    check(f"{user_file}:compute_score", bonus=1.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm8", "unknown name 'gsm8'; give gsm8k, math, kk, reasoning_gym, .*; did you mean gsm8k?"),
        ("accuracy", "unknown name 'accuracy'; give gsm8k, .*, environment, path/to/file.py:function or model:<folder"),
        ("model:", "unknown name 'model:'"),
        ("FILE", "names no function of the file: give .*user_rewards.py:FUNCTION"),
        ("FILE:brevty", "has no function brevty; its functions are brevity, .*; did you mean brevity?"),
        ("FILE:not_a_function", "has no function not_a_function; its functions are brevity, "),
        ("FILE:neither", r"neither\(responses\) fits no form: \(prompts, completions, \*\*columns\) as for TRL, "),
        ("FILE:unknown_input", "needs reference, which verl's form does not give"),
        ("FOLDER/user_reward.py:brevity", "no file .*; did you mean user_rewards.py?"),
        ("model:/no/such/folder", "model:/no/such/folder: no model config there"),
    ],
)
def test_what_cannot_be_found_or_called_is_refused(user_file, name, message):
    text = refusal(name.replace("FILE", str(user_file)).replace("FOLDER", str(user_file.parent)))
    assert text.startswith("reward.functions: ")
    assert re.search(message, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("x = 1\nraise RuntimeError('two\\nlines')\n", "RuntimeError: two lines"),
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(1)\n", "SystemExit: 1"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "broken.py"
    path.write_text(text)
    line = len(text.splitlines())
    assert f"broken.py cannot be imported: {message} ({path}:{line})" in refusal(f"{path}:f")


def test_a_file_that_ends_its_process_is_refused(tmp_path):
    path = tmp_path / "deadly.py"
    path.write_text("import os\nos._exit(7)\n")
    assert re.search(r"the process that imports .* died \(exit code 7\)", refusal(f"{path}:f"))


def test_settings_a_function_does_not_take_are_refused(user_file):
    assert "gsm8k takes no setting 'strict' in kwargs; it takes none" in refusal("gsm8k", strict=True)
    assert "takes no setting 'bonsu' in kwargs; it takes bonus" in refusal(f"{user_file}:compute_score", bonsu=1.0)
    assert "takes no setting 'solution_str'" in refusal(f"{user_file}:compute_score", solution_str="x")


def test_a_module_beside_the_file_can_be_imported(tmp_path):
    (tmp_path / "beside_the_reward.py").write_text("ONE = 1.0\n")
    (tmp_path / "reward.py").write_text(
        "from beside_the_reward import ONE\ndef f(completions, **columns):\n    return [ONE] * len(completions)\n"
    )
    check(tmp_path / "reward.py:f")


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (
            ["gsm8k", "a/length.py:brevity", "b/length.py:brevity", "model:/models/judge/", "model:org/judge"],
            ["gsm8k", "brevity", "brevity_2", "model:judge", "model:judge_2"],
        ),
        (["a.py:length_2", "b.py:length", "c.py:length"], ["length_2", "length", "length_3"]),
        (["a.py:mean", "b.py:mean", "a.py:failed"], ["mean_2", "mean_3", "failed_2"]),  # the run's own: reward/mean
        (["a.py:accuracy", "b.py:format"], ["accuracy_2", "format"]),  # eval/accuracy
    ],
)
def test_component_names_are_short_and_different(names, short):
    assert component_names([RewardFunctionConfig(name=name) for name in names]) == short


def rows_of(tmp_path, rows, *names):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": "a"} | row) + "\n" for row in rows))
    config = run_config(data={"source": str(tmp_path / "rows.jsonl")}, reward={"functions": list(map(str, names))})
    return config, {"": load_problems(config.data, evaluation=False)}


def check_rows(tmp_path, rows, *names):
    config, problems = rows_of(tmp_path, rows, *names)
    check_columns(config, check_reward_functions(config.reward), problems)


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        (
            "FILE:needs_level",
            [{"answer": "1"}] * 2,
            "'level', which no row of FOLDER/rows.jsonl has; the columns are question, answer",
        ),
        ("FILE:needs_level", [{"level": 1}, {"lvl": 1}], "which 1 of 2 rows of FOLDER/rows.jsonl lack (rows 2)"),
        (
            "math",
            [{"level": 1}],
            "'answer', which no row of FOLDER/rows.jsonl has; the columns are question, level; data.answer_field",
        ),
        ("kk", [{"names": ["A"]}], "'answer' (or names and solution), which no row of"),
        ("reasoning_gym", [{"answer": "1", "task": "x"}], "'entry', which no row of"),
        (
            "FILE:compute_score",
            [{"label": "1"}],
            "'answer', which no row of FOLDER/rows.jsonl has; the columns are question, label; data.answer_field names "
            "the field that holds it; a function that does without gives it a default",
        ),
        ("FILE:compute_scores", [{"label": "1"}], "'answer', which no row of"),
        ("FILE:reward_func", [{"label": "1"}], "'answer', which no row of"),
        ("data_source", [{"answer": "1"}], "'data_source', which no row of"),
    ],
)
def test_columns_that_a_function_needs_must_be_in_every_row(tmp_path, user_file, name, rows, message):
    name = name.replace("FILE", str(user_file))
    with pytest.raises(ValueError) as caught:
        check_rows(tmp_path, rows, "think_format", name)
    text = message.replace("FOLDER", f"data.source={tmp_path}")
    assert str(caught.value).startswith(f"reward.functions: {name} needs the column ") and text in str(caught.value)


def test_rows_that_lack_a_column_are_left_out_where_bad_rows_are(tmp_path, user_file, caplog):
    rows = [{"answer": "1"}, {"answer": None}, {}]
    config, problems = rows_of(tmp_path, rows, "gsm8k")
    needs = check_reward_functions(config.reward)
    said = (
        r"gsm8k needs the column 'answer', which 2 of 3 rows of .* lack \(rows 2, 3\); the columns are question, answer"
    )
    with pytest.raises(ValueError, match=f"{said}; .*; data.bad_rows=skip leaves them out"):
        check_columns(config, needs, problems)
    config = replace(config, data=replace(config.data, bad_rows="skip"))
    [kept] = check_columns(config, needs, problems)[""]
    assert kept.row == 1 and re.search(f"skipped: .*{said}", caplog.text)
    with pytest.raises(ValueError, match="which no row of"):
        check_columns(config, needs, {"": problems[""][1:]})
    check_rows(tmp_path, rows, "think_format", f"{user_file}:brevity")


@pytest.mark.parametrize("wanted", ["short", []])
def test_a_column_of_criteria_is_a_list_of_some(tmp_path, wanted):
    (tmp_path / "ask.md").write_text("{response} {criteria}")
    told = {"url": "http://127.0.0.1:9/v1", "model": "m", "prompt": str(tmp_path / "ask.md")}
    config, problems = rows_of(tmp_path, [{"wanted": ["short"]}, {"wanted": wanted}], "think_format")
    judge = JudgeConfig(name="judge", form="rubric", criteria=["{wanted}"], **told)
    config = replace(config, reward=RewardConfig(functions=[judge]))
    said = r"the column 'wanted' of its criteria must be a list of one or more, got .* in row 2 of data.source=.* \(2\)"
    with pytest.raises(ValueError, match=said):
        check_columns(config, [("judge", [["wanted"]])], problems)
    check_columns(config, [("judge", [["wanted"]])], {"": problems[""][:1]})
    skipping = replace(config, data=replace(config.data, bad_rows="skip"))
    assert check_columns(skipping, [("judge", [["wanted"]])], problems) == {"": problems[""][:1]}


def test_the_question_is_a_column_as_the_others(tmp_path, user_file):
    check_rows(tmp_path, [{"answer": "1"}], f"{user_file}:needs_question")


def test_columns_that_an_environment_needs_must_be_in_every_row(tmp_path):
    config, problems = rows_of(tmp_path, [{"answer": "1"}, {"answer": "2", "secret": "3"}], "gsm8k")
    config = replace(config, environment=EnvironmentConfig(factory="a.py:A"))
    check_environment_columns(config, {"": ["answer"]}, problems)
    said = r"environment.factory=a.py:A needs the column 'secret', which 1 of 2 rows of data.source=.* lack \(rows 1\)"
    with pytest.raises(ValueError, match=said):
        check_environment_columns(config, {"": ["answer", "secret"]}, problems)
    skipping = replace(config, data=replace(config.data, bad_rows="skip"))
    assert check_environment_columns(skipping, {"": ["secret"]}, problems) == {"": problems[""][1:]}
    with pytest.raises(ValueError, match="'word', which no row of"):
        check_environment_columns(skipping, {"": ["word"]}, problems)


def test_a_row_that_names_no_environment_is_left_to_its_rendering(tmp_path):
    config, problems = rows_of(tmp_path, [{"environment": "games"}, {"answer": "2"}], "think_format")
    assert check_environment_columns(config, {"games": [], "sums": ["answer"]}, problems) == problems


def test_columns_that_are_there_or_come_from_kwargs_pass(tmp_path, user_file):
    check_rows(tmp_path, [{"level": None, "answer": "2"}], "math", f"{user_file}:needs_level", f"{user_file}:brevity")
    check_rows(tmp_path, [{"names": ["A"], "solution": [True]}], "kk", f"{user_file}:compute_score")
    check_rows(tmp_path, [{"label": "1"}], f"{user_file}:needs_no_answer")
    verl = {"reward_model": {"style": "rule", "ground_truth": "1"}}
    check_rows(
        tmp_path, [verl], *(f"{user_file}:{name}" for name in ("compute_score", "compute_scores", "reward_func"))
    )

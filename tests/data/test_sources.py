"""Every kind of source becomes the same problems, and every broken one is named in one line."""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from infsample_rl.config import DataConfig
from infsample_rl.data import sources
from infsample_rl.data.fields import BadRow, gold_answer
from infsample_rl.data.sources import hub_rows, load_problems

USER = [{"role": "user", "content": "1 + 1 = ?"}]
GOOD = {"question": "1 + 1 = ?", "answer": "2"}


def jsonl(path: Path, rows: list[Any]) -> str:
    """A JSON Lines file; strings go in as they are."""
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    """A Parquet file."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def load(source: str, **settings: Any) -> list[Any]:
    """Training problems of a source."""
    return load_problems(DataConfig(source=source, **settings), evaluation=False)


def message_of(source: str, **settings: Any) -> str:
    """The error a source raises; it must be one line."""
    with pytest.raises(ValueError) as caught:
        load(source, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("split", "rows"),
    [("test", "12345"), ("train[:2]", "12"), ("validation[-20%:]", "5"), ("train[:1]+train[3:]", "145")],
)
def test_a_slice_of_a_file_is_taken_as_datasets_takes_it(tmp_path, split, rows):
    source = jsonl(tmp_path / "a.jsonl", [GOOD] * 5)
    assert "".join(str(problem.row) for problem in load(source, split=split)) == rows
    held_out = DataConfig(source="kk", eval_source=source, eval_split=split)
    assert len(load_problems(held_out, evaluation=True)) == len(rows)


def test_a_slice_of_the_shipped_puzzles_is_taken_too():
    assert load("kk_tiny", split="train[2:5]") == load("kk_tiny")[2:5]
    held_out = DataConfig(source="kk_tiny", eval_split="test[:4]")
    assert len(load_problems(held_out, evaluation=True)) == 4


def test_a_file_has_no_two_splits(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [GOOD] * 5)
    said = "its split 'train+test' names train and test, and it is one file: name one"
    assert message_of(source, split="train+test") == f"data.source={source}: {said}"


@pytest.mark.parametrize("split", ["train[:x]", "train[0.5:]", "[:2]"])
def test_a_split_of_a_file_that_is_no_slice_is_refused(tmp_path, split):
    source = jsonl(tmp_path / "a.jsonl", [GOOD] * 5)
    said = f"data.source={source}: its split {split!r} is no slice, as train[:1000]: "
    assert message_of(source, split=split).startswith(said)


def test_raw_gsm8k_rows_yield_the_answer_after_the_hashes_without_commas(tmp_path):
    solution = "He has <<500*2=1000>>1000 + 42.\n#### 1,042"
    source = jsonl(tmp_path / "train.jsonl", [{"question": "How many?", "answer": solution}])
    (problem,) = load(source)
    assert problem.messages == [{"role": "user", "content": "How many?"}]
    own = {"question": "How many?", "answer": "1042"}
    assert problem.columns == {**own, "solution": solution, "answer_as_given": solution}
    assert (problem.row, problem.origin) == (1, source)


def test_raw_math_rows_yield_the_last_boxed_answer_and_keep_the_solution(tmp_path):
    row = {"problem": "Halve 1.", "level": "Level 1", "solution": r"Not \boxed{3} but $\boxed{\frac{1}{2}}$."}
    (problem,) = load(jsonl(tmp_path / "math.jsonl", [row]))
    assert problem.columns == {**row, "answer": r"\frac{1}{2}"}


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("so\n#### -1,234,567 ", "-1234567"),
        ("#### 1 is not yet it\n#### 2", "2"),
        ("#### heading\ntext", "#### heading\ntext"),
        (72, "72"),
        (72.0, "72"),
        (0.5, "0.5"),
        (0.00001, "0.00001"),
        (-2.5e-7, "-0.00000025"),
        (1e22, "10000000000000000000000"),
        ("1,000", "1,000"),
        ([True, False], [True, False]),
        ({"target": 5}, {"target": 5}),
        (r"\boxed 5.", "5"),
        (r"\boxed{a \} b}", r"a \} b"),
    ],
)
def test_gold_answer(value, answer):
    assert gold_answer(value, "answer") == answer


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_gold_answer_that_is_no_number_is_a_bad_row(value):
    with pytest.raises(BadRow, match="'answer' is (nan|-inf), no number"):
        gold_answer(value, "answer")


def test_blank_lines_count_as_lines_and_the_byte_order_mark_does_not(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\r\n" + json.dumps(GOOD).encode())
    assert [problem.row for problem in load(str(path))] == [1, 3]


def test_json_list_and_json_lines_named_json_and_parquet_give_the_same(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps([GOOD, GOOD]))
    lines = jsonl(tmp_path / "lines.json", [GOOD, GOOD])
    for source in (str(tmp_path / "list.json"), lines, parquet(tmp_path / "rows.parquet", [GOOD, GOOD])):
        assert [(p.row, p.messages, p.columns) for p in load(source)] == [(n, USER, GOOD) for n in (1, 2)]


def test_named_fields_win_over_found_ones_and_may_descend(tmp_path):
    row = {"question": "no", "task": {"text": "1 + 1 = ?"}, "gold": 2, "answer": "no"}
    (problem,) = load(jsonl(tmp_path / "a.jsonl", [row]), prompt_field="task.text", answer_field="gold")
    assert problem.messages == USER
    assert problem.columns["answer"] == "2"


def test_verl_parquet_is_taken_as_it_is(tmp_path):
    system = {"role": "system", "content": "Think."}
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [system, *USER],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0, "question": "1 + 1 = ?", "answer": "1 + 1 = 2\n#### 2"},
    }
    (problem,) = load(parquet(tmp_path / "train.parquet", [row]))
    assert problem.messages == [system, *USER]
    assert problem.columns == {**row, "ground_truth": "2", "answer": "2"}


def test_verl_ground_truth_that_is_an_object_stays_one(tmp_path):
    truth = {"target": 24, "numbers": [4, 6]}
    row = {"data_source": "countdown", "prompt": USER, "reward_model": {"ground_truth": truth}}
    (problem,) = load(parquet(tmp_path / "train.parquet", [row]))
    assert problem.columns["ground_truth"] == problem.columns["answer"] == truth
    assert problem.columns["extra_info"] is None


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "1 + 1 = ?"}, {"prompt": "1 + 1 = ?"}),
        ({"prompt": USER}, {"prompt": USER}),
        (
            {"prompt": USER, "question": "1 + 1", "solution": "2"},
            {"prompt": USER, "question": "1 + 1", "solution": "2", "answer": "2"},
        ),
    ],
)
def test_trl_prompt_column_is_a_string_or_messages_with_or_without_an_answer(tmp_path, row, columns):
    (problem,) = load(jsonl(tmp_path / "a.jsonl", [row]))
    assert (problem.messages, problem.columns) == (USER, columns)


def test_messages_keep_all_that_a_template_may_read(tmp_path):
    calls = [{"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}]
    called = {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "Add."}
    said = {"role": "tool", "content": "2", "tool_call_id": "1", "name": "add"}
    source = parquet(tmp_path / "a.parquet", [{"prompt": [*USER, called, said, *USER]}])
    (problem,) = load(source)
    assert problem.messages == [*USER, called | {"content": ""}, said, *USER]
    broken = jsonl(tmp_path / "a.jsonl", [{"prompt": [*USER, said | {"name": "\ud800"}, *USER]}])
    assert "not valid Unicode (surrogates not allowed)" in message_of(broken)


def test_content_in_text_parts_is_joined(tmp_path):
    parts = [{"type": "text", "text": "1 + 1"}, {"type": "text", "text": " = ?"}]
    (problem,) = load(jsonl(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": parts}]}]))
    assert problem.messages == USER


@pytest.fixture
def hub_folder(tmp_path, monkeypatch) -> Path:
    """A data set as on the hub, with the configs train and test, each split by size, like knights-and-knaves."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    listing = ""
    for config in ("train", "test"):
        (folder / config).mkdir(parents=True)
        listing += f"- config_name: {config}\n  data_files:\n"
        for size in (2, 3):
            jsonl(
                folder / config / f"{size}.jsonl",
                [{"quiz": f"{config} {size}?", "solution_text_format": "(1) Ava is a knight"}],
            )
            listing += f"  - split: {size}ppl\n    path: {config}/{size}.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{listing}---\n")
    return folder


def test_all_splits_of_a_config_are_read_where_splits_are_sizes(hub_folder):
    rows = hub_rows(str(hub_folder), "test", label="data.source=kk", splits_are_configs=True)
    assert [(row.number, row.fields["quiz"]) for row in rows] == [(1, "test 2?"), (2, "test 3?")]


def test_a_config_is_named_after_a_colon_and_missing_ones_are_listed(hub_folder):
    rows = hub_rows(f"{hub_folder}:train", "3ppl", label="data.source=x")
    assert [row.fields["quiz"] for row in rows] == ["train 3?"]
    with pytest.raises(ValueError, match=r"data.source=x: .*'train', 'test'.*a config is given as .*:CONFIG"):
        hub_rows(str(hub_folder), "3ppl", label="data.source=x")
    with pytest.raises(ValueError, match=r'data.source=x: .*Unknown split "9ppl"'):
        hub_rows(f"{hub_folder}:train", "9ppl", label="data.source=x")


BROKEN_ROWS = [  # the second of three rows, the message about it
    ('{"question": "1 + 1', "is not valid JSON"),
    ("[1, 2]", "is a list, not an object with fields"),
    ({"answer": "2"}, "its field 'question' is missing (it has answer)"),
    ({"question": None}, "its field 'question' is null"),
    ({"question": " \n"}, "its field 'question' is empty"),
    ({"question": 7}, "its field 'question' is a number; a string or a list of chat messages is needed"),
    ({"question": []}, "its field 'question' is empty"),
    ({"question": [{"role": "user"}]}, "holds an object where a message {role, content} is needed"),
    ({"question": [{"role": "human", "content": "hi"}]}, "a message of role 'human'; the roles are system, developer"),
    ({"question": [{"role": "user", "content": 3}]}, "a message whose content is a number; text is needed"),
    ({"question": [*USER, {"role": "assistant", "content": "2"}]}, "ends with a message of the assistant"),
    ({"question": "\ud800"}, "not valid Unicode (surrogates not allowed)"),
    ({"question": "1 + 1 = ?", "answer": "two\n####"}, "its field 'answer' holds no answer"),
    ({"question": "1 + 1 = ?", "answer": r"\boxed{}"}, "its field 'answer' holds no answer"),
]


@pytest.mark.parametrize(("row", "message"), BROKEN_ROWS)
def test_a_bad_row_is_named_or_skipped(tmp_path, caplog, row, message):
    source = jsonl(tmp_path / "bad.jsonl", [GOOD, row, GOOD])
    text = message_of(source)
    assert text.startswith(f"data.source={source}, row 2 ")
    assert message in text
    assert text.endswith("; 1 of 3 rows cannot be used (2); mend the data or set data.bad_rows=skip")
    with caplog.at_level(logging.WARNING):
        assert [problem.row for problem in load(source, bad_rows="skip")] == [1, 3]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"data.source={source}: skipped, as 1 of 3 rows cannot be used (2): row 2 ")
    assert message in record.getMessage()


@pytest.mark.parametrize("name", ["answer", "target"])
@pytest.mark.parametrize("state", ["null", "missing"])
def test_a_row_without_an_answer_is_a_bad_row_where_its_field_was_named(tmp_path, name, state):
    asked, lacks = {"question": "1 + 1 = ?"}, {name: None} if state == "null" else {}
    source = jsonl(tmp_path / "a.jsonl", [asked | {name: "2"}, asked | lacks])
    assert [problem.columns.get("answer") for problem in load(source)] == ["2", None]
    assert "answer" not in load(source)[1].columns, "to who reads it, it is missing"
    assert f"row 2 cannot be used: its field {name!r} is {state}" in message_of(source, answer_field=name)
    assert [problem.row for problem in load(source, answer_field=name, bad_rows="skip")] == [1]


def test_bytes_that_are_not_utf8_are_a_bad_row(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"question": "caf\xe9", "answer": "2"}\n')
    assert f"data.source={path}, row 2 is not UTF-8 (" in message_of(str(path))


def test_many_bad_rows_are_counted_and_said_once_and_must_not_be_all(tmp_path, caplog):
    source = jsonl(tmp_path / "bad.jsonl", [GOOD] + ["{"] * 7)
    assert "row 2 is not valid JSON" in (text := message_of(source))
    assert "7 of 8 rows cannot be used (2, 3, 4, 5, 6, ...)" in text
    load(source, bad_rows="skip")
    assert len(caplog.records) == 1
    bad_only = jsonl(tmp_path / "bad_only.jsonl", ["{", "["])
    assert message_of(bad_only, bad_rows="skip").endswith("2 of 2 rows cannot be used (1, 2); mend the data")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "the file is empty; it needs at least one row"),
        ("blank.jsonl", b"\n \n", "the file is empty; it needs at least one row"),
        ("empty.json", b"[]", "the file is empty; it needs at least one row"),
        ("object.json", b'{"data": []}', "the fields are data; none is known to be the question"),
        ("cut.json", b'[{"question": "a"', "the file cannot be read: Expecting"),
        ("cut.parquet", b"PAR1 not really", "the file cannot be read: "),
        (
            "table.csv",
            b"question,answer\n",
            "a data file must end in one of .jsonl, .ndjson, .json, .parquet, got .csv",
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert (text := message_of(str(tmp_path / name))).startswith(f"data.source={tmp_path / name}: ")
    assert message in text


def test_a_missing_file_is_named_with_the_nearest_there_is(tmp_path):
    jsonl(tmp_path / "train.jsonl", [GOOD])
    message = f"{tmp_path}/trian.jsonl: there is no such file; did you mean {tmp_path}/train.jsonl?"
    assert message_of(f"{tmp_path}/trian.jsonl") == f"data.source={message}"


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"a": "x", "b": "y"}, {}, "the fields are a, b; none is known to be the question (question, problem,"),
        (
            {"question": "x", "problem": "y"},
            {},
            "question and problem could each be the question: set data.prompt_field",
        ),
        (
            {"question": "x", "solution": "y", "target": "z"},
            {},
            "solution and target could each be the answer: set data.answer_field",
        ),
        ({"question": "x"}, {"prompt_field": "q"}, "the fields are question; no row has the field data.prompt_field=q"),
        ({"question": "x"}, {"answer_field": "g"}, "the fields are question; no row has the field data.answer_field=g"),
    ],
)
def test_fields_that_are_missing_or_ambiguous_are_listed_with_the_option_to_set(tmp_path, row, settings, message):
    assert message in message_of(jsonl(tmp_path / "a.jsonl", [row]), **settings)


def test_a_field_setting_that_no_source_reads_is_refused():
    assert (
        message_of("gsm8k", prompt_field="q")
        == "data.prompt_field=q has no effect: the fields of gsm8k are known; leave it out, or give it in the entry of "
        "data.sources that it is for"
    )


@pytest.mark.parametrize("source", ["infsample-rl-tests/no-such-set", "gsm9k"])
def test_a_hub_data_set_that_cannot_be_had_says_how_to_give_a_file(source):
    text = message_of(source)
    assert text.startswith(
        f"data.source={source}: the hub data set {source} cannot be loaded: the hub cannot be reached"
    )
    assert "to use a file give data.source=FILE.jsonl data.prompt_field=question" in text
    assert ("did you mean gsm8k?" in text) == (source == "gsm9k")


def test_a_hub_that_takes_the_call_and_never_answers_is_not_waited_for():
    program = """
import time
from infsample_rl.config import DataConfig
from infsample_rl.data.sources import load_problems
import datasets
started = time.monotonic()
try:
    load_problems(DataConfig(source="gsm8k"), evaluation=False)
except ValueError as error:
    print(time.monotonic() - started, error)
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "no_proxy": "127.0.0.1"}
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | endpoint
        command, root = [sys.executable, "-c", program], Path(sources.__file__).parents[2]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=root)
    seconds, _, message = done.stdout.partition(" ")
    assert message.startswith("data.source=gsm8k: the hub data set openai/gsm8k:main cannot be loaded"), done.stderr
    assert 3 <= float(seconds) < 10  # one request's time-out; the datasets package alone retries for half a minute


@pytest.mark.slow
def test_reasoning_gym_training_and_held_out_problems_come_from_disjoint_seeds():
    import reasoning_gym

    task = {"min_terms": 6, "max_terms": 6, "min_digits": 4}
    named = {"source": "reasoning_gym:chain_sum", "eval_source": "reasoning_gym:chain_sum"}
    data = DataConfig(**named, generator_kwargs=task | {"size": 20, "seed": 5})
    train, held_out = load_problems(data, evaluation=False), load_problems(data, evaluation=True, limit=10)
    seeds_5_to_34 = [entry["question"] for entry in reasoning_gym.create_dataset("chain_sum", seed=5, size=30, **task)]
    assert [problem.messages[0]["content"] for problem in [*train, *held_out]] == seeds_5_to_34
    assert len(set(seeds_5_to_34)) == 30


def test_reasoning_gym_columns_are_what_the_tasks_own_scorer_takes():
    import reasoning_gym

    problem = load("reasoning_gym:word_ladder", generator_kwargs={"size": 2})[0]
    assert problem.columns.keys() == {"question", "answer", "task", "entry"}
    columns = pickle.loads(pickle.dumps(problem.columns))
    assert json.dumps(columns)
    assert reasoning_gym.get_score_answer_fn(columns["task"])(columns["answer"], columns["entry"]) == 1.0


@pytest.mark.slow
def test_reasoning_gym_mistakes_are_named():
    assert "has no task 'chainsum' (of " in (text := message_of("reasoning_gym:chainsum"))
    assert "the nearest are chain_sum" in text
    text = message_of("reasoning_gym:chain_sum", generator_kwargs={"max_term": 3})
    assert "unexpected keyword argument 'max_term'; its settings are allow_negation, max_digits, max_terms" in text

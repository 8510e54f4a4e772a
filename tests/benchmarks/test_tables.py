"""The paper's tables: what they count, what stands beside what, and the bound on dynamic_slot's mean length."""

import json
import random
import sys

import pytest

from benchmarks.paper_figures import least_kept_mean
from benchmarks.tables import TableOptions, main, markdown, rows_of
from infsample_rl.rollout.simulator import simulate

LENGTHS = [6, 5, 4, 3, 2, 1]


def write(folder, **extra):
    path = folder / "toy.jsonl"
    line = {"dataset": "gsm8k", "model": "toy", "prompt_id": "0", "lengths": LENGTHS, "max_new_tokens": 8} | extra
    path.write_text(json.dumps(line) + "\n")
    return path


def steps_of(rows):
    return {row["method"]: row["steps"] for row in rows}


def test_rows_hold_the_steps_of_every_method_on_a_worked_group(tmp_path):
    rows = rows_of(write(tmp_path), TableOptions(slots=2, sigma=0), "toy")
    steps = steps_of(rows)
    assert steps["naive"] == 6 + 4 + 2  # rounds (6, 5), (4, 3), (2, 1)
    assert steps["fixed_slot"] == 6 + 4 + 2  # slot 0 decodes 6, 4, 2
    assert steps["arrival"] == 11  # slots (6, 3, 2) and (5, 4, 1)
    assert steps["sjf"] == 12  # (1, 3, 5) and (2, 4, 6)
    assert steps["lpt *"] == steps["lpt"] == 11  # 21 tokens on two slots
    assert steps["bound of the slots"] == 10.5
    assert steps["bound of the memory"] == 6  # 56 token-steps in 16 tokens would take 3.5, the longest takes 6
    assert {row["true_mean"] for row in rows} == {3.5}


def test_predictions_of_a_recording_are_used_and_only_prompts_that_have_them_count(tmp_path):
    path = write(tmp_path, predictions={"probe": [1, 2, 3, 4, 5, 6]})  # reversed: sjf becomes longest first
    path.write_text(
        path.read_text() + json.dumps({"dataset": "gsm8k", "model": "toy", "prompt_id": "1", "lengths": [8] * 6}) + "\n"
    )
    rows = rows_of(path, TableOptions(slots=2), "toy")
    assert {(row["prompts"], row["predictions"]) for row in rows} == {(1, "probe, held-out prompts")}
    assert steps_of(rows)["sjf"] == 11


def test_the_papers_figures_stand_beside_its_data_sets_alone(tmp_path):
    options = TableOptions(slots=2)
    lines = markdown(rows_of(write(tmp_path), options, "toy")).splitlines()
    assert "| naive | 12 (x1.00) | 4 (x1.00) | 3,250 (x1.00), 186 (x1.00) | 3,250 (x1.00), 186 (x1.00) |" in lines
    assert "| dynamic_slot | 11 (x0.92) | 4 (x1.00) | 748 (x0.23), 72 (x0.39) | 360 (x0.11), 21 (x0.11) |" in lines
    assert "| infinite * | 12 (x1.00) | 1,739 (x0.70) | 1,739 (x0.70) |" in lines
    assert "| arrival | 11 (x0.92) |  |  |" in lines
    text = markdown(rows_of(write(tmp_path, dataset="another"), options, "toy"))
    assert "the paper," not in text


def test_files_of_one_name_are_kept_apart(tmp_path, capsys, monkeypatch):
    (tmp_path / "b").mkdir()
    one, other = write(tmp_path), write(tmp_path / "b", lengths=[7, 7])
    monkeypatch.setattr(sys, "argv", ["tables", f"recordings=[{one},{other}]"])
    assert main() == 0
    said = capsys.readouterr().out
    assert f"## {one}\ntoy on gsm8k: 1 prompts, G = 6" in said and f"## {other}\ntoy on gsm8k: 1 prompts, G = 2" in said


def test_dynamic_slot_never_keeps_less_than_the_bound_on_average():
    assert least_kept_mean(186) == pytest.approx(107.4, abs=0.1)
    draw = random.Random(0)
    kept, true = [], []
    for _ in range(400):  # two kinds of samples, the cap and a few tokens: what the bound is tightest for
        lengths = [1024 if draw.random() < 0.15 else 20 for _ in range(35)]
        completed = simulate(lengths, "dynamic_slot", slots=4, group_size=32, max_new_tokens=1024).completed
        kept.append(sum(lengths[index] for index in completed) / 32)
        true.append(sum(lengths) / 35)
    mean_true = sum(true) / len(true)
    assert least_kept_mean(mean_true) < sum(kept) / len(kept) < mean_true


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recordings=[absent.jsonl]"], "absent.jsonl: there is no such file"),
        (["slots=0"], "slots=0: must be >= 1"),
        (["recordings=[{path}]", "out={path}/x.md"], "cannot be made: File exists"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, arguments, message, refused):
    path = str(write(tmp_path))
    assert message in refused(main, *(argument.replace("{path}", path) for argument in arguments))

"""Run folders as a crash, a kill or a run that goes on leaves them: a page in every case, and what is missing said on
it."""

from __future__ import annotations

import json
import shutil

import pytest

from infsample_rl.commands.report import main
from infsample_rl.observe.report import facts
from infsample_rl.observe.report.page import write_report
from infsample_rl.observe.report.run_folder import read_run

FILES = ("config.yaml", "metrics.jsonl", "completions.jsonl", "samples.jsonl", "versions.json")
STRANGE = (
    b"\xff\xfe\x00",
    b"[]",
    b"null",
    b'{"step": 1}\n',
    b'{"step": -5, "samples": 7, "components": 3}\n',
    b"[" * 5_000,
    b"data: {sources: [a]}\n",
)


def notes_of(run):
    return write_report([run], run / "report.html")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_said(recorded_run, name):
    (recorded_run / name).unlink()
    (note,) = notes_of(recorded_run)
    assert note.startswith(f"{name} is missing")


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_off_anywhere_is_no_traceback(recorded_run, name):
    whole = (recorded_run / name).read_bytes()
    for length in {0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 2}:
        (recorded_run / name).write_bytes(whole[:length])
        notes = notes_of(recorded_run)
        assert all(note.startswith(name) for note in notes)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", STRANGE, ids=range(len(STRANGE)))
def test_a_file_that_holds_something_else_is_no_traceback(recorded_run, name, content):
    (recorded_run / name).write_bytes(content)
    notes_of(recorded_run)


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_a_half_written_last_line_is_left_out_and_said(recorded_run, page_in):
    for name in ("metrics.jsonl", "completions.jsonl", "samples.jsonl"):
        append(recorded_run / name, '{"step": 4, "reward/me')
    lost = "1 line could not be read"
    assert notes_of(recorded_run) == [f"metrics.jsonl: {lost}", f"completions.jsonl: {lost}"]
    page = page_in(recorded_run / "report.html")
    assert page["learning"][0]["lines"][0]["x"] == [1, 2, 3] and len(page["completions"]["rows"]) == 12
    assert page["timelines"]["recorded"] == len(page["timelines"]["groups"]) == 4


def test_strange_values_in_metrics_are_no_points(recorded_run, page_in):
    strange = '"reward/mean": "high", "learner/entropy": NaN, "timing/step": Infinity, "learner/lr": [1], "x": "y"'
    append(recorded_run / "metrics.jsonl", f'{{"step": 4, "learner/kl": 1{"0" * 400}}}\n{{"step": 4, {strange}}}\n')
    notes_of(recorded_run)
    page = page_in(recorded_run / "report.html")
    assert page["learning"][0]["lines"][0]["x"] == [1, 2, 3] and "x" not in page["metrics"]


def test_the_command_writes_the_page_and_says_where(recorded_run, capsys):
    page, other = recorded_run / "report.html", recorded_run / "other.html"
    assert main([str(recorded_run)]) == 0 and page.is_file()
    assert capsys.readouterr().out.startswith(f"{page} (")
    assert main([str(recorded_run), f"out={other}"]) == 0 and other.is_file()
    assert list(recorded_run.glob(".*tmp")) == []


def test_warnings_of_steps_that_were_done_again_are_not_shown(recorded_run):
    (recorded_run / "run.log").write_text("2026-11-21 23:13:15 warning: of a start that came to nothing\n")
    records = [{"step": 2, "rule": None, "text": "first"}, {"step": 3, "rule": "all_cut", "text": "second"}]
    (recorded_run / "warnings.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read_run(recorded_run).warnings == ["after step 2: first", "after step 3: second"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no RUN is given"),
        (["nowhere"], "RUN=nowhere is not a folder"),
        (["."], "RUN=. holds no run"),
        (["--fast", "."], "--fast is unknown"),
        ([".", "out="], "out=FILE must be given once"),
        ([".", "out=no/such/folder.html"], "out=no/such/folder.html must be a file"),
        ([".", "out=completions.jsonl"], "out=completions.jsonl must end in .html"),
        ([".", "."], "the same RUN is given twice"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err and len(printed.err.splitlines()) == 1 and printed.out == ""


def test_several_runs_are_laid_over_each_other(recorded_run, page_in, tmp_path):
    other = shutil.copytree(recorded_run, tmp_path / "other" / "recorded")
    settings = (other / "config.yaml").read_text().replace("group_size: 32", "group_size: 64")
    (other / "config.yaml").write_text(settings)
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line | {"eval/accuracy": 0.75}) + "\n" for line in lines))
    assert main([str(recorded_run), str(other), f"out={tmp_path / 'both.html'}"]) == 0
    page = page_in(tmp_path / "both.html")
    assert [run["label"] for run in page["runs"]] == [f"{tmp_path.name}/recorded", "other/recorded"]
    assert page["differences"] == [["rollout.group_size", "32", "64"]]
    accuracy = next(chart for chart in page["learning"] if chart["title"] == "Held-out accuracy")
    assert [(line["label"], line["colour"], line["y"][-1]) for line in accuracy["lines"]] == [
        (f"{tmp_path.name}/recorded", 0, 0.65),
        ("other/recorded", 1, 0.75),
    ]
    assert ["failed rewards", "0 (in all steps)", "0 (in all steps)"] in page["figures"]


def test_one_run_without_files_does_not_spoil_the_comparison(recorded_run, tmp_path):
    dead = tmp_path / "dead"
    dead.mkdir()
    (dead / "metrics.jsonl").write_text("")
    notes = write_report([recorded_run, dead], tmp_path / "both.html")
    assert "dead: metrics.jsonl holds no step yet" in notes and all(note.startswith("dead: ") for note in notes)


def test_a_plan_stands_beside_what_was_measured_of_its_role(recorded_run, page_in):
    lines = [{"name": "weights", "bytes": 2_414_080}, {"name": "KV pool", "bytes": 3_276_800}]
    rollout = {"role": "rollout", "lines": lines, "sum_bytes": 5_690_880}
    processes = [rollout, {"role": "colocated", "lines": [], "sum_bytes": 9}]
    (recorded_run / "plan.json").write_text(json.dumps({"processes": processes}))
    peaks = {"memory/learner_peak_bytes": 7.0, "memory/rollout_peak_bytes": 6.0, "memory/reference_peak_bytes": 5.0}
    append(recorded_run / "metrics.jsonl", json.dumps({"step": 4} | peaks) + "\n")
    notes_of(recorded_run)
    page = page_in(recorded_run / "report.html")
    alone, both = page["plan"]
    assert alone["lines"] == [["weights", 2_414_080], ["KV pool", 3_276_800]] and alone["sum"] == 5_690_880
    assert [name for name, _ in both["measured"]] == ["memory/learner_peak_bytes", "memory/rollout_peak_bytes"]
    assert "Rollout peak" in [chart["title"] for chart in page["memory"]]


@pytest.mark.parametrize(("total", "state"), [(3, "finished"), (9, "last step written")])
def test_a_run_of_epochs_ends_where_its_plan_says(recorded_run, total, state):
    config = recorded_run / "config.yaml"
    config.write_text(config.read_text().replace("  steps: 3\n", "  steps: null\n"))
    (recorded_run / "plan.json").write_text(json.dumps({"total_steps": total, "processes": []}))
    run = read_run(recorded_run)
    assert run.total_steps == total and state in facts.state(run)

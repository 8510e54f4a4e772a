"""`python -m infsample_rl.simulate` as a user calls it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infsample_rl.commands.schedule_workload import noisy
from infsample_rl.commands.simulate import main
from infsample_rl.config.rollout import SCHEDULES

LENGTHS = Path(__file__).parents[1] / "data" / "lengths"
AIME = LENGTHS / "llama3b_rgrl_step400_aime2024_n50.jsonl"


def write(path, *groups):
    """A file with a prompt for each list of lengths; its path."""
    lines = [{"dataset": "d", "model": "m", "prompt_id": str(n), "lengths": each} for n, each in enumerate(groups)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def lengths_file(tmp_path):
    """Two prompts of which the first is the worked example of tests/rollout/schedule/test_simulator.py."""
    return write(tmp_path / "lengths.jsonl", [6, 1, 4, 2, 5, 3], [2] * 6)


def records(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["simulate", *arguments, "json=true"])
    assert main() == 0
    captured = capsys.readouterr()
    return {record["name"]: record for record in map(json.loads, captured.out.splitlines())}, captured.err


def test_a_record_by_hand(lengths_file, capsys, monkeypatch):
    found, said = records(
        capsys, monkeypatch, f"lengths={lengths_file}", "slots=2", "schedules=[arrival,lpt]", "c0=0.1", "c1=0.01"
    )
    assert said == "" and list(found) == ["arrival", "lpt, true lengths"]
    arrival = found["arrival"]
    # 11 and 6 steps, 21 and 12 tokens; each sample of the second prompt ends at 2, 4 or 6
    assert (arrival["running_steps"], arrival["steps_per_prompt"], arrival["prompts"], arrival["group_size"]) == (
        17,
        8.5,
        2,
        6,
    )
    assert arrival["seconds_per_prompt"] == pytest.approx((17 * 0.1 + 33 * 0.01) / 2)
    assert (arrival["slot_bound"], arrival["of_bound"]) == ((10.5 + 6) / 2, pytest.approx(17 / 16.5))
    assert arrival["token_bound"] == (6 + 2) / 2  # 56 / 12 and 18 / 12 are below the longest
    assert (arrival["kv_budget_tokens"], arrival["peak_kv_tokens"]) == (2 * 6, 7)
    assert arrival["row_utilisation"] == pytest.approx(33 / 34)
    assert arrival["completion_steps"] == pytest.approx((1 + 5 + 6 + 7 + 10 + 11 + 2 + 2 + 4 + 4 + 6 + 6) / 12)
    assert (arrival["mean_length"], arrival["recomputed_share"], arrival["sigma"]) == (33 / 12, 0, None)


def test_designs_figures_on_recorded_lengths(capsys, monkeypatch):
    schedules = "schedules=[naive,fixed_slot,sjf,arrival,infinite,lpt,fptas]"
    found, _ = records(capsys, monkeypatch, f"lengths={AIME}", "slots=4", "group_size=32", schedules, "cap=2048")
    steps = {name.removesuffix(", true lengths"): round(record["steps_per_prompt"]) for name, record in found.items()}
    own = {"naive": 9234, "fixed_slot": 6488, "arrival": 5824}
    assert steps == own | {"sjf": 5928, "infinite": 5990, "lpt": 5339, "fptas": 6162}
    assert (round(found["arrival"]["slot_bound"]), round(found["arrival"]["token_bound"])) == (5253, 1886)


def test_noise_is_the_same_for_the_same_seed_and_grows_with_sigma(lengths_file, capsys, monkeypatch):
    path = lengths_file.with_name("few.jsonl")
    path.write_text("".join(AIME.read_text().splitlines(keepends=True)[:6]))
    arguments = [f"lengths={path}", "schedules=[lpt,token_budget]", "noise=[0,0.5,1]", "group_size=16"]
    found, _ = records(capsys, monkeypatch, *arguments)
    assert list(found) == [f"lpt, {known}" for known in ("true lengths", "sigma 0.5", "sigma 1")] + [
        f"token_budget{known}" for known in ("", ", true lengths", ", sigma 0.5", ", sigma 1")
    ]
    lpt = [found[f"lpt, {known}"]["running_steps"] for known in ("true lengths", "sigma 0.5", "sigma 1")]
    assert lpt == sorted(lpt) and lpt[0] < lpt[2]
    assert records(capsys, monkeypatch, *arguments)[0] == found
    assert records(capsys, monkeypatch, *arguments, "seed=1")[0] != found


def test_noisy_lengths_are_true_at_sigma_0_and_within_1_and_the_cap():
    lengths, normal = [5, 300, 40], [-9.0, 2.0, 0.1]
    assert noisy(lengths, normal, 0.0, 320) == lengths and noisy(lengths, normal, 2.0, 320)[:2] == [1, 320]


def test_several_prompts_share_the_memory(capsys, monkeypatch):
    arguments = [f"lengths={AIME}", "schedules=[arrival,token_budget]", "group_size=8", "noise=[]"]
    alone, _ = records(capsys, monkeypatch, *arguments)
    together, _ = records(capsys, monkeypatch, *arguments, "prompts_at_once=4")
    for name in ("arrival", "token_budget"):
        assert together[name]["running_steps"] < 0.9 * alone[name]["running_steps"]
        assert together[name]["kv_budget_tokens"] == alone[name]["kv_budget_tokens"] == 4 * 2048
        assert together[name]["of_bound"] >= 1


def test_files_of_one_name_are_kept_apart_by_their_paths(lengths_file, tmp_path, capsys, monkeypatch):
    (tmp_path / "b").mkdir()
    other = write(tmp_path / "b" / lengths_file.name, [9])
    files = f"lengths={lengths_file},{other},{other}"
    monkeypatch.setattr(sys, "argv", ["simulate", files, "slots=2", "schedules=[arrival]", f"out={tmp_path}/figures"])
    assert main() == 0 and (tmp_path / "figures" / "slots.png").exists()
    first, second = capsys.readouterr().out.partition("figure: ")[0].strip().split("\n\n")
    assert first.startswith(f"{lengths_file}: 2 prompts") and second.startswith(f"{other}: 1 prompts")
    assert first.count("\narrival ") == second.count("\narrival ") == 1
    assert second.split("\n")[-1].split()[1] == "9"


def test_drafts_bring_the_papers_schedule_below_the_bound_of_one_token_a_row(capsys, monkeypatch):
    tokens = f"lengths={LENGTHS.parent / 'tokens' / 'kk_tiny_trained_T1.0_n32.jsonl.gz'}"
    given = ("speculate=[0,7]", "schedules=[infinite,token_budget,dynamic_slot]", "page_size=16", "prompt_tokens=none")
    found, _ = records(capsys, monkeypatch, tokens, *given)
    plain, drafted = found["infinite, true lengths"], found["infinite, 7 drafted, true lengths"]
    assert drafted["steps_per_prompt"] < plain["token_bound"] < plain["steps_per_prompt"]
    assert drafted["tokens_per_row_step"] > 4 and plain["tokens_per_row_step"] == 1
    assert drafted["mean_length"] == plain["mean_length"]
    assert found["token_budget, 7 drafted"]["steps_per_prompt"] < 0.35 * found["token_budget"]["steps_per_prompt"]
    assert not [name for name in found if "dynamic_slot" in name and "drafted" in name]


def test_a_hundred_million_slots_need_no_memory(lengths_file, capsys, monkeypatch):
    found, _ = records(capsys, monkeypatch, f"lengths={lengths_file}", "slots=100000000")
    steps = {name: record["running_steps"] for name, record in found.items() if name != "dynamic_slot"}
    assert len(steps) == 10 and set(steps.values()) == {6 + 2}


def test_by_default_every_schedule_is_measured(capsys, monkeypatch, tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text("".join(AIME.read_text().splitlines(keepends=True)[:4]))
    found, _ = records(capsys, monkeypatch, f"lengths={path}", "group_size=32")
    assert {name.split(",")[0] for name in found} == set(SCHEDULES)
    both = ["group_size=32", "schedules=[token_budget]", "preemptions=[park,recompute]", "noise=[]"]
    again, _ = records(capsys, monkeypatch, f"lengths={path}", *both)
    parked, computed = again["token_budget"], again["token_budget, computed again"]
    assert parked == found["token_budget"] and parked["running_steps"] <= computed["running_steps"]
    assert (
        parked["recomputed_share"] == 0 == computed["parked_share"]
        and min(parked["parked_share"], computed["recomputed_share"]) > 0
    )
    assert len(found) == 11  # ten schedules, token_budget also with true lengths


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "lengths is empty: give lengths=FILE.jsonl"),
        (["lengths=nowhere.jsonl"], "nowhere.jsonl: there is no such file"),
        (["lengths={bad}"], "line 2 is not valid JSON"),
        (["lengths={good}", "noise=[nan]"], "noise=[nan]: must be >= 0"),
        (["lengths={good}", "kv_budget_tokens=5"], "kv_budget_tokens must be >= 6 to hold one prompt and a full"),
        (["lengths={good}", "speculate=[0,3]"], "drafts from token_ids, and 0 of"),
        (["lengths={good}", "cap=4"], "the nearest that works is cap=6"),
        (["lengths={good}", "prompt_tokens=none"], "give prompt_tokens=100"),
        (["lengths={good}", "schedules=[lpt,sjf]", "noise=[]"], "there is nothing to measure"),
        (["lengths={good}", "schedules=[token_budget]", "preemptions=[]"], "there is nothing to measure"),
        (["lengths={good}", "speculate=[]"], "there is nothing to measure"),
        (["lengths={good}", "optimum=true"], "'optimum=true' is not key=value with a key that exists"),
        (["lengths={good}", "out={good}"], "cannot be made: File exists"),
        (["lengths={good}", "out={good}/figures"], "cannot be made: Not a directory"),
        (["lengths={good}", "slts=4"], "did you mean slots=...?"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, said, lengths_file, tmp_path, capsys, monkeypatch):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(lengths_file.read_text().splitlines()[0] + '\n{"dataset": \n')
    monkeypatch.setattr(
        sys, "argv", ["simulate", *(argument.format(good=lengths_file, bad=bad) for argument in arguments)]
    )
    assert main() == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1 and captured.err.startswith("error: ")


def test_a_reader_that_has_seen_enough_is_no_failure(lengths_file):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "infsample_rl.simulate", f"lengths={lengths_file}", "slots=2"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")

"""What the chaos command compares, tears and counts; tests/runs/test_lost_workers.py disturbs real runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save

from infsample_rl.commands.chaos import differences, main, table_of
from infsample_rl.commands.disturbance import CELLS, PHASES, Cell, Disturber, Hit, Target, tear
from infsample_rl.reward.keeper import ENVIRONMENT

PACKAGE = Path(__file__).resolve().parents[2] / "infsample_rl"


def write_run(folder, *, weights=b"weights", reward=0.5, seconds=1.0, response="yes", steps=(1, 2)):
    """A run folder of two steps and two checkpoints."""
    for step in steps:
        checkpoint = folder / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors").write_bytes(weights)
        (checkpoint / "config.json").write_text("{}")
    metrics = [{"step": step, "reward/mean": reward, "timing/step": seconds, "cluster/restarts": 0} for step in steps]
    place = {"prompt_index": 0, "sample_index": 0}
    completions = [{"step": step, **place, "response": response, "reward": reward} for step in steps]
    for name, records in (("metrics", metrics), ("completions", completions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"seconds": 9.0}, []),
        ({"weights": b"weightS"}, ["model.safetensors differs"]),
        (
            {"reward": 0.25},
            [
                "step 1: reward/mean differs",
                "step 2: reward/mean differs",
                "completions.jsonl differs in steps [1, 2]",
            ],
        ),
        ({"response": "no"}, ["completions.jsonl differs in steps [1, 2]"]),
    ],
)
def test_weights_metrics_and_completions_are_compared_and_times_are_not(tmp_path, changes, found):
    assert differences(write_run(tmp_path / "a"), write_run(tmp_path / "b", **changes)) == found


def test_rounding_is_no_difference_where_a_run_is_not_deterministic(tmp_path):
    own, near, far = (
        write_run(tmp_path / name, reward=reward, weights=save({"w": torch.full((2,), weight)}))
        for name, reward, weight in (("own", 0.5, 1.0), ("near", 0.5001, 1.00005), ("far", 0.51, 1.001))
    )
    records = (near / "completions.jsonl").read_text().splitlines()
    (near / "completions.jsonl").write_text("\n".join(reversed(records)) + "\n")
    assert differences(own, near, exact=False) == []
    expected = ["model.safetensors differs", "step 1: reward/mean differs", "step 2: reward/mean differs"]
    assert differences(own, far, exact=False) == [*expected, "completions.jsonl differs in steps [1, 2]"]
    assert len(differences(own, near)) == 4
    other = write_run(tmp_path / "other", response="no", weights=save({"w": torch.ones(2)}))
    assert differences(own, other, exact=False) == ["completions.jsonl differs in steps [1, 2]"]


def test_a_step_that_is_missing_is_a_difference(tmp_path):
    found = differences(write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=(1,)))
    assert "metrics.jsonl has steps [1, 2] and [1]" in found and "completions.jsonl differs in steps [2]" in found


def test_the_newest_checkpoint_is_torn_where_there_is_an_older_one(tmp_path):
    both, one = write_run(tmp_path / "both"), write_run(tmp_path / "one", steps=(1,))
    for run in (both, one):
        tear(run)
    sizes = [path.stat().st_size for path in sorted(both.rglob("model.safetensors"))]
    assert sizes == [7, 3] and (one / "checkpoints/step_000001/model.safetensors").stat().st_size == 7


def test_every_phase_that_is_aimed_at_is_one_that_the_code_has():
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    named = set(re.findall(r'phase\("(\w+)"\)', code)) | set(re.findall(r'prctl\(NAME, b"(\w+)"\)', code))
    named.add(ENVIRONMENT.decode())
    assert {phase for _, phase in PHASES} <= named and {cell.phase for cell in CELLS} <= named


def test_what_was_hit_least_is_hit_first():
    often, once, never = (Cell("kill", "driver", phase) for phase in ("sample", "update", "save"))
    disturber = Disturber(None, steps=4, kills=4, seed=3)
    disturber.hits = [Hit(cell, 1, 0.0) for cell in (often, often, once)]
    assert {disturber._rarest([often, once, never]) for _ in range(20)} == {never}
    assert {disturber._rarest([often, once]) for _ in range(20)} == {once}


def test_a_hit_costs_what_it_took_beyond_a_step():
    cell = Cell("kill", "rollout", "decode")
    hits = [Hit(cell, 1, 0.0, seconds=12.0), Hit(cell, 2, 0.0, seconds=8.0), Hit(cell, 3, 0.0)]
    assert table_of(hits, 2.0) == [{**cell._asdict(), "hits": 3, "seconds_lost": 8.0}]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_a_driver_that_has_ended_is_none_of_the_runs_processes_and_its_log_is_closed(tmp_path):
    target = Target([sys.executable, "-c", "print(7)"], tmp_path / "run")
    target.driver.wait()
    assert target.processes() == [] and target._log.closed and Path(target._log.name).read_text() == "7\n"


def test_steps_and_folders_are_chaoss_own_and_no_tracker_is_told(tmp_path, monkeypatch, capsys):
    commands = []

    def run(command, **_):
        commands.append(command)
        return SimpleNamespace(returncode=3, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for argument in ("run.steps=30", "run.dir=mine"):
        assert main([argument]) == 2 and f"{argument} has no part here" in capsys.readouterr().err
    assert commands == [] and main(["steps=40", "logging.wandb=online"]) == 3
    assert [word for word in commands[0] if word.startswith("logging.wandb=")][-1] == "logging.wandb=disabled"
    assert "run.steps=40" in commands[0]


@pytest.mark.parametrize(
    ("argument", "message"),
    [("kils=3", "kils"), ("rollout.grop_size=3", "rollout.group_size")],
)
def test_a_bad_argument_is_one_line_and_exit_2(argument, message, capsys):
    assert main([argument]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1

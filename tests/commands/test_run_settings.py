"""What a command may be given as CHECKPOINT or RUN, and what it says of the rest."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import yaml

from infsample_rl.commands import chat, evaluate, merge, replay
from infsample_rl.commands.run_settings import (
    answering_config,
    checkpoint_folder,
    leading,
    load_run_config,
    quoted,
    run_of,
)
from infsample_rl.config.loading import load_config


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 2 and 4."""
    folder = tmp_path / "run"
    for step in (2, 4):
        checkpoint = folder / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "driver_state.json").write_text("{}")
    (folder / "config.yaml").write_text("")
    return folder


def test_a_folder_is_taken_and_what_may_be_a_hub_name(run, monkeypatch):
    assert checkpoint_folder(f"{run}/checkpoints/step_000004") == run / "checkpoints" / "step_000004"
    monkeypatch.chdir(run)
    assert checkpoint_folder("checkpoints/step_000002") == Path("checkpoints/step_000002")
    assert checkpoint_folder("gpt2") is None and checkpoint_folder("Qwen/Qwen3-1.7B") is None


def test_a_path_may_hold_an_equals_sign_and_a_setting_is_no_path(run, tmp_path, monkeypatch, refused):
    (tmp_path / "lr=1").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("lr=1", "runs/lr=2/checkpoints/step_000002", "Qwen/Qwen3-1.7B"):
        assert leading([path, "samples=2"], "a checkpoint", "chat CHECKPOINT") == [path]
    for arguments in ([], ["lr=2"], [f"data.source={tmp_path}/a.jsonl"], [f"x={256 * 'y'}"]):
        with pytest.raises(ValueError, match="^give a checkpoint first: python -m infsample_rl chat CHECKPOINT$"):
            leading(arguments, "a checkpoint", "chat CHECKPOINT")
    assert "give a checkpoint and a new folder first" in refused(merge.main, str(run), f"out={tmp_path}/out")


def test_a_checkpoint_that_was_set_aside_is_of_its_run(run):
    assert run_of(run / "checkpoints" / "superseded" / "step_000006") == run
    assert run_of(run / "superseded" / "step_000006") is None


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        (
            "{run}/checkpoints/step_000099",
            "there is no such folder; the run has kept: {run}/checkpoints/step_000002, {run}/checkpoints/step_000004",
        ),
        (
            "{run}",
            "is a run folder; give a checkpoint of it: {run}/checkpoints/step_000002, {run}/checkpoints/step_000004",
        ),
        ("{run}/config.yaml", "is a file; give the folder it is in"),
        ("{run}/../mine", "there is no such folder, and a hub name is owner/name"),
        ("~/no/such/model", "there is no such folder"),
        ("./model", "there is no such folder"),
        ("", "there is no such folder"),
    ],
)
def test_what_is_no_checkpoint_is_named(checkpoint, said, run):
    with pytest.raises(ValueError) as error:
        checkpoint_folder(checkpoint.format(run=run))
    assert said.format(run=run) in str(error.value) and f"CHECKPOINT={checkpoint.format(run=run)}" in str(error.value)


@pytest.mark.parametrize("command", [evaluate, chat, merge])
def test_every_command_says_which_checkpoints_there_are(command, run, tmp_path, refused):
    arguments = [f"{run}/checkpoints/step_000099", *([str(tmp_path / "out")] if command is merge else [])]
    assert f"the run has kept: {run}/checkpoints/step_000002" in refused(command.main, *arguments)


def test_a_checkpoint_has_its_own_tokenizer_and_template(run):
    model = "model: {path: /gone, tokenizer_path: /gone, chat_template: /gone.jinja}"
    (run / "config.yaml").write_text(
        f"{model}\ndata: {{source: gone.jsonl}}\nreward: {{functions: [{{name: math}}]}}\n"
    )
    config = answering_config(f"{run}/checkpoints/step_000004", [], rows=1, max_new_tokens=8)
    assert (config.model.tokenizer_path, config.model.chat_template) == (None, None)


def test_replay_says_what_is_wrong_with_a_run(run, refused):
    assert f"RUN={run}/zzz is no folder" in refused(replay.main, f"{run}/zzz", "step=1")
    assert f"RUN={run}/checkpoints is no run folder: it has no config.yaml" in refused(
        replay.main, f"{run}/checkpoints", "step=1"
    )


@pytest.mark.parametrize(
    "text", ["a ${y} b", "it's", "a\\b", "\\${y}", "x\\\\", "a\\", "\\'", "a=b,c [1] {2: 3}", "", "a\nb", "\\\\${a}'\\"]
)
def test_a_quoted_text_reaches_a_setting_as_it_is(text):
    assert load_config([f"data.system_prompt={quoted(text)}"]).data.system_prompt == text


@pytest.mark.parametrize("content", [b"a: [", b"\xff\xfe", b"a: 1\n b: 2"])
def test_a_damaged_config_is_named(run, content):
    (run / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError, match="run/config.yaml cannot be read"):
        load_run_config(run, [])


@pytest.mark.parametrize("text", ["a ${y} b", "Gr\u00fc\u00dfe ${y}", "\u4f60\u597d \\${y}", "it's ${y}"])
def test_a_text_that_looks_like_an_interpolation_stays_as_it_was(run, text):
    settings = {"model": {"path": "/m"}, "data": {"source": "a.jsonl", "system_prompt": text}}
    (run / "config.yaml").write_text(yaml.safe_dump(settings | {"reward": {"functions": ["math"]}}))
    assert load_run_config(run, []).data.system_prompt == text


def test_a_setting_of_the_run_is_blamed_on_the_runs_own_file(run, monkeypatch):
    settings = "model: {path: /m}\ndata: {source: a.jsonl}\nreward: {functions: [math]}\n"
    (run / "config.yaml").write_text(settings + "rollout: {max_new_tokens: 64}\n")
    for folder in (run, tempfile.gettempdir()):  # what lies below the current folder is named from there
        monkeypatch.chdir(folder)
        with pytest.raises(ValueError, match=f"; {run}/config.yaml sets rollout.max_new_tokens$"):
            load_run_config(run, ["learner.max_tokens_per_micro_batch=16"])


def test_a_deterministic_run_on_gpus_can_be_replayed(run):
    settings = "model: {path: /m, dtype: bfloat16}\ndata: {source: a.jsonl}\nreward: {functions: [math]}\n"
    gpus = "cluster: {rollout_gpus: 1, learner_gpus: 1, colocate: true}\n"
    (run / "config.yaml").write_text(f"{settings}{gpus}run: {{deterministic: true}}\n")
    assert replay.replay_config(run, []).is_deterministic


@pytest.mark.parametrize(
    "override",
    [
        "rollout.group_size=9",
        "environment.straggler_s=9",
        "run.seed=9",
        "run.max_staleness=1",
        "objective.advantage=rloo",
        "objective.overlong_penalty=2",
        "objective.turn_credit=turn",
        "objective.kl_reward_coef=0.1",
        "objective.dynamic_sampling=true",
    ],
)
def test_replay_refuses_what_is_recorded(run, override):
    with pytest.raises(ValueError, match=f"{override} has no part in a replay: .* leave it out"):
        replay.replay_config(run, ["learner.lr=1e-3", override])

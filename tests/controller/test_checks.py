"""What is checked before a run begins, and what a resumed one finds: its probe, or a line that it starts anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import configuration_utils

import infsample_rl
from infsample_rl.config import ModelConfig
from infsample_rl.config.loading import load_config
from infsample_rl.controller import checkpoints
from infsample_rl.controller.checkpoints import write_checkpoint, write_checksums
from infsample_rl.controller.checks import (
    Start,
    _unused_rewards,
    check_turns,
    claim_run_folder,
    open_run_folder,
    prepare,
)
from infsample_rl.controller.inputs import read_inputs
from infsample_rl.model.loading import load_model
from infsample_rl.rollout.length_prediction.run_probe import FILE
from infsample_rl.types import ProbeReport, ProbeStatistics
from tests.tiny_models import save_words

KK_TINY = Path(infsample_rl.__file__).parent / "assets" / "kk_tiny" / "policy"


def begin(run_dir: Path, *overrides: str) -> Start:
    config = load_config([f"run.dir={run_dir}", *overrides])
    start = prepare(config, read_inputs(config))
    if start.lock is not None:
        start.lock.close()  # as when the process ends
    return start


def test_a_start_that_is_refused_or_only_prepared_leaves_no_folder(tmp_path):
    run_dir = tmp_path / "runs" / "one"
    with pytest.raises(ValueError, match="stop_token_ids"):
        begin(run_dir, "rollout.stop_token_ids=[99999]")
    start = begin(run_dir)
    assert start.lock is None and list(tmp_path.iterdir()) == []
    open_run_folder(run_dir, start)
    assert {path.name for path in run_dir.iterdir()} == {".lock", "plan.json"}
    start.lock.close()


def test_a_model_whose_files_lack_weights_is_refused_before_anything_starts_and_what_they_have_more_is_said(tmp_path):
    for name, change in [("fewer", 1), ("more", -1)]:
        folder = shutil.copytree(KK_TINY, tmp_path / name)
        settings = json.loads((folder / "config.json").read_text())
        settings["num_hidden_layers"] += change
        settings["layer_types"] = ["full_attention"] * settings["num_hidden_layers"]
        (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"model\.path=.*fewer: its files have no model\.layers\.4\..* and 10 more"):
        begin(tmp_path / "run", f"model.path={tmp_path / 'fewer'}")
    start = begin(tmp_path / "run", f"model.path={tmp_path / 'more'}")
    [warning] = [warning for warning in start.warnings if "are left out" in warning]
    assert warning.startswith("model.layers.3.input_layernorm.weight and 10 more of the files of model.path")


def test_an_architecture_that_transformers_does_not_know_is_one_line(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(configuration_utils.logger, "warning", said.append)
    folder = shutil.copytree(KK_TINY, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen9"}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"model\.path=.*has model type `qwen9` but .* issue with \.\.\.\)$"):
        begin(tmp_path / "run", f"model.path={folder}")
    assert said == []


def test_a_folder_of_adapters_in_place_of_a_model_is_refused_with_the_command_that_merges_them(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "base"}))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ValueError, match=r"^model\.path=.* adapters alone, .*`python -m infsample_rl merge .* OUT`"):
        begin(tmp_path / "run", f"model.path={tmp_path}")


@pytest.mark.parametrize("setting", ["model.path", "reference.path"])
def test_quantised_weights_are_refused_before_anything_starts(tmp_path, setting):
    folder = shutil.copytree(KK_TINY, tmp_path / "model")
    quantised = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | quantised))
    with pytest.raises(ValueError, match=rf"^{setting}={folder} must not be quantised, .* \(bitsandbytes\): give"):
        begin(tmp_path / "run", f"{setting}={folder}", "objective=default")
    with pytest.raises(ValueError, match="^model.path=.*bitsandbytes"):
        load_model(ModelConfig(path=str(folder)))


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("config.json", lambda text: text.replace("128", '"128"'), "model config .*hidden_size.*expected int, got str"),
        ("tokenizer.json", lambda text: text.replace('"Split"', '"Newer"'), "tokenizer .*did not match any variant"),
        ("tokenizer.json", lambda _: "[]", "tokenizer"),
        ("generation_config.json", lambda text: text[:-3], "generation_config.json .*not a valid JSON"),
        ("generation_config.json", lambda _: "[]", "generation_config.json"),
        (
            "generation_config.json",
            lambda text: text.replace(": 3,", ': "3",'),
            "generation_config.json .*eos_token_id must be",
        ),
    ],
)
def test_a_damaged_file_of_the_model_is_one_line_before_anything_starts(tmp_path, file, damage, said):
    folder = shutil.copytree(KK_TINY, tmp_path / "model")
    (folder / file).write_text(damage((folder / file).read_text()))
    with pytest.raises(ValueError, match=rf"^model\.path={folder}: no {said}") as refused:
        begin(tmp_path / "run", f"model.path={folder}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}, "^reference.path=.*model: its files have no"),
        ({"intermediate_size": 250}, "^reference.path=.*down_proj.weight is .* asks for"),
        ({"layer_types": ["sliding_attention"] * 4}, "layers of type sliding_attention"),
    ],
)
def test_a_reference_is_checked_before_anything_starts_as_the_policy_is(tmp_path, change, said):
    folder = shutil.copytree(KK_TINY, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=said):
        begin(tmp_path / "run", "objective=default", f"reference.path={folder}")


def test_a_run_folder_that_cannot_be_made_is_refused_before_anything_starts(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path, reason in [
        (file, "File exists"),
        (file / "run", "Not a directory"),
        (tmp_path / ("x" * 300), "too long"),
    ]:
        with pytest.raises(ValueError, match=f"run.dir=.* cannot be written .*{reason}"):
            begin(path)


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_starts(tmp_path):
    save_words(tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"reference\.path=.*teacher must have the tokenizer of"):
        begin(tmp_path / "run", "objective=distill", f"reference.path={tmp_path / 'teacher'}")


def test_a_run_goes_on_with_the_length_probe_of_its_checkpoint(tmp_path):
    start = begin(tmp_path)
    size = start.probe._probe.statistics.xy.shape[1]
    assert size == 2 * 128 + 2  # kk_tiny's hidden size is 128
    seen = ProbeStatistics(np.ones((2, size, size)), np.ones((2, size)), np.ones(2))
    start.probe.enter([ProbeReport(statistics=seen, steps_with=9, steps_without=10)])

    def save(folder: str) -> None:
        Path(folder, "model.safetensors").write_text("weights")
        start.probe.save(Path(folder))

    checkpoint = write_checkpoint(tmp_path, {"step": 3, "data": start.prompts.state()}, save)
    again = begin(tmp_path)
    assert (
        again.step == 3
        and again.probe._probe.statistics.xx.tobytes() == seen.xx.tobytes()
        and again.probe.published().is_used
    )
    assert not any("length probe" in warning for warning in again.warnings)
    (checkpoint / FILE).unlink()
    write_checksums(checkpoint)
    anew = begin(tmp_path)
    assert anew.probe._probe.statistics.counts.tolist() == [0, 0]
    assert f"{checkpoint / FILE} is not there: the length probe starts anew" in anew.warnings


def test_a_run_folder_is_locked_before_its_checkpoints_are_looked_at(tmp_path, monkeypatch):
    """A process that SIGTERM ends may save once more: who comes after it must not have chosen a checkpoint by then."""
    (tmp_path / "run").mkdir()
    real = checkpoints.find_checkpoint

    def looked_at(run_dir, resume):
        with pytest.raises(ValueError, match="is in use by a running process"):
            checkpoints.lock_run_folder(run_dir)
        return real(run_dir, resume)

    monkeypatch.setattr(checkpoints, "find_checkpoint", looked_at)
    start = begin(tmp_path / "run")
    start.lock.close()
    with pytest.raises(ValueError, match="stop_token_ids"):
        begin(tmp_path / "run", "rollout.stop_token_ids=[99999]")
    checkpoints.lock_run_folder(tmp_path / "run").close()  # given back where the settings were refused


def test_a_schedule_that_reads_no_lengths_has_no_probe(tmp_path):
    assert begin(tmp_path / "one").probe is not None
    assert begin(tmp_path / "two", "rollout.schedule=arrival").probe is None


def test_a_finished_run_says_that_nothing_is_left_to_train(tmp_path):
    data = begin(tmp_path).prompts.state()
    write_checkpoint(tmp_path, {"step": 3, "data": data}, lambda folder: Path(folder, "model.safetensors").touch())
    said = (
        f"run.dir={tmp_path} has all of its 3 steps: nothing is left to train; raise run.steps or run.epochs to go on"
    )
    assert said in begin(tmp_path, "run.steps=3").warnings and said not in begin(tmp_path, "run.steps=4").warnings


def test_a_start_changes_the_run_folder_only_once_its_workers_are_there(tmp_path):
    data = begin(tmp_path).prompts.state()
    first = load_config([f"run.dir={tmp_path}", "learner.lr=1e-3"])
    claim_run_folder(first, tmp_path, 0)
    for step in (1, 2):
        write_checkpoint(
            tmp_path, {"step": step, "data": data}, lambda folder: Path(folder, "model.safetensors").touch()
        )

    def folder() -> dict[str, bytes]:
        kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
        return {str(path): path.read_bytes() for path in kept}

    before, older = folder(), f"run.resume={tmp_path / 'checkpoints' / 'step_000001'}"
    start = begin(tmp_path, "learner.lr=1e-4", older)
    assert folder() == before
    assert any("learner.lr: 0.001 -> 0.0001" in warning for warning in start.warnings)
    assert any("step_000002 is of a step that is done again" in warning for warning in start.warnings)
    claim_run_folder(load_config([f"run.dir={tmp_path}", "learner.lr=1e-4"]), tmp_path, start.step)
    assert (
        not (tmp_path / "checkpoints" / "step_000002").exists()
        and "lr: 0.0001" in (tmp_path / "config.yaml").read_text()
    )
    assert not any("learner.lr" in warning for warning in begin(tmp_path, "learner.lr=1e-4").warnings)


@pytest.mark.parametrize(
    ("rewards", "functions", "said"),
    [
        (True, ["environment"], []),
        (False, ["gsm8k"], []),
        (True, ["gsm8k"], ["a.py:A gives rewards, which reward.functions leaves out"]),
    ],
)
def test_rewards_of_an_environment_that_nothing_names_are_told_of(rewards, functions, said):
    config = load_config(["environment.factory=a.py:A", f"reward.functions=[{','.join(functions)}]"])
    found = _unused_rewards(config, SimpleNamespace(rewards=rewards))
    assert len(found) == len(said) and all(part in line for line, part in zip(found, said, strict=True))
    assert _unused_rewards(config, None) == []


def test_an_environment_without_a_reward_is_refused_where_it_is_named_as_one():
    config = load_config(["environment.factory=a.py:A", "reward.functions=[environment]"])
    with pytest.raises(ValueError, match=r"environment.factory=/.*/a.py:A has no get_reward, which reward.fun"):
        check_turns(config, None, None, SimpleNamespace(rewards=False, form="tools"))

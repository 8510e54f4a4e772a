"""What a node must see of the driver's files, told without Ray: one folder is the driver's, another stands for a
node's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from infsample_rl.cluster import shared_files
from infsample_rl.cluster.shared_files import end_check, needed_files, offer_token, prove
from infsample_rl.config.loading import load_config


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(shared_files, "READ_PATIENCE_S", 0.0)


def test_a_node_that_sees_everything_says_so_and_leaves_nothing(tmp_path):
    token = offer_token(tmp_path)
    assert prove(str(tmp_path), token, "n1", []) == []
    end_check(tmp_path, token)
    assert list(tmp_path.iterdir()) == []


def test_a_local_disk_is_found_and_not_written_to(tmp_path):
    driver, node = tmp_path / "driver", tmp_path / "node"
    driver.mkdir()
    token = offer_token(driver)
    assert prove(str(node), token, "n1", []) == [f"run.dir: {node} is not there"] and not node.exists()
    node.mkdir()
    assert prove(str(node), token, "n1", []) == [f"run.dir: {node} is another folder there (a local disk?)"]
    shutil.copytree(driver, node, dirs_exist_ok=True)  # an old copy: a new run has a new token
    assert "is another folder" in prove(str(node), offer_token(driver), "n1", [])[0]
    assert not list(node.rglob("n1"))


def test_two_runs_may_prove_the_same_folder_at_once(tmp_path):
    first, second = offer_token(tmp_path), offer_token(tmp_path)
    end_check(tmp_path, second)
    assert prove(str(tmp_path), first, "n1", []) == []


def test_files_that_are_missing_or_of_another_size_are_named_with_their_setting(tmp_path):
    token, file = offer_token(tmp_path), tmp_path / "model.safetensors"
    file.write_bytes(b"1234")
    wanted = [("model.path", str(file), 5)]
    assert prove(str(tmp_path), token, "n", wanted) == [f"model.path: {file} has 4 bytes there, 5 here"]
    file.unlink()
    assert prove(str(tmp_path), token, "n", wanted) == [f"model.path: {file} is not there"]


def test_every_local_file_of_model_data_rewards_and_environments_is_needed(tmp_path):
    data, reward, environment, tool = (tmp_path / name for name in ("rows.jsonl", "mine.py", "game.py", "tool.py"))
    data.write_text('{"question": "?"}\n')
    reward.write_text("def score(prompts, completions): return [0.0]\n")
    environment.write_text("class Game: ...\n")
    tool.write_text("def add(): ...\n")
    config = load_config(
        [
            *(f"data.source={data}", "data.eval_source=gsm8k", f"reward.functions=[{{name: '{reward}:score'}}]"),
            *(f"environment.factory={environment}:Game", f"environment.tools=['{tool}:add']"),
        ]
    )
    needed = needed_files(config)
    assert ("data.source", str(data), 18) in needed and ("reward.functions", str(reward), 46) in needed
    assert {("environment", str(environment), 16), ("environment", str(tool), 15)} <= set(needed)
    policy = {Path(name).name for setting, name, _ in needed if setting == "model.path"}
    assert policy >= {"config.json", "model.safetensors", "tokenizer.json"}
    settings = {setting for setting, _, _ in needed}
    assert settings == {"model.path", "data.source", "reward.functions", "environment"}, "gsm8k is a hub name"

"""Keys and tokens: who gets which, and what a worker's environment holds afterwards."""

from __future__ import annotations

import os

import pytest

from infsample_rl.cluster.worker_secrets import (
    check_reward_environment,
    take_secrets,
    without_secrets,
    worker_secrets,
)
from infsample_rl.config.loading import load_config
from infsample_rl.config.secrets import is_secret_name

KEYS = {
    "WANDB_API_KEY": "w-planted",
    "HF_TOKEN": "h-planted",
    "JUDGE_API_KEY": "j-planted",
    "AWS_SECRET_ACCESS_KEY": "a-planted",
}


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    for name in ("HUGGING_FACE_HUB_TOKEN", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


def test_names_of_keys():
    keys = ["WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "OPENAI_APIKEY", "DB_PASSWORD", "my_token"]
    assert all(map(is_secret_name, keys))
    others = ["PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "HOME", "MONKEY", "HF_TOKEN_PATH"]
    assert not any(map(is_secret_name, [*others, "HF_HUB_DISABLE_IMPLICIT_TOKEN"]))


def test_the_hubs_token_goes_to_who_loads_models_and_to_reward_workers_only_with_a_model_of_the_hub():
    hub = {"HF_TOKEN": "h-planted", "HUGGING_FACE_HUB_TOKEN": None}
    assert worker_secrets(load_config(["objective=default"])) == {
        "rollout": hub,
        "reward": {},
        "learner": hub,
        "reference": hub,
    }, "and W&B's key to nobody"
    with_reward_model = ["objective=no_kl", "reward.functions=[{name: 'model:org/judge'}]"]
    assert worker_secrets(load_config(with_reward_model))["reward"] == hub


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ([], {"reward"}),
        (["environment.factory=game.py:Game"], {"reward", "rollout"}),
        (["environment.factory=game.py:Game", "cluster.colocate=true"], {"reward", "learner"}),
    ],
)
def test_named_keys_go_to_who_runs_rewards_or_environments(settings, roles):
    given = worker_secrets(load_config(["objective=no_kl", "reward.environment=[JUDGE_API_KEY]", *settings]))
    assert given["reward"] == {"JUDGE_API_KEY": "j-planted"}
    assert {role for role, keys in given.items() if "JUDGE_API_KEY" in keys} == roles


@pytest.mark.parametrize(
    ("name", "message"),
    [("WANDB_API_KEY", "environment must not name WANDB_API_KEY"), ("NO_SUCH_KEY", "NO_SUCH_KEY, which is not set")],
)
def test_a_name_that_cannot_be_given_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        check_reward_environment(load_config([f"reward.environment=[{name}]"]))


def test_a_value_in_place_of_a_name_is_refused_and_not_repeated():
    with pytest.raises(ValueError, match="names of environment variables, never values") as refused:
        load_config(["reward.environment=['sk-planted=']"])
    assert "planted" not in str(refused.value)


def test_a_worker_keeps_what_it_is_given_and_no_other_key():
    os.environ["HUGGING_FACE_HUB_TOKEN"] = os.environ["RAY_AUTH_TOKEN"] = "of the node"
    take_secrets({"JUDGE_API_KEY": "given", "HUGGING_FACE_HUB_TOKEN": None})
    left = {name: value for name, value in os.environ.items() if is_secret_name(name)}
    assert left == {
        "JUDGE_API_KEY": "given",
        "HUGGING_FACE_HUB_TOKEN": "of the node",
        "RAY_AUTH_TOKEN": "of the node",  # by which Ray's processes reach each other
    }
    assert "PATH" in os.environ


def test_an_environment_without_secrets_keeps_all_else_and_what_ray_needs():
    assert without_secrets(os.environ | {"RAY_AUTH_TOKEN": "of the node"}) == {
        name: value for name, value in os.environ.items() if not is_secret_name(name)
    } | {"RAY_AUTH_TOKEN": "of the node"}

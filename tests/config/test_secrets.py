"""Keys are refused in settings, and those of the environment reach nothing that a run writes or says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from infsample_rl.config.loading import load_config
from infsample_rl.config.overrides import ConfigError

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "WANDB_API_KEY": "5ec2e7" + "0a" * 17,
    "HF_TOKEN": "hf_plantedAbCdEfGhIjKlMn",
    "OPENAI_API_KEY": "sk-planted-000111222333",
    "AWS_SECRET_ACCESS_KEY": "planted/aws/secret/key42",
    "JUDGE_API_KEY": "judge-planted-777888999",  # the one that the reward function is given
}
REWARD = '''
import os

def judge(completions, **columns):
    """Says and raises what it should keep to itself."""
    print("asking the judge with", os.environ["JUDGE_API_KEY"], flush=True)
    if len(completions[0]) % 2:
        raise RuntimeError("401 Unauthorized: " + os.environ["JUDGE_API_KEY"] + str(dict(os.environ)))
    return [float(len(completion)) for completion in completions]
'''


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "reward.functions=[{name: kk, kwargs: {api_key: abc}}]",
            "reward.functions[0].kwargs.api_key is a key by its name",
        ),
        (
            "reward.functions=[{name: kk, kwargs: {x: sk-planted-000111222333}}]",
            "reward.functions[0].kwargs.x holds the value of OPENAI_API_KEY",
        ),
        ("data.chat_template_kwargs.hf_token=abc", "data.chat_template_kwargs.hf_token is a key by its name"),
        (
            "reward.functions=[{name: kk, kwargs: {headers: {x-api-key: abc}}}]",
            "reward.functions[0].kwargs.headers.x-api-key is a key by its name",
        ),
        (
            "reward.functions=[{name: kk, kwargs: {j_token: a1b2c3d4e5f6g7h8}}]",
            "reward.functions[0].kwargs.j_token holds what looks like a key",
        ),
        (
            "reward.functions=[{name: kk, kwargs: {auth: 'Bearer abcdefgh'}}]",
            "reward.functions[0].kwargs.auth holds what looks like a key",
        ),
        (
            "reward.functions=[{name: kk, kwargs: {judge: sk-proj-abcdefghijkl}}]",
            "reward.functions[0].kwargs.judge holds what looks like a key",
        ),
        ("environment.factory='play.py --hf_token=abc'", "environment.factory.hf_token is a key by its name"),
        ("run.name=sk-planted-000111222333", "run.name holds the value of OPENAI_API_KEY"),
        ("data.source='https://me:secret@example.org/rows.jsonl'", "data.source holds a URL with a password"),
    ],
)
def test_a_key_in_the_settings_is_refused_without_repeating_it(monkeypatch, override, said):
    monkeypatch.setenv("OPENAI_API_KEY", KEYS["OPENAI_API_KEY"])
    with pytest.raises(ConfigError) as refused:
        load_config([override])
    assert str(refused.value).startswith(said) and not any(
        secret in str(refused.value) for secret in ("abc", "sk-planted", "secret@")
    )


def test_what_only_looks_like_a_key_is_taken():
    config = load_config(["data.chat_template_kwargs.stop_token=x", "data.chat_template_kwargs.max_tokens=3"])
    assert config.data.chat_template_kwargs["stop_token"] == "x"


@pytest.mark.slow
def test_planted_keys_are_in_nothing_that_a_run_writes_or_says(tiny_run, sums_file, tmp_path):
    """Run folder, W&B's offline files, checkpoints, Ray's logs, temporary files, standard output and error."""
    short = Path(tempfile.mkdtemp(prefix="s"))  # Ray's sockets below it allow 107 characters
    (tmp_path / "rewards").mkdir()
    reward = tmp_path / "rewards" / "judge.py"
    reward.write_text(REWARD)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").write_text(f"machine api.wandb.ai login user password {KEYS['WANDB_API_KEY']}\n")
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    remote = f"https://me:{KEYS['HF_TOKEN']}@example.org/project.git"
    subprocess.run(["git", "remote", "add", "origin", remote], cwd=tmp_path, check=True)
    places = {
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(short),
        "RAY_TMPDIR": str(short),
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
    }
    judged = [f"reward.functions=['{reward}:judge']", "reward.environment=[JUDGE_API_KEY]"]
    evaluated = [f"data.eval_source={sums_file}", "run.eval_prompts=2"]
    logged = ["run.dir=mine", "logging.tensorboard=true", "logging.wandb=auto"]
    arguments = [*tiny_run, *judged, *evaluated, *logged]
    try:
        command = [sys.executable, "-m", "infsample_rl.main", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | KEYS | places, capture_output=True, timeout=500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        # what a function says is shown, less its keys
        assert b"401 Unauthorized: <JUDGE_API_KEY>" in done.stdout + done.stderr
        files = [
            path
            for folder in (tmp_path, short)
            for path in folder.rglob("*")
            if path.is_file() and not path.is_symlink()
        ]
        files = [path for path in files if path.name != ".netrc" and ".git" not in path.parts]
        written = {str(path): path.read_bytes() for path in files} | {"stdout": done.stdout, "stderr": done.stderr}
        assert any("offline-run" in name for name in written) and any(
            name.endswith("model.safetensors") for name in written
        )
        assert any("session_" in name for name in written), "Ray's logs are looked at too"
        found = [
            (name, variable)
            for name, content in written.items()
            for variable, key in KEYS.items()
            if key.encode() in content
        ]
        assert found == []
    finally:
        shutil.rmtree(short, ignore_errors=True)

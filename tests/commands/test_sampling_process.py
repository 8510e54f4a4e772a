"""`evaluate` of a run whose engine is vLLM: by vLLM itself, and what is said where its process cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import ray
import torch
from peft import LoraConfig, get_peft_model

from infsample_rl.cluster.rollout_interpreter import MADE_HERE
from infsample_rl.commands import chat, evaluate
from infsample_rl.config import ModelConfig
from infsample_rl.model.loading import load_model
from infsample_rl.model.tokenizer import load_tokenizer
from tests.vllm_files import check_nothing_is_left, files_of_vllm

ASSETS = Path(__file__).resolve().parents[2] / "infsample_rl" / "assets"
POLICY = ASSETS / "kk_tiny" / "policy"
ARGUMENTS = [f"data.source={ASSETS / 'kk_tiny' / 'test.jsonl'}", "reward=kk", "run.eval_prompts=6", "samples=4"]
ARGUMENTS += ["rollout.max_new_tokens=48", "json=true"]
GAME = """
class Game:
    def reset(self, seed=0, options=None):
        return "Begin."

    def step(self, action):
        return "Go on.", float(len(action) % 3), len(action) % 2 == 0, False, {}
"""


def interpreter(folder: Path, otherwise: str) -> Path:
    """Answers as one with vLLM does; else it does `otherwise`."""
    path, here = folder / "python", "{}.{}".format(*sys.version_info[:2])
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo {here} {ray.__version__} 0.32.0 None; else {otherwise}; fi\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("otherwise", "said"),
    [
        ("exit 3", "the process that samples with vLLM died (exit code 3)"),
        ("kill -9 $$", "the process that samples with vLLM died (killed by SIGKILL)"),
        (f'exec {sys.executable} "$@"', "rollout.engine=vllm: this interpreter has no vLLM"),
    ],
)
def test_what_ends_the_process_is_one_line(tmp_path, capfd, otherwise, said):
    path = interpreter(tmp_path, otherwise)
    assert evaluate.main([str(POLICY), *ARGUMENTS, "rollout.engine=vllm", f"rollout.vllm_python={path}"]) == 1
    shown = capfd.readouterr()
    assert said in shown.err and "Traceback" not in shown.err and not shown.out


def test_an_interpreter_that_is_none_is_refused_and_talks_are_the_native_engines(tmp_path, capfd):
    own = ["rollout.engine=vllm", f"rollout.vllm_python={tmp_path}/none"]
    assert evaluate.main([str(POLICY), *ARGUMENTS, *own]) == 2
    assert f"rollout.vllm_python={tmp_path}/none is no interpreter" in capfd.readouterr().err
    assert chat.main([str(POLICY), "rollout.engine=vllm"]) == 2
    assert f"vLLM answers by its own `vllm serve {POLICY}`" in capfd.readouterr().err
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "step_000001").symlink_to(POLICY)
    settings = {"engine": "vllm", "tensor_parallel": 2, "vllm_python": "python"}
    kept = {"rollout": settings, "data": {"source": "kk"}, "reward": {"functions": ["kk"]}}
    (run / "config.yaml").write_text(json.dumps(kept))
    config = chat.chat_config(str(run / "checkpoints" / "step_000001"), chat.ChatOptions(), [])
    assert (config.rollout.engine, config.rollout.tensor_parallel) == ("native", 1)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> Path:
    """The policy with adapters that change what it says."""
    adapted = get_peft_model(
        load_model(ModelConfig(path=str(POLICY), dtype="float32")), LoraConfig(target_modules=["q_proj", "v_proj"], r=4)
    )
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0, 0.1)
    folder = tmp_path_factory.mktemp("adapters")
    adapted.peft_config["default"].base_model_name_or_path = str(POLICY)
    adapted.save_pretrained(folder)
    load_tokenizer(ModelConfig(path=str(POLICY))).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("changes", ["", "rollout.tensor_parallel=2", "adapters", "an environment"])
def test_every_completion_is_the_native_engines_and_nothing_is_left(tmp_path, adapters, capfd, changes):
    assert MADE_HERE.exists(), "make vllm makes the interpreter, which make test-all does before"
    game, before = tmp_path / "game.py", files_of_vllm("/tmp")
    game.write_text(GAME)
    settings = {
        "": [],
        "adapters": [],
        "an environment": ["reward.functions=[environment]", f"environment.factory={game}:Game"],
    }.get(changes, [changes])
    found = {}
    for engine in ("native", "vllm"):
        own = settings if engine == "vllm" or "tensor_parallel" not in changes else []
        out = tmp_path / f"{engine}.jsonl"
        checkpoint = str(adapters if changes == "adapters" else POLICY)
        assert evaluate.main([checkpoint, *ARGUMENTS, *own, f"rollout.engine={engine}", f"out={out}"]) == 0
        found[engine] = capfd.readouterr().out.splitlines()[-1], out.read_text()
    assert found["vllm"] == found["native"]
    assert changes != "an environment" or '"observed": [[' in found["native"][1]
    check_nothing_is_left(before, "/tmp")

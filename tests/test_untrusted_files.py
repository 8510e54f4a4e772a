"""Weights and checkpoints are data: nothing in them runs. Code that comes with a model runs only when it is asked
for."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from infsample_rl.config import ModelConfig
from infsample_rl.model.loading import load_model, load_model_config

PACKAGE = Path(__file__).resolve().parent.parent / "infsample_rl"
# What unpickles: pipes and stores between processes of one run, never a file and never what a reward process wrote.
UNPICKLES = {
    "data/generate.py",
    "data/sources.py",
    "reward/function_process.py",
    "reward/environment_process.py",
    "cluster/messages.py",
    "model/weight_sync/link.py",
}


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_torch_loads_weights_only_and_pickle_reads_no_file():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            function = ast.unparse(call.func)
            if function == "torch.load":
                assert any(
                    keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True" for keyword in call.keywords
                ), name
            if function.split(".")[0] == "pickle" and function.split(".")[-1] in ("load", "loads", "Unpickler"):
                assert name in UNPICKLES, name
            assert not any(keyword.arg == "allow_pickle" for keyword in call.keywords), name


def test_weights_that_are_a_program_are_not_run(tiny_qwen3, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_qwen3, folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Runs(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises((ValueError, RuntimeError, OSError, pickle.UnpicklingError)):
        load_model(ModelConfig(path=str(folder)), "cpu")
    assert not (tmp_path / "ran").exists()


def test_a_models_own_code_is_not_run_unless_asked_for(tiny_qwen3, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_qwen3, folder)
    config = json.loads((folder / "config.json").read_text())
    own = {
        "model_type": "its_own",
        "auto_map": {"AutoConfig": "its_code.OwnConfig", "AutoModelForCausalLM": "its_code.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config | own))
    (folder / "its_code.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})\n")
    with pytest.raises(ValueError):
        load_model_config(ModelConfig(path=str(folder)))
    assert not (tmp_path / "ran").exists()

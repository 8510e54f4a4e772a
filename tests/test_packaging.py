"""The wheel, installed away from the checkout, composes every experiment and carries the default one's files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CODE = """
import infsample_rl, pathlib, sys
from infsample_rl.config.loading import load_config
from infsample_rl.config.overrides import experiments
assert infsample_rl.__file__.startswith(sys.argv[1]), infsample_rl.__file__
for name in experiments():
    print(name, load_config([f"+experiment={name}"]).run.name)
policy = pathlib.Path(load_config([]).model.path)
assert (policy / "model.safetensors").is_file() and (policy.parent / "train.jsonl").is_file(), policy
import infsample_rl.main, infsample_rl.controller.checks, infsample_rl.controller.driver
import infsample_rl.reward.function_process, infsample_rl.learner.worker
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Folder the built wheel was unpacked into by pip."""
    scratch = tmp_path_factory.mktemp("wheel")
    source = scratch / "source"
    ignored = shutil.ignore_patterns(".venv*", ".git", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", scratch / "dist", source],
        check=True,
        capture_output=True,
    )
    (wheel,) = (scratch / "dist").glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", scratch / "site", wheel], check=True
    )
    return scratch / "site"


@pytest.mark.slow
def test_installed_wheel_composes_every_experiment(installed, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(installed)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines == [[path.stem, path.stem] for path in sorted((ROOT / "configs" / "experiment").glob("*.yaml"))]
    assert list(tmp_path.iterdir()) == []


def test_every_package_folder_and_asset_is_in_the_wheel(installed):
    inside = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    source = [
        *(ROOT / "infsample_rl").rglob("*.py"),
        *(ROOT / "infsample_rl" / "observe" / "report" / "assets").iterdir(),
    ]
    assert [str(path) for path in source if path.relative_to(ROOT) not in inside] == []

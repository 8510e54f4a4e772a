"""Where vLLM's interpreter is looked for, and what its workers find: this package, and nothing else of the driver's."""

import sys
from pathlib import Path

import pytest
import ray

import infsample_rl
from infsample_rl.cluster import rollout_interpreter, worker_environment
from infsample_rl.config.loading import load_config

HERE = "{}.{}".format(*sys.version_info[:2])


@pytest.fixture
def installed(monkeypatch, tmp_path) -> Path:
    """This package lies in an environment's site-packages, beside everything that the driver needs."""
    folder = tmp_path / "venv" / "lib" / "python" / "site-packages"
    monkeypatch.setattr(worker_environment, "PACKAGE", folder)
    monkeypatch.setattr(rollout_interpreter, "BESIDE", tmp_path / "venv-vllm" / "bin" / "python")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


def stand_in(path: Path, answer: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho {answer}\n")
    path.chmod(0o755)


def test_a_checkout_is_shown_to_every_interpreter_and_site_packages_to_none(installed, monkeypatch):
    config = load_config([])
    assert worker_environment.worker_environment(config)["PYTHONPATH"] == ""
    monkeypatch.setattr(worker_environment, "PACKAGE", Path("/checkout"))
    monkeypatch.setenv("PYTHONPATH", "/own")
    assert worker_environment.worker_environment(config)["PYTHONPATH"] == "/checkout:/own"


def test_of_an_installed_package_the_interpreter_beside_its_own_is_taken_and_must_have_it_too(installed):
    config, path = load_config(["rollout.engine=vllm"]), rollout_interpreter.BESIDE
    assert rollout_interpreter.rollout_interpreter(config) == str(path)
    with pytest.raises(ValueError, match=r"venv-vllm/bin/python is no interpreter; docs/howto/vllm.md says how"):
        rollout_interpreter.check_rollout_interpreter(config)
    stand_in(path, f"{HERE} {ray.__version__} 0.32.0 None")
    with pytest.raises(ValueError, match=f"has infsample_rl None, the driver {infsample_rl.__version__}: install"):
        rollout_interpreter.check_rollout_interpreter(config)
    path.write_text(path.read_text().replace("None", infsample_rl.__version__))
    rollout_interpreter.check_rollout_interpreter(config)


def test_of_a_checkout_it_is_the_one_that_make_vllm_makes():
    config = load_config(["rollout.engine=vllm"])
    assert rollout_interpreter.rollout_interpreter(config) == str(rollout_interpreter.MADE_HERE)

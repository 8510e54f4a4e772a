"""What can be checked of scripts, manifests and images without Slurm, Kubernetes or a container engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "slurm.sbatch"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_every_script(script):
    subprocess.run(["bash", "-n", script], check=True)


def linter(name: str) -> str:
    """Path of a linter, installed beside this interpreter or on the machine."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which(name, path=places) or pytest.skip(f"{name} is not installed: make test-all installs it")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    command = [linter("shellcheck"), "-x", script.relative_to(ROOT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_nothing():
    done = subprocess.run([linter("hadolint"), ROOT / "docker" / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_clusters_machines_are_what_rays_launcher_takes():
    """By Ray's schema, and by the checks `ray up` makes before it connects to anything."""
    jsonschema = pytest.importorskip("jsonschema")
    import ray
    from ray.autoscaler._private.util import prepare_config, validate_config

    cluster = yaml.safe_load((LAUNCH / "ray_cluster.yaml").read_text())
    jsonschema.validate(cluster, json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text()))
    prepared = prepare_config(cluster)
    validate_config(prepared)
    (node_type,) = prepared["available_node_types"].values()
    assert node_type["min_workers"] == node_type["max_workers"] == 3
    starts = [*cluster["head_start_ray_commands"], *cluster["worker_start_ray_commands"]]
    assert all("RAY_AUTH_MODE=token" in command for command in starts) and "--dashboard-host=127.0.0.1" in starts[0]
    assert "~/.ray/auth_token" in cluster["file_mounts"] and "chmod 600 ~/.ray/auth_token" in cluster["setup_commands"]


@pytest.fixture
def ray_job() -> dict:
    return yaml.safe_load((LAUNCH / "kuberay" / "rayjob.yaml").read_text())


def test_the_ray_job_has_what_the_operator_needs_and_no_root(ray_job):
    import ray

    assert (ray_job["apiVersion"], ray_job["kind"]) == ("ray.io/v1", "RayJob")
    spec, cluster = ray_job["spec"], ray_job["spec"]["rayClusterSpec"]
    assert (
        cluster["rayVersion"] == ray.__version__
        and cluster["authOptions"] == {"mode": "token"}
        and spec["backoffLimit"] > 0
    )
    grace = int(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        assert pod["terminationGracePeriodSeconds"] >= grace
        (container,) = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_rays_object_store_fits_into_the_shared_memory_given(ray_job, monkeypatch):
    """By Ray's own sums, for the pods and for a large machine that runs the image; else it goes to the disk."""
    from ray._private import utils

    cluster = ray_job["spec"]["rayClusterSpec"]
    given = [(1024, int(size)) for size in re.findall(r"--shm-size=(\d+)g", (ROOT / "docs/launch.md").read_text())]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (shared,) = [volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if volume["name"] == "shared-memory"]
        memory = pod["containers"][0]["resources"]["limits"]["memory"]
        given.append((int(memory.removesuffix("Gi")), int(shared.removesuffix("Gi"))))
    assert len(given) == 3
    for memory, shared in given:
        monkeypatch.setattr(utils, "get_shared_memory_bytes", lambda size=shared: size * 2**30)
        assert utils.resolve_object_store_memory(memory * 2**30) <= shared * 2**30


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n", " ", (ROOT / "docker" / "Dockerfile").read_text())
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip() and not line.startswith("#")]


def test_the_images_are_staged_pinned_and_not_root():
    """Both targets are built elsewhere, take the runtime stage's user, and the versions of the Makefile and the
    lock."""
    found = instructions()
    stages = [arguments.split() for name, arguments in found if name == "FROM"]
    parents = {stage[2]: stage[0] for stage in stages}
    assert parents["cpu"] == parents["cuda"] == "runtime" and parents["build-cpu"] == parents["build-cuda"] == "build"
    assert parents["vllm"] == "cuda" and ("COPY", "--from=build-vllm /venv-vllm /venv-vllm") in found
    arguments = dict(argument.split("=", 1) for name, argument in found if name == "ARG")
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-bookworm(@sha256:[0-9a-f]{64})?", arguments["BASE"])
    assert f"TORCH ?= {arguments['TORCH']}\n" in (ROOT / "Makefile").read_text()
    assert f'VLLM="{arguments["VLLM"]}"' in (ROOT / "Makefile").read_text()
    users = [argument for name, argument in found if name == "USER"]
    assert users == ["1000"], "a number, which runAsNonRoot can check"
    runtime = found.index(("FROM", "base AS runtime"))
    assert found.index(("USER", "1000")) > runtime and not any(
        name == "RUN" for name, _ in found[found.index(("FROM", "runtime AS cpu")) :]
    )
    build = found.index(("FROM", "base AS build"))
    first_install = next(number for number, (_, words) in enumerate(found) if "uv pip install" in words)
    assert build < found.index(("ENV", "UV_COMPILE_BYTECODE=1")) < first_install, "uv by itself compiles nothing"
    assert ("COPY", "--from=build-cpu /venv /venv") in found and ("COPY", "--from=build-cuda /venv /venv") in found


def test_what_the_images_copy_is_there_and_is_all_the_package_needs():
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        word
        for name, words in instructions()
        if name == "COPY" and "--from" not in words
        for word in words.split()[:-1]
    ]
    assert set(copied) == set(allowed) and all((ROOT / path).exists() for path in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {
        project["project"]["readme"],
        *project["project"]["license-files"],
        *project["tool"]["setuptools"]["package-dir"].values(),
    }
    assert needed <= set(copied)

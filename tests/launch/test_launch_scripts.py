"""launch/local.sh and launch/slurm.sbatch with a real Ray node, a real training and a real SIGTERM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]

# One machine instead of an allocation: srun runs the command here, after its options; scontrol says the node's name and
# notes a requeue.
SRUN = """#!/usr/bin/env bash
while [[ ${1:-} == --* ]]; do shift; done
[ "$1" = ray ] || exec "$@"
exec "$@" --temp-dir="$SHORT_FOLDER/slurm" --object-store-memory=100000000 --num-cpus=4
"""
# A job server that gives one answer of a file at every question for a status, `-` for none.
RAY_JOB = """#!/usr/bin/env bash
[ "$2" = status ] || exit 0
read -r answer < answers && sed -i 1d answers && [ "$answer" != - ] && echo "Job 'mine' $answer"
"""
SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "mine", "SLURM_JOB_NODELIST": "localhost"}
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo localhost; else echo "$@" >> "$SHORT_FOLDER/requeued"; fi
"""


@pytest.fixture
def started():
    """Starts a script; at the end nothing that it started is left."""
    processes: list[subprocess.Popen] = []

    def start(command: list, environment: dict[str, str], cwd: Path) -> subprocess.Popen:
        output = (cwd / "output").open("w")
        processes.append(
            subprocess.Popen(command, env=environment, cwd=cwd, stdout=output, stderr=output, start_new_session=True)
        )
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def stand_ins(environment, tmp_path):
    """Writes commands and gives an environment that has them first."""

    def write(**commands: str) -> dict[str, str]:
        folder = tmp_path / "commands"
        folder.mkdir()
        for name, text in commands.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        return environment | {"PATH": f"{folder}:{environment['PATH']}"}

    return write


def test_a_token_is_made_once_with_mode_600_and_printed_nowhere(environment, tmp_path):
    path = tmp_path / "folder" / "token"
    command = ["bash", "-c", f"source {ROOT}/launch/token.sh; make_token; make_token; need_token"]
    mine = environment | {"RAY_AUTH_TOKEN_PATH": str(path), "HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=mine, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    token = path.read_text()
    assert len(token) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600 and not (tmp_path / "home").exists()
    subprocess.run(command, env=mine, check=True)
    assert path.read_text() == token


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--address"], "--address needs a value"),
        (["--config-dir"], "--config-dir needs a value"),
        (["--wait"], "there is no option --wait"),
        (["cluster.address=10.0.0.1:6379"], "a job runs on the cluster it is submitted to; give --address"),
        (["run.dir=~/runs"], "give an absolute path"),
        (["--grace", "soon"], "--grace must be whole seconds, got soon"),
        (["stop"], "launch/submit.sh stop ID"),
        (["--address", "http://127.0.0.1:1", "stop", "mine"], "stop comes first: launch/submit.sh stop ID"),
    ],
)
def test_wrong_use_of_submit_is_one_line(environment, arguments, said):
    without_token = environment | {"RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        [ROOT / "launch" / "submit.sh", *arguments], env=without_token, capture_output=True, text=True
    )
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ('Traceback:\n  raise\nKeyError: 1\n\nray.exceptions.AuthenticationError: no "$5"\n\nMore', 'no "$5"'),
        ("no space left on device", "no space left on device"),
    ],
    ids=["traceback", "line"],
)
def test_a_job_that_is_not_submitted_says_why_in_one_line(stand_ins, tmp_path, told, reason):
    (tmp_path / "told").write_text(told)
    mine = stand_ins(ray="#!/bin/sh\ncat told >&2; exit 1\n") | {"RAY_AUTH_MODE": "disabled"}
    command = [ROOT / "launch" / "submit.sh", "--id", "mine"]
    done = subprocess.run(command, env=mine, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: mine was not submitted to http://127.0.0.1:8265: ")
    assert done.stderr.endswith(f"{reason}\n") and len(done.stderr.splitlines()) == 1


def test_a_job_gets_the_projects_code_and_leaves_environments_and_keys(stand_ins, tmp_path):
    """As Ray packs the folder with what submit.sh tells it to leave out."""
    from ray._private.runtime_env.packaging import create_package

    code = {"env/game.py", "src/env/__init__.py", "src/build/model.py", "src/runs/table.py", "reward.py"}
    left = {"runs/a/log", "build/x.o", "conda/conda-meta/history", ".venv/pyvenv.cfg", ".venv/a.py"}
    left |= {"py/pyvenv.cfg", "src/key.pem", ".env", "src/__pycache__/a.pyc", ".mypy_cache/a"}
    for name in code | left:
        path = tmp_path / "project with code" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    mine = stand_ins(ray='#!/usr/bin/env bash\nprintf "%s\\n" "$@" > asked\n') | {"RAY_AUTH_MODE": "disabled"}
    command = [ROOT / "launch" / "submit.sh", "--no-follow", "--working-dir", "project with code"]
    subprocess.run(command, env=mine, cwd=tmp_path, check=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    excluded = json.loads(asked[asked.index("--runtime-env-json") + 1])["excludes"]
    create_package(str(tmp_path / "project with code"), tmp_path / "packed.zip", True, excludes=excluded)
    names = zipfile.ZipFile(tmp_path / "packed.zip").namelist()
    assert {name for name in names if not name.endswith("/")} == code


@pytest.mark.parametrize(
    ("answers", "code", "said"),
    [
        ("running - - running - succeeded", 0, "mine: SUCCEEDED"),
        ("running - stopped", 130, "mine: STOPPED"),
        ("running" + 12 * " -" + " succeeded", 2, "does not answer for mine, which may go on"),
        ("- running", 2, "does not know mine, or does not answer"),
    ],
    ids=["back", "back-stopped", "away", "unknown"],
)
def test_a_followed_job_outlives_a_broken_connection(stand_ins, tmp_path, answers, code, said):
    mine = stand_ins(ray=RAY_JOB, sleep="#!/bin/sh\n") | {"RAY_AUTH_MODE": "disabled"}
    (tmp_path / "answers").write_text(answers.replace(" ", "\n") + "\n")
    command = [ROOT / "launch" / "submit.sh", "follow", "mine"]
    done = subprocess.run(command, env=mine, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code and said in done.stdout + done.stderr
    assert len((done.stdout + done.stderr).splitlines()) == 1


@pytest.mark.parametrize("name", ["PORT", "DASHBOARD_PORT"])
def test_local_joins_no_cluster_that_is_there(stand_ins, free_ports, tmp_path, name):
    """The stand-in for ray is slow to fail, and `ray status` hears the other cluster."""
    mine = stand_ins(ray='#!/bin/sh\n[ "$1" != start ] || { sleep 3; exit 1; }\n', python="#!/bin/sh\necho 1\n")
    mine |= dict(zip(("PORT", "DASHBOARD_PORT"), map(str, free_ports(2)), strict=True))
    mine |= {"PYTHON": "python", "RAY_AUTH_MODE": "disabled"}
    with socket.create_server(("127.0.0.1", 0)) as other:
        mine[name] = str(other.getsockname()[1])
        done = subprocess.run([ROOT / "launch" / "local.sh"], env=mine, cwd=tmp_path, capture_output=True, text=True)
    said = f"error: {name}={mine[name]} is taken, perhaps by another cluster: set {name} to a free port\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_slurm_makes_no_folder_called_tilde(stand_ins, tmp_path):
    mine = stand_ins(ray="#!/bin/sh\n") | SLURM | {"SLURM_SUBMIT_DIR": str(tmp_path), "PYTHON": "bash"}
    command = [ROOT / "launch" / "slurm.sbatch", 'run.dir="~/runs"']
    done = subprocess.run(command, env=mine, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (2, "error: run.dir=~/runs: give an absolute path\n")
    assert not (tmp_path / "~").exists()


def test_slurm_does_not_wait_for_a_head_node_that_has_ended(stand_ins, tmp_path):
    mine = stand_ins(ray='#!/bin/sh\n[ "$1" = get-auth-token ]\n', srun=SRUN, scontrol=SCONTROL) | SLURM
    mine |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SHORT_FOLDER": "/tmp", "PYTHON": "bash"}
    command = [ROOT / "launch" / "slurm.sbatch"]
    done = subprocess.run(command, env=mine, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (1, "error: the head node on localhost did not start\n")


@pytest.mark.parametrize("script", ["local.sh", "slurm.sbatch"])
def test_a_signal_after_the_run_leaves_its_exit_code(stand_ins, free_ports, tmp_path, script):
    """As a second Ctrl-C; the stand-in for a node sends it when it is told to end."""
    ray = "#!/bin/sh\n[ $1 = start ] || exit 0\ntrap 'kill -TERM $PPID $!; sleep 1; exit' TERM\nsleep 60 & wait\n"
    mine = stand_ins(ray=ray, python="#!/bin/sh\necho 1\n", srun=SRUN, scontrol=SCONTROL) | SLURM
    mine |= dict(zip(("PORT", "DASHBOARD_PORT"), map(str, free_ports(2)), strict=True))
    mine |= {"PYTHON": "python", "RAY_AUTH_MODE": "disabled", "SLURM_SUBMIT_DIR": str(tmp_path), "SHORT_FOLDER": "/tmp"}
    (tmp_path / "scratch").mkdir()
    mine["TMPDIR"] = str(tmp_path / "scratch")
    done = subprocess.run([ROOT / "launch" / script], env=mine, cwd=tmp_path, stdout=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 0 and not list((tmp_path / "scratch").iterdir())


@pytest.mark.slow
def test_local_trains_passes_signals_on_ends_its_cluster_and_goes_on(
    environment, settings, free_ports, short_folder, tmp_path, wait_for, started
):
    port, dashboard = free_ports(2)
    mine = environment | {"PORT": str(port), "DASHBOARD_PORT": str(dashboard), "RAY_TMPDIR": str(short_folder)}
    command = [ROOT / "launch" / "local.sh", *settings, "run.steps=400", "run.keep_checkpoints=400", "run.dir=mine"]
    run = started(command, mine, tmp_path)
    wait_for(tmp_path / "mine" / "checkpoints" / "step_000002", "second checkpoint")
    run.send_signal(signal.SIGTERM)
    assert run.wait(120) == 0  # with what is finished saved
    assert f"dashboard: http://127.0.0.1:{dashboard}" in (tmp_path / "output").read_text()
    left = subprocess.run(
        ["ray", "status", "--address", f"127.0.0.1:{port}"], env=mine, capture_output=True, timeout=60
    )
    assert left.returncode != 0
    kept = sorted((tmp_path / "mine" / "checkpoints").glob("step_*"))
    run = started(command, mine, tmp_path)
    wait_for(kept[-1].with_name(f"step_{int(kept[-1].name[5:]) + 1:06d}"), "checkpoint of the next step")
    run.send_signal(signal.SIGINT)
    assert run.wait(120) == 0
    assert "going on after step" in (tmp_path / "output").read_text()


@pytest.mark.parametrize(
    ("commands", "code", "said"),
    [
        ({}, 2, "no interpreter python on "),
        ({"python": "#!/bin/sh\n"}, 2, "no ray on the PATH or beside python: activate the environment before sbatch"),
        ({"python": "#!/bin/sh\n", "ray": "#!/bin/sh\necho the disk is full >&2; exit 1\n"}, 1, "the disk is full"),
    ],
    ids=["no-python", "no-ray", "no-token"],
)
def test_slurm_says_why_it_ends_and_leaves_no_token(stand_ins, tmp_path, commands, code, said):
    """On a path with nothing of an environment but the commands given."""
    for name in ("bash", "env", "sh", "dirname", "hostname", "mkdir", "mktemp", "rm", "cat"):
        (tmp_path / name).symlink_to(shutil.which(name))
    mine = stand_ins(**commands) | SLURM | {"SLURM_SUBMIT_DIR": str(tmp_path), "PYTHON": "python"}
    mine["PATH"] = f"{tmp_path / 'commands'}:{tmp_path}"
    done = subprocess.run([ROOT / "launch" / "slurm.sbatch"], env=mine, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code and said in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("runs/*/.ray_token_*"))


@pytest.mark.slow
def test_slurm_passes_the_signal_on_and_requeues(
    stand_ins, settings, free_ports, short_folder, tmp_path, wait_for, started
):
    (port,) = free_ports(1)
    mine = stand_ins(srun=SRUN, scontrol=SCONTROL) | SLURM | {"SLURM_SUBMIT_DIR": str(tmp_path)}
    mine |= {"SHORT_FOLDER": str(short_folder), "PORT": str(port)}
    del mine["RAY_AUTH_TOKEN_PATH"]
    run_dir = tmp_path / "runs" / "chosen"
    job = started([ROOT / "launch" / "slurm.sbatch", *settings, "run.dir=runs/chosen", "run.steps=400"], mine, tmp_path)
    wait_for(run_dir / "checkpoints" / "step_000002", "second checkpoint")
    token = run_dir / ".ray_token_17"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and token.read_text() not in (tmp_path / "output").read_text()
    job.send_signal(signal.SIGTERM)
    assert job.wait(180) == 0
    assert (short_folder / "requeued").read_text() == "requeue 17\n" and not token.exists()
    # As the requeued job is: the same command again.
    job = started([ROOT / "launch" / "slurm.sbatch", *settings, "run.dir=runs/chosen", "run.steps=4"], mine, tmp_path)
    job.wait(300)
    assert "going on after step" in (tmp_path / "output").read_text()

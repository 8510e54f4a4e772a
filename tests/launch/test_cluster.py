"""launch/submit.sh on two real Ray nodes with a token: submit, follow, stop with grace, resubmit."""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def submit(two_nodes, environment, tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [ROOT / "launch" / "submit.sh", "--address", two_nodes, *arguments]
        if arguments[0] in ("follow", "status", "stop"):
            command = [ROOT / "launch" / "submit.sh", *arguments, "--address", two_nodes]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)

    return run


def steps(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_job_is_stopped_with_grace_and_the_same_command_goes_on(submit, settings, tmp_path, wait_for):
    """run.dir is relative to where the user stands; the second job ends, and together they did every step once."""
    run_dir = tmp_path / "runs" / "mine"
    command = [*settings, "run.steps=400", "run.dir=runs/mine", "run.deterministic=true"]
    submitted = submit("--id", "first", "--no-follow", *command)
    assert submitted.returncode == 0 and f"run.dir={run_dir}" in submitted.stdout, submitted.stderr
    wait_for(run_dir / "checkpoints" / "step_000002", "second checkpoint")
    assert submit("status", "first").stdout == "RUNNING\n"
    stopped = submit("stop", "first")
    assert stopped.returncode == 0 and re.search(r"first: (STOPPED|SUCCEEDED)", stopped.stdout), (
        stopped.stdout + stopped.stderr
    )
    kept = sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))
    assert kept and not list((run_dir / "checkpoints").glob(".partial_*"))  # the last checkpoint is whole
    last = int(kept[-1].removeprefix("step_"))
    command[-3] = f"run.steps={last + 2}"
    again = submit("--id", "second", *command)
    assert again.returncode == 0 and "second: SUCCEEDED" in again.stdout, again.stdout[-3000:] + again.stderr
    assert f"going on after step {last}" in again.stdout  # followed: what the run says is seen here
    assert steps(run_dir) == list(range(1, last + 3))


def test_ctrl_c_while_following_stops_the_job(two_nodes, environment, settings, tmp_path, wait_for):
    command = [
        ROOT / "launch" / "submit.sh",
        "--address",
        two_nodes,
        "--id",
        "third",
        *settings,
        "run.steps=400",
        "run.dir=third",
    ]
    following = subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(tmp_path / "third" / "checkpoints" / "step_000001", "checkpoint")
    following.send_signal(signal.SIGINT)
    output, _ = following.communicate(timeout=240)
    assert (
        following.returncode == 130 and "stopping third" in output and re.search(r"third: (STOPPED|SUCCEEDED)", output)
    ), output[-3000:]
    assert (tmp_path / "third" / "checkpoints" / "step_000001").is_dir() or len(
        list((tmp_path / "third" / "checkpoints").glob("step_*"))
    ) > 0


def test_a_job_that_fails_ends_with_1_and_its_reason(submit, settings):
    failed = submit("--id", "fourth", *settings, "run.steps=0")
    assert (
        failed.returncode == 1
        and "run.steps must be >= 1, got 0" in failed.stdout
        and "fourth: FAILED" in failed.stdout
    )
    assert submit("follow", "fourth").returncode == 1


def test_without_the_token_nobody_gets_in_and_it_is_shown_nowhere(two_nodes, submit, environment, short_folder):
    token_file = Path(environment["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600 and stat.S_IMODE(token_file.parent.stat().st_mode) == 0o700
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{two_nodes}/api/jobs/")
    token = token_file.read_text()
    with_token = urllib.request.Request(f"{two_nodes}/api/jobs/", headers={"Authorization": f"Bearer {token}"})
    jobs = urllib.request.urlopen(with_token).read().decode()
    assert "first" in jobs and token not in jobs  # neither in a runtime environment nor in an entry point
    shown = [
        path
        for path in short_folder.rglob("*")
        if path.is_file() and path != token_file and token.encode() in path.read_bytes()
    ]
    assert shown == []
    elsewhere = environment | {"RAY_AUTH_TOKEN_PATH": "/no/token"}
    absent = subprocess.run([ROOT / "launch" / "submit.sh", "status", "first"], env=elsewhere, capture_output=True)
    assert absent.returncode == 2 and b"no token in /no/token" in absent.stderr

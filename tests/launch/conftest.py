"""Real Ray nodes on this machine, with a token; a training small enough for them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.waiting import end, wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def free_ports():
    """Ports nobody listens on now."""
    return _free_ports


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


@pytest.fixture(scope="module")
def settings(tiny_run) -> list[str]:
    """A run of seconds in two rollout workers and one learner rank."""
    return [*tiny_run, "data.prompts_per_step=2", "run.checkpoint_every=1", "cluster.rollout_workers=2"]


@pytest.fixture(scope="module")
def short_folder():
    """A folder with a short path: Ray's sockets below it allow 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="l"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def environment(short_folder) -> dict[str, str]:
    """What the scripts run in: this interpreter's commands first, a token file of our own, no address from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "WANDB_"))}
    return kept | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(short_folder / "secret" / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_agent_register_timeout_ms": "120000",
        "PYTHON": sys.executable,
    }


@pytest.fixture(scope="module")
def two_nodes(environment, short_folder):
    """Address of the job server of two Ray nodes on this machine, each with a folder of its own."""
    subprocess.run(["bash", "-c", f"source {ROOT}/launch/token.sh; make_token"], env=environment, check=True)
    port, dashboard = _free_ports(2)
    common = [
        "--block",
        "--include-log-monitor=false",
        "--object-store-memory=100000000",
        "--num-cpus=4",
        "--disable-usage-stats",
    ]
    head = [
        "--head",
        f"--port={port}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}",
        f"--temp-dir={short_folder}/a",
    ]
    second = [f"--address=127.0.0.1:{port}", f"--temp-dir={short_folder}/b", '--resources={"second": 1}']
    nodes = []
    try:
        for index, arguments in enumerate((head, second)):
            workers = [
                f"--min-worker-port={30000 + 1000 * index}",
                f"--max-worker-port={30999 + 1000 * index}",
                *agent_ports(),
            ]
            with (short_folder / f"node{index}.log").open("w") as log:
                command = ["ray", "start", *arguments, *common, *workers]
                nodes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
            wait_for_node(nodes[-1], environment, port, index + 1, short_folder)
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        for node in reversed(nodes):
            end(node)


def agent_ports() -> list[str]:
    """Ports of a node's agents. Without them the raylet waits for what they chose, and on a busy machine gives up."""
    names = (
        "metrics-export-port",
        "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port",
        "runtime-env-agent-port",
    )
    return [f"--{name}={port}" for name, port in zip(names, _free_ports(len(names)), strict=True)]


def wait_for_node(node: subprocess.Popen, environment: dict[str, str], port: int, count: int, folder: Path) -> None:
    """Until `count` nodes are there."""
    said = ""
    for _ in range(120):
        if node.poll() is not None:
            break
        done = subprocess.run(
            ["ray", "status", "--address", f"127.0.0.1:{port}"], env=environment, capture_output=True, text=True
        )
        if done.returncode == 0 and done.stdout.partition("Pending:")[0].count("1 node_") >= count:
            return
        said = done.stdout + done.stderr
        time.sleep(1)
    raise AssertionError(said[-1000:] + (folder / f"node{count - 1}.log").read_text()[-3000:])


@pytest.fixture(scope="session")
def wait_for():
    """Waits until a path is there."""

    def wait(path: Path, what: str, seconds: float = 240) -> None:
        wait_until(path.exists, seconds, f"there is no {what}")

    return wait

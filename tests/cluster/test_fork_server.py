"""A script that Ray starts runs in a fork of a process that has torch already, or by itself where that cannot be."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infsample_rl.cluster import fork_server
from infsample_rl.cluster.fork_server import ForkServer
from tests.waiting import wait_until

SCRIPT = """
import json, os, sys
said = {"arguments": sys.argv[1:], "is_main": __name__, "first_path": sys.path[0], "folder": os.getcwd()}
said |= {"has_torch": "torch" in sys.modules, "asked_for": os.environ.get("ASKED_FOR"), "parent": os.getppid()}
said |= {"niceness": os.nice(0), "oom_score": int(open("/proc/self/oom_score_adj").read())}
said |= {"leads_its_group": os.getpgid(0) == os.getpid(), "from_imports": "TORCHINDUCTOR_CACHE_DIR" in os.environ}
print(json.dumps(said), flush=True)
print("and on stderr", file=sys.stderr, flush=True)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def environment():
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def server(environment):
    return ForkServer(environment)


@pytest.fixture
def run_script(tmp_path, environment):
    """What a script says of itself that is started as Ray starts workers; `variables`: beside those of the server."""
    script = tmp_path / "worker script.py"
    script.write_text(SCRIPT)

    def run(server, **variables):
        with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
            command = [*shlex.split(server.py_executable), str(script), "--a", "b c"]
            env = environment | {"ASKED_FOR": "this"} | variables
            shell = ["sh", "-c", 'echo 700 > /proc/self/oom_score_adj; exec nice -n 12 "$@"', "sh", *command]
            code = subprocess.run(shell, env=env, cwd=tmp_path, stdout=out, stderr=err, timeout=120).returncode
            wait_until(lambda: "and on stderr" in (tmp_path / "err").read_text())
        return json.loads((tmp_path / "out").read_text()) | {"code": code}

    return run


def test_a_script_runs_in_a_fork_as_if_it_had_been_started(server, run_script, tmp_path):
    for _ in range(2):
        said = run_script(server)
        assert said == {
            "arguments": ["--a", "b c"],
            "is_main": "__main__",
            "first_path": str(tmp_path),
            "folder": str(tmp_path),
            "has_torch": True,
            "asked_for": "this",
            "parent": server._process.pid,
            "niceness": min(os.nice(0) + 12, 19),
            "oom_score": 700,
            "leads_its_group": True,
            "from_imports": True,
            "code": 0,  # of who asked; the script's is nobody's: Ray looks at the process itself
        }


def test_a_script_with_another_allocator_is_started_by_itself(server, run_script):
    said = run_script(server, MALLOC_CONF="narenas:1")
    assert not said["has_torch"] and said["code"] == 7


def test_a_script_is_started_by_itself_once_the_server_is_dead(environment, run_script):
    server = ForkServer(environment)
    server._process.kill()
    server._process.wait()
    said = run_script(server)
    assert not said["has_torch"] and said["arguments"] == ["--a", "b c"] and said["code"] == 7


def test_the_server_ends_with_its_driver_however_that_ends(environment):
    code = (
        "import os, time\nfrom infsample_rl.cluster.fork_server import ForkServer\n"
        "print(ForkServer(dict(os.environ))._process.pid, flush=True)\ntime.sleep(60)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    pid = int(driver.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    driver.kill()
    driver.wait()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())  # it looks once its imports are done


def _asker(text=b"", files=(0, 1, 2)):
    """The server's end of a connection on which this was sent."""
    ours, theirs = socket.socketpair()
    with ours:
        socket.send_fds(ours, [b"\0"], files)
        ours.sendall(text)
    return theirs


REQUEST = {"arguments": ["x.py"], "environment": {}, "folder": "/"}


def test_other_users_and_broken_requests_get_no_fork(monkeypatch):
    for name in fork_server.AT_START:
        monkeypatch.delenv(name, raising=False)
    whole = json.dumps(REQUEST).encode()
    found = fork_server._read(_asker(whole))
    assert found is not None and found["arguments"] == ["x.py"] and len(found["files"]) == 3
    for file in found["files"]:
        os.close(file)
    before = len(os.listdir("/proc/self/fd"))
    for asker in (_asker(whole[:20]), _asker(b"\xff"), _asker(b"[]"), _asker(b"{}"), _asker(whole, files=(0, 1))):
        with asker:
            assert fork_server._read(asker) is None
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with _asker(whole) as asker:
        assert fork_server._read(asker) is None
    assert len(os.listdir("/proc/self/fd")) == before, "streams that were sent are closed again"


def test_broken_requests_do_not_end_the_server(server, run_script):
    name = shlex.split(server.py_executable)[-1]
    for text in (b"", b"no json", b"{}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
            asker.connect(f"\0{name}")
            asker.sendall(text)
    assert run_script(server)["has_torch"]

"""What a reward function cannot do: outlive its call, fill memory, disk or logs, find a key, reach the network or other
files."""

import os
import pickle
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from infsample_rl.config import RewardConfig, RewardFunctionConfig
from infsample_rl.reward import process_pool
from infsample_rl.reward.linux_sandbox import SANDBOX_VERSION, landlock_version
from infsample_rl.reward.process_pool import ProcessPool
from tests.waiting import has_ended, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what holds a reward process is Linux's")
needs_sandbox = pytest.mark.skipif(
    landlock_version() < SANDBOX_VERSION, reason="this kernel cannot hold reward.isolation=sandbox"
)

ROOT = Path(__file__).parents[2]
PROMPT = pickle.dumps({"row": 1, "messages": [], "text": "", "columns": {"answer": "3"}})
KEY = "sk-planted-1f0c6a"
USER_FILE = '''
import glob, os, signal, socket, subprocess, sys, threading, time
import beside

DAEMON = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
for _ in range(int(sys.argv[2])):
    if os.fork() == 0:
        os.setsid()                      # out of the group and the session
        if os.fork() > 0: os._exit(0)    # and an orphan
        open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
        time.sleep(600)
"""

def two_hundred(completions, folder):
    subprocess.Popen([sys.executable, "-c", DAEMON, folder, "200"]).wait()
    while len(os.listdir(folder)) < 200:
        time.sleep(0.01)
    if completions[0] == "hang":
        time.sleep(600)
    if completions[0] == "die":
        os._exit(3)
    return [1.0]

def look_for(completions):
    """How often the key is found in an environment: the function's own, or one of any process."""
    places = [str(dict(os.environ)).encode()]
    for path in glob.glob("/proc/*/environ"):
        try:
            places.append(open(path, "rb").read())
        except OSError:
            pass
    return [float(sum(completions[0].encode() in place for place in places))]

def to_replies(text, repeat=False):
    for number in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith("pipe:"):
                os.write(number, text)
                while repeat:
                    os.write(number, text)
        except OSError:
            pass

def give(completions):
    return [os.environ["JUDGE_API_KEY"]]

def do(completions):
    """Runs the statement that the response is."""
    exec(completions[0], globals())
    return [1.0]
'''


@pytest.fixture(scope="module")
def rewards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("isolated") / "functions"
    folder.mkdir()
    (folder / "rewards.py").write_text(USER_FILE)
    (folder / "beside.py").write_text("")
    (folder / "words.txt").write_text("read me")
    return folder / "rewards.py"


@pytest.fixture
def open_pool(rewards, monkeypatch, closing):
    monkeypatch.setattr(process_pool, "RETRIES", 0)

    def start(name: str, kwargs: dict | None = None, **settings) -> ProcessPool:
        functions = [RewardFunctionConfig(name=f"{rewards}:{name}", kwargs=kwargs or {})]
        return closing(ProcessPool(RewardConfig(functions=functions, **({"timeout_s": 30.0} | settings)), functions))

    return start


def call(pool: ProcessPool, response: str = "") -> tuple[float | None, str]:
    (result,) = pool.submit(0, PROMPT, [[{"text": response, "token_ids": []}]]).result(timeout=120)
    return result.values[0], result.problems[0]


def wait_until_ended(folder: Path) -> None:
    """For the processes that left their id in `folder`."""
    wait_until(lambda: all(has_ended(int(pid.name)) for pid in folder.iterdir()), 5, "some did not end")


@pytest.mark.parametrize(
    ("how", "isolation", "expected"),
    [
        pytest.param("hang", "limits", (None, "timed out after 8 s"), marks=pytest.mark.slow),
        ("die", "limits", (None, "its process died (exit code 3)")),
        ("return", "none", (1.0, "")),
    ],
)
def test_two_hundred_daemons_that_ignore_sigterm_end_with_their_function_process(
    open_pool, tmp_path, how, isolation, expected
):
    timeout_s = 8.0 if how == "hang" else 20.0
    pool = open_pool("two_hundred", {"folder": str(tmp_path)}, timeout_s=timeout_s, isolation=isolation)
    assert call(pool, how) == expected
    pool.close()
    assert len(list(tmp_path.iterdir())) == 200
    wait_until_ended(tmp_path)


@pytest.mark.parametrize("killed", ["the worker's child", "the keeper"])
def test_daemons_end_where_the_keeper_or_its_stand_in_is_killed(open_pool, tmp_path, killed):
    pool = open_pool("two_hundred", {"folder": str(tmp_path)})
    assert call(pool) == (1.0, "")
    [process] = pool._running
    (psutil.Process(process.pid).parent() if killed == "the keeper" else process._keeper).kill()
    wait_until_ended(tmp_path)


def test_a_flood_of_output_is_cut_and_said_and_the_reward_counts(open_pool, capfd):
    pool = open_pool("do")
    flood = "for _ in range(100): os.write(1, b'x' * 100_000); os.write(2, b'y' * 100_000)"
    assert call(pool, flood) == (1.0, "")
    pool.close()
    said = capfd.readouterr().err
    assert len(said) < 70_000 and "bytes that a reward function printed are left out" in said  # of 20 MB


@pytest.mark.parametrize(
    "reply",
    [
        "b'z' * 100_000, repeat=True",
        """b'{"values": 1}\\n'""",
        """b'{"values": [1, 2], "problems": ["", ""], "reported": {}}\\n'""",
        """b'{"values": [NaN], "problems": [""], "reported": {}}\\n'""",
        """b'{"values": ["x"], "problems": [""], "reported": {}}\\n'""",
        "b'[]\\n'",
        "b'x\\n'",
    ],
)
def test_a_reply_that_is_none_costs_its_process_not_the_worker(open_pool, reply):
    problem = "its process died (the function wrote into the pipe of the replies)"
    assert call(open_pool("do"), f"to_replies({reply}); time.sleep(600)") == (None, problem)


SWALLOW = "held = bytearray(b'1' * 150_000_000); time.sleep(600)"
SWALLOW_IN_CHILDREN = (
    f"for child in [subprocess.Popen([sys.executable, '-c', {'import time; ' + SWALLOW!r}]) for _ in range(4)]: "
    "child.wait()"
)
BIG_FILE = "file = open('{}/big', 'wb')\nfor _ in range(600): file.write(bytes(1_000_000))"


@pytest.mark.parametrize(
    ("statement", "limit", "said"),
    [
        ("bytearray(3 * 10**9)", "1GB", "raised MemoryError.*; reward.memory_limit=1GB$"),
        (SWALLOW_IN_CHILDREN, "400MB", "GB in .* above reward.memory_limit=400MB"),
        (BIG_FILE, "300MB", "; no file may be larger than reward.memory_limit=300MB$"),
    ],
)
def test_memory_and_files_beyond_the_limit_are_refused_and_the_setting_named(
    open_pool, tmp_path, statement, limit, said
):
    value, problem = call(open_pool("do", memory_limit=limit), statement.format(tmp_path))
    assert value is None and re.search(said, problem)
    assert all(path.stat().st_size <= 300 * 10**6 for path in tmp_path.iterdir())


@pytest.mark.parametrize("isolation", ["limits", pytest.param("sandbox", marks=needs_sandbox)])
def test_no_environment_that_a_function_can_read_holds_a_key(open_pool, monkeypatch, isolation):
    """Not its own, not that of the worker above it, not that of any process of the user."""
    neighbour = subprocess.Popen(["sleep", "600"], env=os.environ | {"WANDB_API_KEY": KEY})
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    try:
        pool = open_pool("look_for", isolation=isolation)
        if landlock_version() >= 2:
            assert call(pool, KEY) == (0.0, "")
        assert call(open_pool("look_for", isolation="none"), KEY)[0] > 0  # the search itself finds what is there
    finally:
        neighbour.kill()
        neighbour.wait()


@pytest.mark.skipif(landlock_version() < 6, reason="this kernel cannot keep signals in")
def test_a_function_cannot_signal_processes_above_it(open_pool):
    value, problem = call(open_pool("do"), f"os.kill({os.getpid()}, signal.SIGTERM)")
    assert value is None and "PermissionError" in problem
    value, problem = call(open_pool("do"), "os.kill(os.getppid(), signal.SIGTERM)")
    assert value is None and "PermissionError" in problem


@needs_sandbox
@pytest.mark.parametrize(
    "statement",
    [
        "socket.create_connection(('127.0.0.1', {port}))",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "socket.socket(socket.AF_INET6)",
        "socket.socket(socket.AF_UNIX)",
        "subprocess.run([sys.executable, '-c', 'import socket; socket.socket()'], check=True)",
        "open('{folder}/secret').read()",
        "os.listdir('{folder}')",
        "open('{folder}/new', 'w')",
        "os.truncate('{folder}/secret', 0)",
        "os.unlink('{folder}/secret')",
        "os.symlink('/etc', '{folder}/link')",
        "open('/proc/1/environ').read()",
        "open(beside.__file__, 'a')",
    ],
)
def test_a_sandbox_has_no_network_and_no_other_files(open_pool, tmp_path, statement):
    (tmp_path / "secret").write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        value, problem = call(
            open_pool("do", isolation="sandbox"), statement.format(port=server.getsockname()[1], folder=tmp_path)
        )
    assert value is None
    assert (
        "reward.isolation=sandbox has no network, and only the files of" in problem or "CalledProcessError" in problem
    )
    assert [path.name for path in tmp_path.iterdir()] == ["secret"] and (tmp_path / "secret").read_text() == "x"


@needs_sandbox
def test_a_sandbox_has_what_a_function_needs(open_pool, tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "file").write_text("x")
    statement = f"""
import asyncio, tempfile
assert open(os.path.join(os.path.dirname(beside.__file__), "words.txt")).read() == "read me"
assert open("{tmp_path}/given/file").read() == "x"
with tempfile.TemporaryDirectory() as own:
    open(own + "/program.py", "w").write("print(6 * 7)")
    assert subprocess.run([sys.executable, own + "/program.py"], capture_output=True, check=True).stdout == b"42\\n"
home = os.path.expanduser("~"); open(home + "/cache", "w").close()
asyncio.run(asyncio.sleep(0))
import numpy, math_verify
raise RuntimeError(f"all done in {{home}}")
"""
    pool = open_pool("do", isolation="sandbox", read_paths=[str(tmp_path / "given")])
    value, problem = call(pool, statement)
    assert value is None and "all done in " in problem, problem
    home = Path(problem.rpartition("all done in ")[2].split()[0])
    assert home.exists() and home.name.startswith("infsample_rl_reward_")
    pool.close()
    assert not home.exists()  # it goes with its process


WITHOUT_LANDLOCK = """
import sys
from infsample_rl.reward import linux_sandbox
machine = linux_sandbox.platform.machine()
linux_sandbox._MACHINES[machine][1].clear()
linux_sandbox._MACHINES[machine][1]["landlock_create_ruleset"] = 444
linux_sandbox.prctl(linux_sandbox._NO_NEW_PRIVILEGES, 1)
linux_sandbox._forbid_calls(machine)
from infsample_rl.config import RewardConfig, RewardFunctionConfig
from infsample_rl.reward.checks import check_reward_functions
check_reward_functions(RewardConfig(functions=[RewardFunctionConfig(name="gsm8k")], isolation=sys.argv[1]))
"""


@needs_sandbox
@pytest.mark.parametrize(
    ("isolation", "said"), [("limits", ""), ("sandbox", "needs Landlock version 3 (Linux 6.2 or newer")]
)
def test_where_the_system_has_no_landlock_the_sandbox_is_refused_by_name(isolation, said):
    """The call is forbidden to a real process, as a container's profile may do."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LANDLOCK, isolation], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert (done.returncode == 0) == (not said), done.stderr
    assert said in done.stderr and ("reward.isolation=limits asks for less" in done.stderr) == bool(said)


@needs_sandbox
def test_a_function_that_stands_in_the_home_folder_is_not_given_the_home_folder(rewards, monkeypatch):
    monkeypatch.setenv("HOME", str(rewards.parent))
    functions = [RewardFunctionConfig(name=f"{rewards}:do")]
    with pytest.raises(ValueError, match="holds your home; move the file into a folder"):
        ProcessPool(RewardConfig(functions=functions, isolation="sandbox"), functions)


TELLS = {
    "printed and raised": "k = os.environ['JUDGE_API_KEY']; print('the key is', k, flush=True); raise ValueError(k)",
    "returned": "'key = 1'; return_value = os.environ['JUDGE_API_KEY']",
    "quoted": "raise ValueError('Invalid header value %r' % ('Bearer ' + os.environ['JUDGE_API_KEY']).encode())",
    "cut": "raise ValueError('x' * 285 + ' ' + os.environ['JUDGE_API_KEY'])",
    "printed at the end of the share": "print('x' * (65530 - 4) + os.environ['JUDGE_API_KEY'].strip(), flush=True)",
    "printed in two": "k = os.environ['JUDGE_API_KEY'].strip(); os.write(1, k[:9].encode()); time.sleep(0.5); "
    "os.write(1, k[9:].encode())",
}


@pytest.mark.parametrize("how", TELLS)
def test_no_part_of_a_key_is_seen_however_a_function_tells_it(open_pool, monkeypatch, capfd, how):
    monkeypatch.setenv("JUDGE_API_KEY", KEY + "\n")  # as a file that ends in a newline gives it
    pool = open_pool("give" if how == "returned" else "do", environment=["JUDGE_API_KEY"])
    _, problem = call(pool, TELLS[how])
    pool.close()
    seen = problem + capfd.readouterr().err
    assert KEY[:8] not in seen and KEY[-6:] not in seen, seen[-400:]
    assert "<JUDGE_API_KEY" in seen or how == "printed at the end of the share"


def test_a_key_in_what_a_users_file_raises_at_import_is_not_seen(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import os\nraise RuntimeError('x' * 285 + os.environ['JUDGE_API_KEY'])\n")
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    functions = [RewardFunctionConfig(name=f"{tmp_path}/mine.py:f")]
    with pytest.raises(ValueError, match="cannot be imported: RuntimeError: xxx") as error:
        ProcessPool(RewardConfig(functions=functions, environment=["JUDGE_API_KEY"]), functions)
    assert KEY[:8] not in str(error.value) and "<JUDGE_API_KEY" in str(error.value)


def test_what_calls_leave_running_is_bounded(open_pool, monkeypatch):
    pool = open_pool("do", memory_limit="64GB")
    leave = "[subprocess.Popen(['sleep', '600'], start_new_session=True) for _ in range(350)]"
    assert [call(pool, leave)[0] for _ in range(2)] == [1.0, 1.0]
    value, problem = call(pool, leave + "; time.sleep(20)")
    assert value is None and "processes, what earlier calls left among them; at most 1,000 may run at a time" in problem


@pytest.mark.parametrize("size", [0, 500_000])
def test_a_process_that_an_earlier_call_stopped_costs_itself(open_pool, monkeypatch, size):
    monkeypatch.setattr(process_pool, "_READ_LIMIT_S", 2.0)
    pool = open_pool("do", timeout_s=5.0)
    monkeypatch.setattr(process_pool, "RETRIES", 1)
    stop = "threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()"
    assert call(pool, stop) == (1.0, "")
    time.sleep(0.5)
    began = time.monotonic()
    call(pool, "#" * size)
    assert call(pool, "pass") == (1.0, "") and time.monotonic() - began < 30

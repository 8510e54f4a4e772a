"""Function processes: what hangs is killed at its limit, what dies is tried again, nothing is left behind."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infsample_rl.config import RewardConfig, RewardFunctionConfig
from infsample_rl.reward import process_pool
from infsample_rl.reward.process_pool import FunctionProcess, ProcessPool

PROMPT = pickle.dumps({"row": 1, "messages": [], "text": "1 + 2 = ?", "columns": {"answer": "3"}})
ROOT = Path(__file__).parents[2]


def open_pool(user_file, folder, **settings) -> ProcessPool:
    functions = [
        RewardFunctionConfig(name=f"{user_file}:acts", kwargs={"folder": str(folder)}),
        RewardFunctionConfig(name="gsm8k"),
    ]
    reward = RewardConfig(functions=functions, **{"timeout_s": 0.5, **settings})
    return ProcessPool(reward, functions)


def score(pool, responses, function=0):
    results = pool.submit(function, PROMPT, [[{"text": text, "token_ids": []}] for text in responses]).result(
        timeout=30
    )
    return [result.values[0] for result in results], [result.problems[0] for result in results]


def gone(pid: int) -> bool:
    """Whether a process ends within five seconds (a zombie has ended)."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("hang", ["hang", "hang in C"])
def test_a_hanging_call_is_killed_at_its_limit_and_the_others_are_scored(user_file, tmp_path, hang):
    pool = open_pool(user_file, tmp_path)
    started = time.monotonic()
    values, problems = score(pool, ["ab", hang, "abc"])
    taken = time.monotonic() - started
    assert values == [2.0, None, 3.0]
    assert problems == ["", "timed out after 0.5 s", ""]
    assert 0.5 <= taken < 5  # the limit, and the start of a new process
    assert (pool.num_calls, pool.num_timeouts, pool.num_deaths) == (3, 1, 0)
    pool.close()


def test_a_kill_reaches_what_the_function_started(user_file, tmp_path):
    pool = open_pool(user_file, tmp_path)
    assert score(pool, ["hang with a child"])[0] == [None]
    assert gone(int((tmp_path / "child").read_text()))
    pool.close()


@pytest.mark.parametrize(("act", "how"), [("exit", "exit code 3"), ("segfault", "killed by SIGSEGV")])
def test_a_dying_call_is_tried_again_then_none(user_file, tmp_path, act, how):
    pool = open_pool(user_file, tmp_path)
    values, problems = score(pool, ["ab", act, "abc"])
    assert values == [2.0, None, 3.0]
    assert problems == ["", f"its process died ({how}) in each of 2 tries", ""]
    assert (pool.num_calls, pool.num_timeouts, pool.num_deaths) == (3, 0, 2)
    pool.close()


@pytest.mark.parametrize(
    ("act", "problem"), [("write x\n", "wrote into the pipe of the replies"), ("write x", "timed out after 0.5 s")]
)
def test_bytes_in_the_reply_pipe_cannot_hold_the_parent(user_file, tmp_path, monkeypatch, act, problem):
    monkeypatch.setattr(process_pool, "RETRIES", 0)
    pool = open_pool(user_file, tmp_path)
    started = time.monotonic()
    values, problems = score(pool, ["ab", act, "abc"])
    assert values == [2.0, None, 3.0]
    assert problem in problems[1] and (problems[0], problems[2]) == ("", "")
    assert time.monotonic() - started < 5
    pool.close()


def test_a_call_that_dies_once_is_scored_by_its_second_try(user_file, tmp_path, monkeypatch):
    pool = open_pool(user_file, tmp_path)
    assert score(pool, ["exit once"]) == ([9.0], [""])
    (tmp_path / "once").unlink()
    pool.close()
    monkeypatch.setattr(process_pool, "RETRIES", 0)
    without_retries = open_pool(user_file, tmp_path)
    assert score(without_retries, ["exit once"]) == ([None], ["its process died (exit code 4)"])
    without_retries.close()


def test_processes_work_side_by_side(user_file, tmp_path):
    pool = open_pool(user_file, tmp_path, processes=2, timeout_s=20.0)
    meeting = [pool.submit(0, PROMPT, [[{"text": "meet", "token_ids": []}]]) for _ in range(2)]
    assert [future.result()[0].values for future in meeting] == [[4.0], [4.0]]
    pool.close()


def test_a_process_imports_nothing_heavy():
    functions = [RewardFunctionConfig(name="gsm8k"), RewardFunctionConfig(name="kk")]
    process = FunctionProcess(RewardConfig(functions=functions), functions)
    resident_kib = int(Path(f"/proc/{process.pid}/status").read_text().split("VmRSS:")[1].split()[0])
    assert resident_kib < 60_000  # torch alone is above 150,000
    process.kill()


def test_close_leaves_no_process_even_while_one_hangs(user_file, tmp_path):
    pool = open_pool(user_file, tmp_path, processes=2, timeout_s=60.0)
    pids = pool.pids
    assert len(pids) == 2
    hanging = pool.submit(0, PROMPT, [[{"text": "hang in C", "token_ids": []}]])
    time.sleep(0.3)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 5
    assert all(gone(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed while it scored"):
        hanging.result()


PARENT = """
import pickle, sys, time
from infsample_rl.config import RewardConfig, RewardFunctionConfig
from infsample_rl.reward.process_pool import ProcessPool
functions = [RewardFunctionConfig(name=sys.argv[1] + ":acts")]
pool = ProcessPool(RewardConfig(functions=functions, timeout_s=600, processes=2), functions)
prompt = pickle.dumps({"row": 1, "messages": [], "text": "", "columns": {}})
pool.submit(0, prompt, [[{"text": "hang in C", "token_ids": []}]])
time.sleep(0.3)
print(*pool.pids, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="hanging processes end with their parent by a Linux call")
def test_processes_end_with_a_killed_parent_even_while_one_hangs(user_file):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(user_file)], stdout=subprocess.PIPE, text=True, env=environment
    )
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z" for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert all(gone(pid) for pid in pids)


ODD = """
import os

def once(data_source, solution_str, ground_truth, extra_info=None, folder=""):
    mark = os.path.join(folder, solution_str)
    if not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(4)
    return 1.0


def logs(prompts, completions, log_extra, **columns):
    log_extra("n", [1.0])
    return [1.0 for _ in completions]


def names(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "\\ud800" + "x" * 500: 2.0}
"""


@pytest.fixture
def odd_pool(tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    functions = [RewardFunctionConfig(name=f"{tmp_path}/odd.py:once", kwargs={"folder": str(tmp_path)})]
    functions += [RewardFunctionConfig(name=f"{tmp_path}/odd.py:{name}") for name in ("logs", "names")]
    pool = ProcessPool(RewardConfig(functions=functions, timeout_s=20.0), functions)
    yield pool
    pool.close()


def test_every_sample_has_its_own_retries(odd_pool):
    assert score(odd_pool, ["a", "b", "c"]) == ([1.0] * 3, [""] * 3)


def test_what_a_function_logs_in_another_number_is_left_out_and_its_rewards_count(odd_pool):
    (result,) = odd_pool.submit(1, PROMPT, [[{"text": text, "token_ids": []} for text in "ab"]]).result(timeout=60)
    assert (result.values, result.problems, odd_pool.num_deaths) == ([1.0, 1.0], ["", ""], 0)


def test_a_name_that_no_file_could_hold_is_written_as_one_that_can_and_cut(odd_pool):
    (result,) = odd_pool.submit(2, PROMPT, [[{"text": "a", "token_ids": []}]]).result(timeout=60)
    assert result.reported == {"\\ud800" + "x" * 194: [2.0]}

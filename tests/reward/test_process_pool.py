"""Function processes: what hangs is killed at its limit, what dies is tried again, nothing is left behind."""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infsample_rl.config import RewardConfig, RewardFunctionConfig
from infsample_rl.reward import process_pool
from infsample_rl.reward.process_pool import ProcessPool
from tests.waiting import has_ended, wait_until

PROMPT = pickle.dumps({"row": 1, "messages": [], "text": "1 + 2 = ?", "columns": {"answer": "3"}})
ROOT = Path(__file__).parents[2]


@pytest.fixture
def open_pool(user_file, tmp_path, closing):
    """Builds a pool of one function, of the user file unless a path is given; every one is closed."""

    def build(name=f"{user_file}:acts", **settings) -> ProcessPool:
        kwargs = {"folder": str(tmp_path)} if name.endswith(":acts") else {}
        functions = [RewardFunctionConfig(name=name, kwargs=kwargs)]
        return closing(ProcessPool(RewardConfig(functions=functions, **{"timeout_s": 0.5, **settings}), functions))

    return build


def submit(pool, *responses):
    return pool.submit(0, PROMPT, [[{"text": text, "token_ids": []}] for text in responses])


def score(pool, *responses):
    results = submit(pool, *responses).result(timeout=30)
    return [result.values[0] for result in results], [result.problems[0] for result in results]


@pytest.mark.parametrize("hang", ["hang", "hang in C", "write"])
def test_a_hanging_call_is_killed_at_its_limit_and_the_others_are_scored(open_pool, hang):
    pool = open_pool()
    started = time.monotonic()
    assert score(pool, "ab", hang, "abc") == ([2.0, None, 3.0], ["", "timed out after 0.5 s", ""])
    assert 0.5 <= time.monotonic() - started < 5  # the limit, and the start of a new process
    assert (pool.num_calls, pool.num_deaths) == (3, 0)


@pytest.mark.parametrize(("act", "how"), [("exit", "exit code 3"), ("segfault", "killed by SIGSEGV")])
def test_a_dying_call_is_tried_again_then_none(open_pool, act, how):
    pool = open_pool()
    problem = f"its process died ({how}) in each of 2 tries"
    assert score(pool, "ab", act, "abc") == ([2.0, None, 3.0], ["", problem, ""])
    assert (pool.num_calls, pool.num_deaths) == (3, 2)


def test_every_call_that_dies_once_is_scored_by_its_own_second_try(open_pool, monkeypatch):
    acts = [f"exit once {number}" for number in range(3)]
    assert score(open_pool(timeout_s=20.0), *acts) == ([11.0] * 3, [""] * 3)
    monkeypatch.setattr(process_pool, "RETRIES", 0)
    assert score(open_pool(), "exit once more") == ([None], ["its process died (exit code 4)"])


def test_processes_work_side_by_side(open_pool):
    pool = open_pool(processes=2, timeout_s=20.0)
    meeting = [submit(pool, "meet") for _ in range(2)]
    assert [future.result()[0].values for future in meeting] == [[4.0], [4.0]]


def test_close_leaves_no_process_even_while_one_hangs(open_pool):
    pool = open_pool(processes=2, timeout_s=60.0)
    pids = [process.pid for process in pool._running]
    assert len(pids) == 2
    hanging = submit(pool, "hang in C")
    time.sleep(0.3)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 5
    wait_until(lambda: all(map(has_ended, pids)), 5)
    with pytest.raises(RuntimeError, match="closed while it scored"):
        hanging.result()


PARENT = """
import pickle, sys, time
from infsample_rl.config import RewardConfig, RewardFunctionConfig
from infsample_rl.reward.process_pool import ProcessPool
from tests.waiting import has_ended, wait_until
functions = [RewardFunctionConfig(name=sys.argv[1] + ":acts")]
pool = ProcessPool(RewardConfig(functions=functions, timeout_s=600, processes=2), functions)
prompt = pickle.dumps({"row": 1, "messages": [], "text": "", "columns": {}})
pool.submit(0, prompt, [[{"text": "hang in C", "token_ids": []}]])
time.sleep(0.3)
print(*[process.pid for process in pool._running], flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="hanging processes end with their parent by a Linux call")
def test_processes_end_with_a_killed_parent_even_while_one_hangs(user_file):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PARENT, str(user_file)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z" for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: all(map(has_ended, pids)), 5)


ODD = """
def logs(prompts, completions, log_extra, **columns):
    log_extra("n", [1.0])
    log_extra("\\ud800" + "x" * 500, [2.0] * len(completions))
    return [1.0 for _ in completions]
"""


def test_what_is_logged_in_another_number_is_left_out_and_names_are_cut_to_what_files_hold(open_pool, tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    pool = open_pool(f"{tmp_path}/odd.py:logs", timeout_s=20.0)
    (result,) = pool.submit(0, PROMPT, [[{"text": text, "token_ids": []} for text in "ab"]]).result(timeout=60)
    assert (result.values, result.problems, pool.num_deaths) == ([1.0, 1.0], ["", ""], 0)
    assert result.reported == {"\\ud800" + "x" * 194: [2.0, 2.0]}


EDITED = """
import time

def rates(solution_str, data_source=None, ground_truth=None, extra_info=None):
    time.sleep(60 * (solution_str == "hang"))
    return 1.0
"""


def test_a_file_that_is_being_edited_costs_the_rewards_of_meanwhile_and_its_new_text_is_told(open_pool, tmp_path):
    path = tmp_path / "edited.py"
    path.write_text(EDITED)
    pool = open_pool(f"{path}:rates")
    path.write_text("def rates(")
    timed_out, not_started = "timed out after 0.5 s", "its process cannot be started anew: .*SyntaxError"
    values, problems = score(pool, "a", "hang", "b", "c")
    assert values == [1.0, None, None, None] and problems[:2] == ["", timed_out]
    assert all(re.match(not_started, problem) for problem in problems[2:])
    assert (pool.num_calls, pool.num_deaths) == (4, 0)
    path.write_text(EDITED.replace("1.0", "2.0"))
    with pytest.warns(UserWarning, match=r"reward.functions: .*edited.py has changed since the run began"):
        assert score(pool, "a") == ([2.0], [""])

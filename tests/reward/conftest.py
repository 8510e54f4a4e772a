"""A file of user reward functions that behave, and of ones that do not."""

from pathlib import Path

import pytest

USER_FILE = '''
import ctypes, os, re, subprocess, sys, time

def brevity(prompts, completions, **columns):
    return [-float(len(completion)) for completion in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, bonus=0.0):
    return {"score": float(solution_str == ground_truth) + bonus, "acc": 1.0}

def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0] * len(solution_strs)

def reward_func(queries, prompts, labels):
    return [1.0]

def needs_no_answer(data_source, solution_str, ground_truth=None, extra_info=None):
    return 1.0

def huge(data_source, solution_str, ground_truth, extra_info):
    return 1e200 if solution_str == "a" else 1.0

def raises(completions, **columns):
    raise ValueError("no such\\nthing")

def leaves(completions, **columns):
    sys.exit(3)

def mixed(completions, **columns):
    import numpy
    return [numpy.float32(1.5), float("nan"), float("inf"), None, "high", True]

def too_few(completions, **columns):
    return [1.0]

def no_list(completions, **columns):
    return 1.0

def no_score(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}

def needs_question(completions, question):
    return [1.0] * len(completions)

def needs_level(completions, level):
    return [1.0] * len(completions)

def prints(data_source, solution_str, ground_truth, extra_info):
    print("x" * 100_000)
    sys.stdout.flush()
    os.write(1, b"raw bytes")
    input_is_empty = sys.stdin.read() == ""
    return float(input_is_empty)

def acts(data_source, solution_str, ground_truth, extra_info, *, folder=""):
    """Does what the response says."""
    if solution_str == "hang":
        while True:
            pass
    if solution_str == "meet":  # ends only when another process does the same at the same time
        open(os.path.join(folder, f"met{os.getpid()}"), "w").close()
        while sum(name.startswith("met") for name in os.listdir(folder)) < 2:
            time.sleep(0.01)
    if solution_str == "hang in C":  # holds the interpreter lock
        re.match("(a+)+$", "a" * 64 + "b")
    if solution_str == "write":  # into every pipe it can find, the one of the replies among them, a line without an end
        for number in range(3, 32):
            try:
                os.write(number, b"x")
            except OSError:
                pass
        while True:
            pass
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "segfault":
        ctypes.string_at(0)
    if solution_str.startswith("exit once") and not os.path.exists(os.path.join(folder, solution_str)):
        open(os.path.join(folder, solution_str), "w").close()
        os._exit(4)
    return len(solution_str)

def neither(responses):
    return [0.0]

def unknown_input(data_source, solution_str, ground_truth, reference):
    return 0.0

not_a_function = 3
'''


@pytest.fixture(scope="session")
def user_file(tmp_path_factory) -> Path:
    """Path of a Python file with the functions above."""
    path = tmp_path_factory.mktemp("rewards") / "user_rewards.py"
    path.write_text(USER_FILE)
    return path

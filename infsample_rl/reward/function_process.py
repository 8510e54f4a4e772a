"""The process reward functions run in: reads calls from a pipe, writes the values to another, and is held to
reward.isolation.

It is forked by `keeper` for `process_pool.FunctionProcess` and imports nothing heavy: no torch, ray or transformers.
Requests are pickled; replies are lines of JSON, so that the worker unpickles nothing a user's function could have made.

    reward worker                  this process
    [functions]                ->
                               <-  {"pid": ..., "forms": [...], "needs": [...]} or {"error": "..."}
    (function, prompt, calls)  ->
                               <-  {} (read: the time limit of the first call starts)
                               <-  {"values": [...], "problems": [...], "reported": {"acc": [...]}}, once a call
                               <-  {"died": "exit code 3"}, from the keeper, when all is over
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

from infsample_rl.reward.functions import LoadedFunction, as_reward, call_function, load_function
from infsample_rl.reward.hidden_values import without_values
from infsample_rl.reward.isolation import Isolation, isolate
from infsample_rl.reward.peer_forms import OF_TRL
from infsample_rl.reward.user_function import describe_error

LONGEST_NAME = 200  # characters of what a function reports beside its values
_NO_MEMORY = ("annot allocate memory", "an't allocate memory")  # as the C library says it, and torch


def main(isolation: Isolation) -> None:
    """Serve the process at the other end of stdin and stdout until it closes them."""
    requests, replies = own_pipes()
    try:
        isolate(isolation)
    except ValueError as error:
        reply(replies, {"error": str(error)})
        os._exit(1)
    functions = _load(requests, replies)
    while True:
        try:
            request = requests.recv_bytes()
        except EOFError:
            os._exit(0)  # threads a user's function may have left behind must not hold the process
        reply(replies, {})
        index, prompt, calls = pickle.loads(request)
        for samples in calls:
            reply(replies, _score(functions[index], prompt, samples, isolation))


def own_pipes() -> tuple[Connection, int]:
    """Move the pipes away from stdin and stdout: what a reward function prints goes to stderr, what it reads is
    empty."""
    requests, replies = Connection(os.dup(0), writable=False), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return requests, replies


def reply(replies: int, message: dict[str, Any]) -> None:
    """Write one line."""
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(replies, line) :]


def _load(requests: Connection, replies: int) -> list[LoadedFunction]:
    try:
        functions = [load_function(config) for config in pickle.loads(requests.recv_bytes())]
    except (ValueError, ImportError) as error:  # an ImportError is of a rule's own library
        said = str(error) if isinstance(error, ValueError) else f"reward.functions: {describe_error(error, None)}"
        reply(replies, {"error": without_values(said)})
        os._exit(1)
    found = {"forms": [function.form for function in functions], "needs": [function.needs for function in functions]}
    reply(replies, {"pid": os.getpid()} | found)
    return functions


def _score(
    function: LoadedFunction, pickled_prompt: bytes, samples: list[dict[str, Any]], isolation: Isolation
) -> dict[str, Any]:
    """The reply to one call; whatever the function raises becomes the problem of its samples."""
    try:
        values, reported = call_function(function, pickle.loads(pickled_prompt), samples)
        may_skip = function.form in OF_TRL  # whose None says that it does not apply to a sample
        checked = [(None, "") if value is None and may_skip else as_reward(value) for value in values]
        numbers = {
            _shown(name): [as_reward(value)[0] for value in column]
            for name, column in reported.items()
            if len(column) == len(samples)
        }
    except BaseException as error:  # this process is the sandbox: sys.exit() in a function must not end it either
        problem = f"raised {describe_error(error, function.path)}{_limit_behind(error, isolation)}"
        checked, numbers = [(None, without_values(problem))] * len(samples), {}
    return {
        "values": [value for value, _ in checked],
        "problems": [problem for _, problem in checked],
        # texts are not kept
        "reported": {name: column for name, column in numbers.items() if any(value is not None for value in column)},
    }


def _shown(name: str) -> str:
    """A name as on screen and in records: trackers take no lone surrogates."""
    return without_values(name).encode(errors="backslashreplace").decode()[:LONGEST_NAME]


def _limit_behind(error: BaseException, isolation: Isolation) -> str:
    """The setting that most likely made a function fail: "; reward.memory_limit=4GB", or ""."""
    link: BaseException | None = error
    while link is not None:
        cause = getattr(link, "reason", None)  # urllib's URLError keeps what was raised there
        is_full = isinstance(link, MemoryError) or any(words in str(link) for words in _NO_MEMORY)
        if isolation.level != "none" and is_full:
            return f"; reward.memory_limit={isolation.memory_limit}"
        if isolation.level != "none" and isinstance(link, OSError) and link.errno == errno.EFBIG:
            return f"; no file may be larger than reward.memory_limit={isolation.memory_limit}"
        if isolation.level == "sandbox" and any(isinstance(one, PermissionError) for one in (link, cause)):
            return "; reward.isolation=sandbox has no network, and only the files of reward.read_paths"
        link = link.__cause__ or link.__context__
    return ""

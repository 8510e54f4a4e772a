"""Processes that run reward functions and can be killed at any time; their parent's side. Standard library only.

Every process belongs to one thread of the pool: that thread starts it, talks to it, kills it. A call that outlives its
limit costs its process, which is started anew for the calls that remain; start-up time is never part of a limit.
Between the two stands a keeper (`keeper.py`), which ends a function process together with all that it started.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from infsample_rl.config import RewardConfig, RewardFunctionConfig
from infsample_rl.reward.functions import files_of
from infsample_rl.reward.isolation import END_LIMIT_S, START_LIMIT_S, end_keeper, isolation_of, start_keeper

RETRIES = 1  # further tries of a call whose process died (not of one that timed out)
_READ_LIMIT_S = 20.0  # for a process that has started to take a call: one that an earlier call has stopped never does
_MOST_UNREAD = 1 << 24  # bytes of one reply; values and problems of thousands of samples are less
_FORGED = "the function wrote into the pipe of the replies"


class FunctionTimedOut(Exception):
    """A call took longer than its limit."""


class FunctionProcessDied(Exception):
    """The process ended while a call ran; the message says how."""


@dataclass(frozen=True, kw_only=True)
class CallValues:
    """What one call gave for each of its samples; None without a problem is a sample the function leaves out."""

    values: list[float | None]
    problems: list[str]
    reported: dict[str, list[float | None]] = field(default_factory=dict)  # further numbers, by name


class FunctionProcess:
    """One child process with all rule and user functions loaded, and its keeper. Not thread-safe."""

    def __init__(self, reward: RewardConfig, functions: list[RewardFunctionConfig]):
        """Start it; ValueError in one line when a function cannot be loaded or reward.isolation cannot be had."""
        isolation = isolation_of(reward, files_of(functions))
        self._keeper = start_keeper(isolation, "infsample_rl.reward.function_process")
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._requests = Connection(os.dup(self._keeper.stdin.fileno()), readable=False)
        self._keeper.stdin.close()
        self._replies, self._unread = self._keeper.stdout, b""
        names = ", ".join(function.name for function in functions)
        try:
            self._send(pickle.dumps(functions), START_LIMIT_S)
            started = self._receive(START_LIMIT_S)
        except FunctionTimedOut:
            self.kill()
            raise ValueError(f"reward.functions: importing {names} did not end in {START_LIMIT_S:.0f} s") from None
        except FunctionProcessDied as error:
            raise ValueError(f"reward.functions: the process that imports {names} died ({error})") from None
        if "error" in started:
            self.kill()
            raise ValueError(started["error"])
        self.pid: int = started["pid"]
        self.forms: list[str] = started["forms"]  # of every function
        self.needs: list[list[list[str]]] = started["needs"]  # of every function: the columns it reads (checks.py)

    def call(self, request: bytes, sizes: list[int], timeout_s: float) -> Iterator[CallValues]:
        """Send (function, pickled prompt, calls) and yield the values of each call of `sizes` samples, each within
        `timeout_s`. Raises FunctionTimedOut or FunctionProcessDied; the process is gone then."""
        try:
            self._send(request, _READ_LIMIT_S)
            self._receive(_READ_LIMIT_S)
            for size in sizes:
                reply = self._receive(timeout_s)
                if not _are_values(reply, size):
                    raise self._gone(_FORGED)
                yield CallValues(values=reply["values"], problems=reply["problems"], reported=reply["reported"])
        except FunctionTimedOut:
            self.kill()
            raise

    def interrupt(self) -> None:
        """Have its keeper end it, from another thread: the one that waits for it sees it die."""
        self._keeper.terminate()

    def kill(self) -> None:
        """End it and whatever it started, at once."""
        if self._replies.closed:
            return
        self._requests.close()
        self._replies.close()
        end_keeper(self._keeper)

    def _send(self, message: bytes, limit_s: float) -> None:
        too_late = threading.Timer(limit_s, self.interrupt)  # a pipe that nobody reads takes no more
        too_late.start()
        try:
            self._requests.send_bytes(message)
        except OSError:
            raise FunctionProcessDied(self._how_it_died()) from None
        finally:
            too_late.cancel()

    def _receive(self, limit_s: float) -> dict[str, Any]:
        """The next line of the pipe. Never blocks beyond the limit, even if the line has no end or is no reply."""
        deadline, is_late = time.monotonic() + limit_s, False
        while True:
            line, ended, rest = self._unread.lstrip(b"\n").partition(b"\n")
            self._unread = rest if ended else line
            if ended:
                return self._open(line)
            if len(line) > _MOST_UNREAD:
                raise self._gone(_FORGED)
            if is_late:  # what had arrived by then has been read
                raise FunctionTimedOut
            is_late = time.monotonic() >= deadline
            if wait([self._replies.fileno()], max(0.0, deadline - time.monotonic())):
                read = os.read(self._replies.fileno(), 1 << 16)
                if not read:
                    raise self._gone("its keeper was killed")
                self._unread += read

    def _open(self, line: bytes) -> dict[str, Any]:
        """A reply; FunctionProcessDied where it is none, or says that all is over."""
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise self._gone(_FORGED)
        if "died" in reply:
            raise self._gone(str(reply["died"]))
        return reply

    def _gone(self, how: str) -> FunctionProcessDied:
        self.kill()
        return FunctionProcessDied(how)

    def _how_it_died(self) -> str:
        """What the keeper says, which is the last thing in the pipe."""
        deadline = time.monotonic() + END_LIMIT_S
        try:
            while True:
                self._receive(deadline - time.monotonic())
        except FunctionProcessDied as error:
            return str(error)
        except FunctionTimedOut:
            self.kill()
            return "it closed its pipe"


class ProcessPool:
    """`reward.processes` function processes. submit() may be called from any thread."""

    def __init__(self, reward: RewardConfig, functions: list[RewardFunctionConfig]):
        """Start them all; ValueError in one line when a function cannot be loaded."""
        self._reward, self._functions, self._sources = reward, functions, _sources_of(functions)
        self.num_processes = reward.processes
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._running: set[FunctionProcess] = set()
        self._closed = False
        self.num_calls = self.num_deaths = 0  # calls: that have ended
        self._threads = ThreadPoolExecutor(self.num_processes, thread_name_prefix="reward-functions")
        barrier = threading.Barrier(self.num_processes)  # makes each of them start its own process
        started = [self._threads.submit(self._start, barrier) for _ in range(self.num_processes)]
        try:
            self.forms = [future.result() for future in started][0]
        except ValueError:
            self.close()
            raise

    def submit(
        self, function: int, pickled_prompt: bytes, calls: list[list[dict[str, Any]]]
    ) -> Future[list[CallValues]]:
        """Score `calls` (lists of samples) with one function, by number; a failed call gives None and its problem."""
        return self._threads.submit(self._run, function, pickled_prompt, calls)

    def close(self) -> None:
        """Kill all processes; calls that still run fail with RuntimeError."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.interrupt()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._running:
            process.kill()
        self._running.clear()

    def _start(self, barrier: threading.Barrier) -> list[str]:
        barrier.wait()
        return self._process().forms

    def _process(self) -> FunctionProcess:
        """This thread's process, started if there is none."""
        process: FunctionProcess | None = getattr(self._of_thread, "process", None)
        if process is None:
            process = self._of_thread.process = FunctionProcess(self._reward, self._functions)
            with self._lock:
                if self._closed:
                    process.kill()
                    raise RuntimeError("the reward worker was closed while it scored")
                self._running.add(process)
            self._tell_changed_files()
        return process

    def _tell_changed_files(self) -> None:
        """Warn of a file that is not what the first processes imported: from now on two versions of it may score."""
        for path, source in _sources_of(self._functions).items():
            if source != self._sources[path]:
                warnings.warn(
                    f"reward.functions: {path} has changed since the run began: processes started from now on run it "
                    "as it is now, others as it was; start the run anew to have one version",
                    stacklevel=2,
                )

    def _run(self, function: int, pickled_prompt: bytes, calls: list[list[dict[str, Any]]]) -> list[CallValues]:
        done, timeout_s = list[CallValues](), self._reward.timeout_s
        deaths = 0  # of the call that is next
        while len(done) < len(calls):
            rest = calls[len(done) :]
            try:
                process = self._process()
            except (ValueError, OSError) as error:  # a file half edited: the next group tries again
                done += [_failed(samples, f"its process cannot be started anew: {error}") for samples in rest]
                self._count(calls=len(rest))
                break
            try:
                sizes = [len(samples) for samples in rest]
                for values in process.call(pickle.dumps((function, pickled_prompt, rest)), sizes, timeout_s):
                    done.append(values)
                    self._count(calls=1)
                    deaths = 0
                continue
            except FunctionTimedOut:
                problem, again = f"timed out after {timeout_s:g} s", False
            except FunctionProcessDied as error:
                self._count(deaths=1)
                deaths += 1
                tries = f" in each of {deaths} tries" if deaths > 1 else ""
                problem, again = f"its process died ({error}){tries}", deaths <= RETRIES
            with self._lock:
                self._running.discard(process)
            self._of_thread.process = None
            if not again:
                done.append(_failed(calls[len(done)], problem))
                self._count(calls=1)
                deaths = 0
        return done

    def _count(self, calls: int = 0, deaths: int = 0) -> None:
        with self._lock:
            self.num_calls += calls
            self.num_deaths += deaths


def _sources_of(functions: list[RewardFunctionConfig]) -> dict[str, bytes]:
    """A digest of every file that functions come from; importing one that cannot be read says so."""
    readable = [path for path in files_of(functions) if os.path.isfile(path) and os.access(path, os.R_OK)]
    return {path: hashlib.sha256(Path(path).read_bytes()).digest() for path in readable}


def _failed(samples: list[dict[str, Any]], problem: str) -> CallValues:
    return CallValues(values=[None] * len(samples), problems=[problem] * len(samples))


def _are_values(reply: dict[str, Any], size: int) -> bool:
    """Whether a reply is the values, problems and reported numbers of a call of `size` samples."""
    values, problems, reported = reply.get("values"), reply.get("problems"), reply.get("reported")
    if not isinstance(reported, dict) or not isinstance(problems, list):
        return False
    numbers = [values, *reported.values()]
    if not all(isinstance(column, list) and len(column) == size for column in (problems, *numbers)):
        return False
    return all(isinstance(problem, str) for problem in problems) and all(
        value is None or (isinstance(value, (int, float)) and math.isfinite(value))
        for column in numbers
        for value in column
    )

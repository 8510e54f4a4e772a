"""The environments of a process's trajectories, each in a process of its own: their caller's side.

A call is asked for and answered later, through one queue, in whatever order calls end; `environment.workers` of them
run at a time. A call that outlives its limit costs its environment, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from infsample_rl.config import Config, RewardFunctionConfig
from infsample_rl.reward.isolation import environment_of, folders_of, isolation_of, package_path
from infsample_rl.types import Request

START_LIMIT_S = 300.0  # a user's file may import a large library
END_LIMIT_S = 20.0  # for the keeper to end all there is
CREDENTIALS = struct.Struct("3i")  # of who wrote into a socket: process, user, group
MOST_UNREAD = 1 << 24  # bytes of one reply
MOST_PROCESSES = 20_000  # one for every trajectory that has begun, and what they start
FORGED = "it wrote into the line of its answers"
_PROGRAM = (
    "import json, sys; sys.path = (own := json.loads(sys.argv[1])) + [p for p in sys.path if p and p not in own]; "
    "from infsample_rl.reward.keeper import main; "
    "main(sys.argv[2], 'infsample_rl.reward.environment_process')"
)


class EnvironmentFailed(Exception):
    """An environment is gone; the message says why."""


class ProcessEnded(EnvironmentFailed):
    """Its process is gone, and said nothing."""


@dataclass
class _Episode:
    """One environment that has been asked for."""

    seed: int
    columns: dict[str, Any]
    line: socket.socket | None = None  # to its process, once it has one
    pid: int = 0  # of its process, as the system knows it
    unread: bytes = b""
    opening: str = ""
    done: list[Request] = field(default_factory=list)  # what its process has been asked for
    was_lost: bool = False  # a process of its before
    lock: threading.Lock = field(default_factory=threading.Lock)  # its calls are one after another


class EnvironmentHost:
    """Environments of the class or the functions that `environment` names."""

    def __init__(self, config: Config, python: str = sys.executable) -> None:
        """Import them in a process of their own, of the interpreter `python`; ValueError in one line when they cannot
        be had."""
        own = config.environment
        files = [RewardFunctionConfig(name=name) for name in filter(None, [own.factory, *own.tools])]
        isolation = replace(isolation_of(config.reward, files), most_processes=MOST_PROCESSES)
        path = sys.path
        if python != sys.executable:  # the driver's, with the user's libraries, where this process has vLLM's
            path = package_path()
            isolation.read.extend(folders_of(python) if isolation.read else [])
        self._config, self._episodes = own, dict[Hashable, _Episode]()
        self.answers: queue.SimpleQueue[tuple[Hashable, dict[str, Any]]] = queue.SimpleQueue()
        self._control, theirs = socket.socketpair()
        self._hand_over = threading.Lock()
        command = [python, "-c", _PROGRAM, json.dumps(path), json.dumps(asdict(isolation))]
        with theirs:
            try:
                self._keeper = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is left to the parent
                    pass_fds=[theirs.fileno()],
                    env=environment_of(isolation, os.environ),
                )
            except OSError as error:
                self._control.close()
                raise ValueError(f"environment: {python} cannot be started ({error.strerror})") from None
            assert self._keeper.stdin is not None and self._keeper.stdout is not None
            self._requests = Connection(os.dup(self._keeper.stdin.fileno()), readable=False)
            self._keeper.stdin.close()
            self._requests.send_bytes(pickle.dumps((own, theirs.fileno())))
        started = self._read_start()
        if "error" in started:
            self.close()
            raise ValueError(started["error"])
        self.form: str = started["form"]
        self.tools: list[dict[str, Any]] = started["tools"]
        self._threads = ThreadPoolExecutor(own.workers, thread_name_prefix="environments")

    def ask(self, key: Hashable, request: Request, before: Sequence[Request] = ()) -> None:
        """Ask the environment of `key` for what environment_process serves; (key, reply) comes into `answers`, or
        (key, {"failed": why}). `before`: what one that has no process yet does first."""
        self._threads.submit(self._answer, key, self._episodes[key], request, list(before))

    def open(self, key: Hashable, seed: int, columns: dict[str, Any]) -> None:
        """There is to be an environment of `key`, made when it is first asked."""
        self._episodes[key] = _Episode(seed, columns)

    def opening(self, seed: int, columns: dict[str, Any]) -> str:
        """What an environment says at its beginning. EnvironmentFailed when it does not begin."""
        episode = _Episode(seed, columns)
        try:
            self._begin(episode)
        finally:
            self._end(episode)
        return episode.opening

    def end(self, key: Hashable) -> None:
        """The environment of `key` is not wanted any more, nor what it was asked for."""
        episode = self._episodes.pop(key, None)
        if episode is not None:
            self._end(episode)

    def close(self) -> None:
        """End all environments."""
        for key in list(self._episodes):
            self.end(key)
        self._control.close()
        self._requests.close()
        self._keeper.terminate()
        try:
            self._keeper.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()
        if hasattr(self, "_threads"):
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _answer(self, key: Hashable, episode: _Episode, request: Request, before: list[Request]) -> None:
        try:
            with episode.lock:
                episode.done += before
                try:
                    found = self._ask(episode, request)
                except ProcessEnded:  # killed, or by its own fault: then it ends again
                    self._end(episode)
                    if episode.was_lost or self._episodes.get(key) is not episode:
                        raise
                    episode.was_lost, episode.line, episode.unread = True, None, b""
                    found = self._ask(episode, request)
                episode.done.append(request)
            if not _is_reply(found, *request):
                raise EnvironmentFailed(FORGED)
        except Exception as error:  # whatever it is, its sample waits for an answer
            self._end(episode)
            said = str(error) if isinstance(error, EnvironmentFailed) else f"{type(error).__name__}: {error}"
            found = {"failed": " ".join(said.split())}
        if self._episodes.get(key) is episode:
            self.answers.put((key, found))

    def _ask(self, episode: _Episode, request: Request) -> dict[str, Any]:
        """Its answer, of a new process where it has none, which does first what others have done."""
        if episode.line is None:
            self._begin(episode)
            for each in episode.done:
                self._call(episode, *each)
        return self._call(episode, *request)

    def _begin(self, episode: _Episode) -> None:
        episode.line, theirs = socket.socketpair()
        episode.line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with theirs:
            try:
                with self._hand_over:
                    socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            except OSError:
                raise EnvironmentFailed("the process that makes environments is gone") from None
        self._call(episode, "reset", episode.seed, episode.columns)
        episode.opening = str(self._receive(episode)["said"])

    def _call(self, episode: _Episode, *request: Any) -> dict[str, Any]:
        assert episode.line is not None
        message = pickle.dumps(request)
        try:
            episode.line.settimeout(self._config.timeout_s)
            episode.line.sendall(struct.pack("!Q", len(message)) + message)
        except TimeoutError:
            raise self._too_late() from None
        except OSError:
            raise ProcessEnded("its process ended") from None
        return self._receive(episode)

    def _receive(self, episode: _Episode) -> dict[str, Any]:
        """The next line of its process, within environment.timeout_s."""
        deadline = time.monotonic() + self._config.timeout_s
        while b"\n" not in episode.unread:
            if len(episode.unread) > MOST_UNREAD:
                raise EnvironmentFailed(FORGED)
            episode.unread += self._read(episode, deadline - time.monotonic())
        text, _, episode.unread = episode.unread.partition(b"\n")
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise EnvironmentFailed(FORGED)
        if "failed" in found and "said" not in found:
            raise EnvironmentFailed(str(found["failed"]))
        return found

    def _read(self, episode: _Episode, limit_s: float) -> bytes:
        """Some bytes; from whom, the system says, not the process."""
        assert episode.line is not None
        if limit_s <= 0:
            raise self._too_late()
        try:
            episode.line.settimeout(limit_s)
            read, ancillary, _, _ = episode.line.recvmsg(1 << 16, socket.CMSG_SPACE(CREDENTIALS.size))
        except TimeoutError:
            raise self._too_late() from None
        except OSError:
            read, ancillary = b"", []
        if not read:
            raise ProcessEnded("its process ended")
        for level, kind, data in ancillary:
            if not episode.pid and (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                episode.pid = CREDENTIALS.unpack(data[: CREDENTIALS.size])[0]
        return read

    def _too_late(self) -> EnvironmentFailed:
        return EnvironmentFailed(f"timed out after {self._config.timeout_s:g} s (environment.timeout_s)")

    def _end(self, episode: _Episode) -> None:
        """Its process and what it started, also one that does not answer."""
        if episode.line is not None:
            episode.line.close()
        if episode.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(episode.pid, signal.SIGKILL)
        episode.pid = 0

    def _read_start(self) -> dict[str, Any]:
        """What the process says once it has imported everything."""
        assert self._keeper.stdout is not None
        deadline, text = time.monotonic() + START_LIMIT_S, b""
        while b"\n" not in text.lstrip(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not wait([self._keeper.stdout.fileno()], left):
                self.close()
                raise ValueError(f"environment: importing it did not end in {START_LIMIT_S:.0f} s")
            read = os.read(self._keeper.stdout.fileno(), 1 << 16)
            if not read:
                return {"error": "environment: the process that imports it died"}
            text += read
        found: dict[str, Any] = json.loads(text.lstrip(b"\n").split(b"\n")[0])
        return found if "died" not in found else {"error": f"environment: its process died ({found['died']})"}


def _is_reply(found: dict[str, Any], what: str, *given: Any) -> bool:
    """Whether it is what environment_process answers to the request."""
    said = found.get("said")
    if what == "call":
        return isinstance(said, list) and len(said) == len(given[0]) and all(isinstance(text, str) for text in said)
    if what == "act":
        return isinstance(said, str) and isinstance(found.get("ended"), bool) and _is_number(found.get("reward"))
    return "reward" in found and (found["reward"] is None or _is_number(found["reward"]))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)

"""The environments of a process's trajectories, each in a process of its own: their caller's side.

A call is asked for and answered later, through one queue, in whatever order calls end; `environment.workers` of them
run at a time. A call that outlives its limit costs its environment, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from infsample_rl.config import Config
from infsample_rl.reward.environment_process import DIED, REFUSED
from infsample_rl.reward.environment_server import EnvironmentServer
from infsample_rl.reward.policy_conversation import Asked, are_ids, is_tool
from infsample_rl.types import Answered, EpisodeStart, Request

log = logging.getLogger(__name__)

CREDENTIALS = struct.Struct("3i")  # of who wrote into a socket: process, user, group
CLOSE_LIMIT_S = 5.0  # of an environment's own close()
MOST_UNREAD = 1 << 24  # bytes of one reply
FORGED = "it wrote into the line of its answers"
Opening = str | Asked  # what the prompt goes on with, or what takes its place


class EnvironmentFailed(Exception):
    """An environment is gone; the message says why."""


class ProcessEnded(EnvironmentFailed):
    """Its process is gone."""


@dataclass
class _Episode:
    """One environment that has been asked for."""

    start: EpisodeStart
    line: socket.socket | None = None  # to its process, once it has one
    pid: int = 0  # of its process, as the system knows it
    unread: bytes = b""
    opening: Opening = ""
    done: list[Answered] = field(default_factory=list)
    called_at: float | None = None  # time.monotonic() when what it was last asked for was begun
    ended_at: int = -1  # how much was done when a process of its ended
    is_over: bool = False  # nobody wants it any more
    lock: threading.Lock = field(default_factory=threading.Lock)  # its calls are one after another


class EnvironmentHost:
    """Environments of the class or the functions that `environment` names."""

    def __init__(self, config: Config, python: str = sys.executable) -> None:
        """As EnvironmentServer."""
        self._config, self._episodes = config.environment, dict[Hashable, _Episode]()
        self.answers: queue.SimpleQueue[tuple[Hashable, dict[str, Any], float]] = queue.SimpleQueue()
        self.num_replies = 0
        self._start, self._starting = partial(EnvironmentServer, config, python), threading.Lock()
        self._server, self._is_closed = self._start(), False
        self.form, self.tools, self.rewards = self._server.form, self._server.tools, self._server.rewards
        self.columns = self._server.columns  # that a row must have, by the names of environments
        self._threads = ThreadPoolExecutor(self._config.workers, thread_name_prefix="environments")
        self._closing, self._closed_by = ThreadPoolExecutor(self._config.workers), math.inf

    def ask(self, key: Hashable, request: Request, before: Sequence[Answered] = ()) -> None:
        """Ask the environment of `key` for what environment_process serves; (key, its reply or {"failed": why}, time)
        comes into `answers`. `before`: what one that has no process yet does first, where it may have a state."""
        episode = self._episodes[key]
        episode.called_at = None
        self._threads.submit(self._answer, key, episode, request, list(before))

    def called_at(self, key: Hashable) -> float | None:
        """When what the environment of `key` was last asked for was begun; None: it waits for one of the workers."""
        return self._episodes[key].called_at

    def open(self, key: Hashable, start: EpisodeStart) -> None:
        """There is to be an environment of `key`, made when it is first asked."""
        self._episodes[key] = _Episode(start)

    def opening(self, seed: int, columns: dict[str, Any]) -> Opening:
        """What an environment says at its beginning. EnvironmentFailed when it does not begin."""
        episode = _Episode(EpisodeStart(seed, columns))
        try:
            self._ask(episode, None)
        finally:
            self._release(episode)
        return episode.opening

    def end(self, key: Hashable) -> None:
        """The environment of `key` is not wanted any more, nor what it was asked for."""
        episode = self._episodes.pop(key, None)
        if episode is not None:
            episode.is_over = True
            self._release(episode)

    def close(self) -> None:
        """End all environments."""
        for key in list(self._episodes):
            self.end(key)
        self._closed_by = time.monotonic() + CLOSE_LIMIT_S
        self._closing.shutdown(wait=True)
        with self._starting:
            self._is_closed = True
        self._server.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _answer(self, key: Hashable, episode: _Episode, request: Request, before: list[Answered]) -> None:
        try:
            with episode.lock:
                if episode.is_over:  # nobody waits for it
                    return
                episode.called_at = time.monotonic()
                episode.done += before
                found = self._ask(episode, request)
                episode.done.append((request, found))
            if not _is_reply(found, *request):
                raise EnvironmentFailed(FORGED)
        except Exception as error:  # whatever it is, its sample waits for an answer
            self._end(episode)
            said = str(error) if isinstance(error, EnvironmentFailed) else f"{type(error).__name__}: {error}"
            found = {"failed": " ".join(said.split())}
            self.num_replies += 1
        if self._episodes.get(key) is episode:
            self.answers.put((key, found, time.monotonic()))
        else:  # it was ended while it was asked, maybe before its process was there
            self._end(episode)

    def _ask(self, episode: _Episode, request: Request | None) -> dict[str, Any]:
        """Its answer; None asks only that it begins. Where its process has ended, a new one does what the last has done
        and is asked again: it was killed or, when the next ends too, has a fault."""
        while True:
            try:
                if episode.line is None:
                    self._begin(episode)
                    self._do_again(episode)
                return {} if request is None else self._call(episode, *request)
            except ProcessEnded:
                self._end(episode)
                if episode.is_over or episode.ended_at == len(episode.done):
                    raise
                episode.ended_at, episode.line, episode.unread = len(episode.done), None, b""

    def _do_again(self, episode: _Episode) -> None:
        """Bring a new process to where the last one was. Functions alone have no state: they are not called again."""
        for request, reply in episode.done if self._config.factory is not None else ():
            if self._call(episode, *request) != reply:
                raise EnvironmentFailed(
                    "brought back in a new process it answered otherwise: its answers must follow from its seed, row "
                    "and calls"
                )

    def _begin(self, episode: _Episode) -> None:
        """A process for it, of a new server where the one that there was is gone."""
        server = self._server
        try:
            self._meet(episode, server)
        except ProcessEnded:
            self._end(episode)
            self._meet(episode, self._successor(server))
        found = self._receive(episode)
        messages, tools, ids = found.get("messages"), found.get("tools", []), found.get("token_ids")
        if messages is not None and not (_are_messages(messages) and all(map(is_tool, tools))):
            raise EnvironmentFailed(FORGED)
        if ids is not None and not are_ids(ids):
            raise EnvironmentFailed(FORGED)
        episode.opening = str(found["said"]) if messages is None else Asked(messages, tools, ids)
        if not _is_of(episode.start, episode.opening):
            raise EnvironmentFailed(
                "what it says at its beginning must follow from its seed and row: it is not its group's prompt"
            )

    def _meet(self, episode: _Episode, server: EnvironmentServer) -> None:
        """Its process's first word, so that the system says who it is."""
        episode.line, theirs = socket.socketpair()
        episode.line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with theirs:
            try:
                server.hand_over(theirs)
            except OSError:
                raise ProcessEnded("the process that makes environments is gone") from None
        self._call(episode, "reset", episode.start.seed, episode.start.columns)

    def _successor(self, server: EnvironmentServer) -> EnvironmentServer:
        """The server now, after one of whose forks has ended before it began."""
        with self._starting:
            if self._is_closed:
                raise EnvironmentFailed("it is over")
            if self._server is server and (why := server.how_it_ended()):
                log.warning("environments: the process that makes them has ended (%s); another is started", why)
                server.close()
                try:
                    self._server = self._start()
                except ValueError as error:
                    raise EnvironmentFailed(str(error)) from None
            return self._server

    def _call(self, episode: _Episode, *request: Any) -> dict[str, Any]:
        try:
            self._send(episode, request, self._config.timeout_s)
        except TimeoutError:
            raise self._too_late() from None
        except OSError:
            pass  # it has ended: how is what there is to read
        return self._receive(episode)

    def _send(self, episode: _Episode, request: Request, limit_s: float) -> None:
        assert episode.line is not None
        message = pickle.dumps(request)
        episode.line.settimeout(limit_s)
        episode.line.sendall(struct.pack("!Q", len(message)) + message)

    def _receive(self, episode: _Episode) -> dict[str, Any]:
        """The next line of its process, within environment.timeout_s."""
        deadline = time.monotonic() + self._config.timeout_s
        while b"\n" not in episode.unread:
            if len(episode.unread) > MOST_UNREAD:
                raise EnvironmentFailed(FORGED)
            episode.unread += self._read(episode, deadline - time.monotonic())
        text, _, episode.unread = episode.unread.partition(b"\n")
        self.num_replies += 1
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
        if read.startswith(DIED):  # alone: bytes of two processes never come together
            raise ProcessEnded(f"its process died ({read[len(DIED) :].decode(errors='replace')})")
        if read.startswith(REFUSED):
            raise EnvironmentFailed(read[len(REFUSED) :].decode(errors="replace"))
        for level, kind, data in ancillary:
            if not episode.pid and (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                episode.pid = CREDENTIALS.unpack(data[: CREDENTIALS.size])[0]
        return read

    def _too_late(self) -> EnvironmentFailed:
        return EnvironmentFailed(f"timed out after {self._config.timeout_s:g} s (environment.timeout_s)")

    def _release(self, episode: _Episode) -> None:
        """End it; one that is in no call is closed first, without being waited for here."""
        if self._config.factory is not None and episode.pid and episode.lock.acquire(blocking=False):
            with contextlib.suppress(RuntimeError):  # the host is closed
                self._closing.submit(self._close, episode)
                return
        self._end(episode)

    def _close(self, episode: _Episode) -> None:
        """Let it give back what it holds outside its process, which would outlive it; then end it."""
        limit_s = max(0.0, min(CLOSE_LIMIT_S, self._closed_by - time.monotonic()))
        with contextlib.suppress(OSError):
            self._send(episode, ("close",), limit_s)
            if episode.line is not None:
                episode.line.recv(1)
        self._end(episode)
        episode.lock.release()

    def _end(self, episode: _Episode) -> None:
        """Its process and what it started, also one that does not answer."""
        if episode.line is not None:
            episode.line.close()
        if episode.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(episode.pid, signal.SIGKILL)
        episode.pid = 0


def _is_of(start: EpisodeStart, opening: Opening) -> bool:
    """Whether a prompt that was opened with `start` has this opening."""
    if start.messages is not None:
        return opening == Asked(start.messages, list(start.tools), start.token_ids)
    return start.said in (None, opening)


def _is_reply(found: dict[str, Any], what: str, *given: Any) -> bool:
    """Whether it is what environment_process answers to the request."""
    said = found.get("said")
    if what == "call":
        lists = found.get("lists", {})
        if not isinstance(lists, dict) or not all(isinstance(each, list) for each in lists.values()):
            return False
        return isinstance(said, list) and len(said) == len(given[0]) and all(isinstance(text, str) for text in said)
    if what == "act":
        answers, called = found.get("answers", []), len(given[2]) if len(given) > 2 else 0
        if not isinstance(answers, list) or not all(map(_is_text, answers)):
            return False
        if not isinstance(said, str) or not isinstance(found.get("ended"), bool):
            return False
        if not are_ids(found.get("token_ids", [])):
            return False
        return (found["ended"] or len(answers) == called) and _is_number(found.get("reward"))
    functions, reported = found.get("functions"), found.get("reported")
    if "reward" not in found or not isinstance(functions, dict) or not isinstance(reported, dict):
        return False
    numbers = [found["reward"], *functions.values(), *reported.values()]
    return all(number is None or _is_number(number) for number in numbers)


def _are_messages(found: Any) -> bool:
    return isinstance(found, list) and all(
        isinstance(each, dict) and sorted(each) == ["content", "role"] and all(map(_is_text, each.values()))
        for each in found
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)

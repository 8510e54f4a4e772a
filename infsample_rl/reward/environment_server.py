"""The process that has imported a user's environment and forks itself for every trajectory: its parent's side."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from infsample_rl.config import Config, RewardFunctionConfig
from infsample_rl.reward.functions import component_names, files_of, kind_of
from infsample_rl.reward.isolation import START_LIMIT_S, end_keeper, folders_of, isolation_of, start_keeper

GONE_LIMIT_S = 2.0  # until a keeper whose server has ended is gone too
MOST_PROCESSES = 20_000  # one for every trajectory that has begun, and what they start


def environment_functions(config: Config) -> dict[str, RewardFunctionConfig]:
    """By the names of their rewards, functions of reward.functions that may take environments: their file has the
    word."""
    functions = config.reward.functions
    named = zip(component_names(functions), functions, strict=True)
    users = {name: each for name, each in named if kind_of(each.name) == "user"}
    files = {name: Path(each.name.rpartition(":")[0]) for name, each in users.items()}
    return {name: each for name, each in users.items() if b"environments" in files[name].read_bytes()}


class EnvironmentServer:
    """reward/environment_process.py behind its keeper, held to reward.isolation."""

    def __init__(self, config: Config, python: str = sys.executable) -> None:
        """Import the user's files there, of the interpreter `python`; ValueError in one line when they cannot be
        had."""
        own, functions = config.environment, environment_functions(config)
        files = [*own.files, *files_of(functions.values())]
        isolation = replace(
            isolation_of(config.reward, files),
            most_processes=MOST_PROCESSES,
            ends_orphans=True,
            held="an environment",
        )
        if python != sys.executable:  # the driver's, with the user's libraries, where this process has vLLM's
            isolation.read.extend(folders_of(python) if isolation.read else [])
        self._control, theirs = socket.socketpair()
        self._hand_over = threading.Lock()
        with theirs:
            try:
                self._keeper = start_keeper(
                    isolation, "infsample_rl.reward.environment_process", python, pass_fds=[theirs.fileno()]
                )
            except OSError as error:
                self._control.close()
                raise ValueError(f"environment: {python} cannot be started ({error.strerror})") from None
            assert self._keeper.stdin is not None
            self._requests = Connection(os.dup(self._keeper.stdin.fileno()), readable=False)
            self._keeper.stdin.close()
            self._requests.send_bytes(pickle.dumps((own, functions, theirs.fileno())))
        started = self._read_start(", ".join(dict.fromkeys(files)))
        if "error" in started:
            self.close()
            raise ValueError(started["error"])
        self.form: str = started["form"]
        self.rewards: bool = started["rewards"]
        self.columns: dict[str, list[str]] = started["columns"]
        self.tools: dict[str, list[dict[str, Any]]] = started["tools"]

    def hand_over(self, line: socket.socket) -> None:
        """Let a new fork of it serve this line. OSError where it is gone."""
        with self._hand_over:
            socket.send_fds(self._control, [b"\0"], [line.fileno()])

    def how_it_ended(self) -> str:
        """ "" while it lives, for a moment at least."""
        try:
            self._keeper.wait(GONE_LIMIT_S)
        except subprocess.TimeoutExpired:
            return ""
        assert self._keeper.stdout is not None
        os.set_blocking(self._keeper.stdout.fileno(), False)
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(json.loads(os.read(self._keeper.stdout.fileno(), 1 << 16))["died"])
        return "its keeper was killed"

    def close(self) -> None:
        """End it, and all that it has forked."""
        self._control.close()
        self._requests.close()
        end_keeper(self._keeper)
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()

    def _read_start(self, files: str) -> dict[str, Any]:
        """What it says once it has imported everything."""
        assert self._keeper.stdout is not None
        deadline, text = time.monotonic() + START_LIMIT_S, b""
        while b"\n" not in text.lstrip(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not wait([self._keeper.stdout.fileno()], left):
                self.close()
                raise ValueError(f"environment: importing {files} did not end in {START_LIMIT_S:.0f} s")
            read = os.read(self._keeper.stdout.fileno(), 1 << 16)
            if not read:
                return {"error": f"environment: the process that imports {files} died"}
            text += read
        found: dict[str, Any] = json.loads(text.lstrip(b"\n").split(b"\n")[0])
        if "died" in found:
            return {"error": f"environment: the process that imports {files} died ({found['died']})"}
        return found

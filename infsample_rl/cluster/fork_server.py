"""A process that has imported what workers need, and forks one whenever Ray starts one here: that takes milliseconds
where the imports take seconds of a core, once for every worker and again for every one that is replaced.

Ray starts a worker by `py_executable` and the worker's script with its arguments (a public part of its runtime
environment). Ours is this file: it asks the fork server, which runs the script in a fork; without a fork server, or
where the worker's environment differs in what is read at a process's start, it runs the script itself. Standard library
only at its top: this file is run by itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import secrets
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

# What workers import, whatever their role; not Ray, which takes its settings from the environment where it is imported.
LIBRARIES = (
    "torch",
    "transformers.conversion_mapping",
    "transformers.modeling_utils",
    "infsample_rl.rollout.worker",
    "infsample_rl.reward.worker",
)
# Read when a process starts or when these are imported. A worker that wants others is not forked.
AT_START = ("LD_PRELOAD", "MALLOC_CONF", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_DISABLE_FAST_MM", "PYTHONPATH")
IMPORTS_S = 120.0  # within which the server has imported them, and answers
REQUEST_S = 5.0  # within which a request is whole
NICENESS = 10  # no worker is needed before the driver and Ray are there; Ray's workers have 15
FORKED = b"forked"
OOM_SCORE = Path("/proc/self/oom_score_adj")


class ForkServer:
    """The driver's side. The server ends with the driver, however that ends; its workers end as Ray's do."""

    def __init__(self, environment: dict[str, str]) -> None:
        """Start it with the environment of the workers. OSError where no process can be started."""
        name = f"infsample_rl-{secrets.token_hex(16)}"
        self._lifeline, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0{name}")  # no file, so none is left behind; who may connect is _read's to say
            listener.listen(128)
            handed = (listener.fileno(), theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, __file__, "serve", *map(str, handed)],
                pass_fds=handed,
                env=environment,
                start_new_session=True,  # a Ctrl-C is for the driver
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self.py_executable = shlex.join([sys.executable, "-I", "-S", __file__, "ask", name])


def _serve(listener: socket.socket, lifeline: socket.socket) -> dict[str, Any] | None:
    """Fork workers until the driver is gone: None then. In a fork: what was asked for."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    while lifeline not in select.select([listener, lifeline], [], [])[0]:
        asker, _ = listener.accept()
        with asker:
            request = _read(asker)
            if request is None:
                continue
            if os.fork() == 0:
                listener.close()
                lifeline.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return request
            for file in request["files"]:
                os.close(file)
            with contextlib.suppress(OSError):  # it was killed meanwhile
                asker.sendall(FORKED)
    return None


def _read(asker: socket.socket) -> dict[str, Any] | None:
    """A request of this user's, with its standard streams as "files"; None where it cannot be forked from here."""
    _, user, _ = struct.unpack("3i", asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    asker.settimeout(REQUEST_S)
    files, text = list[int](), b""
    try:
        if user == os.getuid():
            _, files, _, _ = socket.recv_fds(asker, 1, 3)
            while part := asker.recv(2**16):
                text += part
            request = json.loads(text)
            wanted = [(name, value) for name, value in request["environment"].items() if name in AT_START]
            if len(files) == 3 and all(os.environ.get(name) == value for name, value in wanted):
                return request | {"files": files}
    except (OSError, ValueError, LookupError, TypeError):
        pass  # gone, or no request
    for file in files:
        os.close(file)
    return None


def _ask(name: str, arguments: list[str]) -> bool:
    """Whether the fork server runs the script with these arguments in a fork."""
    request: dict[str, Any] = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    request |= {"niceness": os.nice(0), "oom_score": int(OOM_SCORE.read_text())}  # Ray has set both
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server, contextlib.suppress(OSError):
        server.settimeout(IMPORTS_S)
        server.connect(f"\0{name}")
        socket.send_fds(server, [b"\0"], [0, 1, 2])
        server.sendall(json.dumps(request).encode())
        server.shutdown(socket.SHUT_WR)
        return server.recv(len(FORKED)) == FORKED
    return False


def _run(request: dict[str, Any], made: dict[str, str]) -> None:
    """Run the script that was asked for, as the interpreter would in place of the asker. `made`: environment variables
    of the libraries' own."""
    for number, file in enumerate(request["files"]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.setpgid(0, 0)  # as Ray's workers
    os.nice(max(0, request["niceness"] - os.nice(0)))
    with contextlib.suppress(OSError):  # a container may forbid it
        OOM_SCORE.write_text(str(request["oom_score"]))
    os.environ.clear()
    os.environ.update(made | request["environment"])
    sys.argv = request["arguments"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """`ask NAME SCRIPT ...`, as Ray calls it, or `serve LISTENER LIFELINE`."""
    if sys.argv[1] == "ask":
        name, arguments = sys.argv[2], sys.argv[3:]
        if not _ask(name, arguments):
            os.execv(sys.executable, [sys.executable, *arguments])
        return
    listener, lifeline = (socket.socket(fileno=int(number)) for number in sys.argv[2:4])
    del sys.path[0]  # this folder, whose modules are no top-level ones
    given = dict(os.environ)
    os.nice(NICENESS)
    gc.disable()
    for library in LIBRARIES:
        import_module(library)
    gc.freeze()
    gc.enable()
    request = _serve(listener, lifeline)
    if request is not None:
        _run(request, {name: value for name, value in os.environ.items() if given.get(name) != value})


if __name__ == "__main__":
    main()

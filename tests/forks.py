"""Processes of tests as forks of one that has imported the libraries of all, once for a whole run of tests: a run of
two steps is a second of work after ten seconds of imports in its driver and ten in its workers."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

from infsample_rl.cluster import local_ray
from infsample_rl.cluster.fork_server import ForkServer
from infsample_rl.cluster.worker_environment import allocator_environment, worker_environment
from infsample_rl.config.loading import load_config

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["tests.learner_ranks", "infsample_rl.learner.fsdp_backend", "deepspeed", "infsample_rl.controller.driver"]
)  # what is missing is left out


def start_fork(process: multiprocessing.process.BaseProcess) -> None:
    """Start a process of FORKS; the first of all starts the process that they are forks of."""
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}):
        process.start()


def run_module(module: str, arguments: list[str], folder: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments` in a folder, with what it printed; the workers of a run are forks of one process
    that serves all runs."""
    said = folder / "said.by.command"
    workers = _workers().py_executable
    process = FORKS.Process(target=_be, args=(module, arguments, folder, said, dict(os.environ), workers))
    start_fork(process)
    try:
        process.join(timeout)
        if process.exitcode is None:
            raise subprocess.TimeoutExpired([module, *arguments], timeout, said.read_text())
    finally:
        process.kill()
    text = said.read_text()
    said.unlink()
    return subprocess.CompletedProcess([module, *arguments], process.exitcode, text)


@functools.cache
def _workers() -> ForkServer:
    settings = load_config([])
    return ForkServer(dict(os.environ) | worker_environment(settings) | allocator_environment("rollout", gpus=0))


def _be(module: str, arguments: list[str], folder: Path, said: Path, environment: dict[str, str], workers: str) -> None:
    """Be the command, as the interpreter would be that was started for it."""
    with open(said, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    local_ray._start_fork_server = lambda config: setattr(local_ray, "_fork_server", mock.Mock(py_executable=workers))
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which a fork of multiprocessing leaves out

"""Samples for a command, without Ray: by a rollout worker here, or by one in the interpreter that has vLLM.

the command                     python -m infsample_rl.commands.sampling_process FD
Config, list[RolloutWork]   ->
                            <-  list[Completion], every micro-group as soon as its samples have ended
                            <-  None when all have, or what was raised
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

from transformers import PreTrainedModel

from infsample_rl.cluster.environments import environments_of
from infsample_rl.cluster.rollout_interpreter import DRIVERS_PYTHON, rollout_interpreter
from infsample_rl.cluster.worker_environment import worker_environment
from infsample_rl.config import Config
from infsample_rl.reward.keeper import how_ended
from infsample_rl.reward.linux_sandbox import DEATH_SIGNAL, prctl
from infsample_rl.rollout.environment.episodes import Environments
from infsample_rl.rollout.worker import RolloutWorker
from infsample_rl.types import Completion, RolloutWork

END_S = 10.0  # in which a process whose work is done ends


def sample_held_out(
    config: Config, work: list[RolloutWork], model: PreTrainedModel | None, environments: Environments | None
) -> Iterator[list[Completion]]:
    """Micro-groups, sampled as held-out problems are. `model`, `environments`: of a worker here, with the native
    engine; one with vLLM loads model.path, and starts its own. ValueError, RuntimeError for what is raised there."""
    python = rollout_interpreter(config)
    if python is not None:
        yield from _sample_in(python, config, work)
        return
    worker = RolloutWorker(config, 0, model, environments=environments)
    yield from (item for item in worker.stream(work, step=0, evaluation=True) if isinstance(item, list))


def _sample_in(python: str, config: Config, work: list[RolloutWork]) -> Iterator[list[Completion]]:
    here, there = socket.socketpair()
    process = subprocess.Popen(
        [python, "-m", __name__, str(there.fileno())],
        env=os.environ | worker_environment(config) | {DRIVERS_PYTHON: sys.executable},
        stdin=subprocess.DEVNULL,
        stdout=2,  # what vLLM prints is no result of the command
        pass_fds=[there.fileno()],
        start_new_session=True,  # Ctrl-C is the command's, which then ends it
    )
    there.close()
    try:
        with Connection(here.detach()) as connection:
            connection.send((config, work))
            while (said := connection.recv()) is not None:
                if isinstance(said, Exception):
                    raise said
                yield said
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    except (EOFError, ConnectionError):
        raise RuntimeError(f"the process that samples with vLLM died ({how_ended(process.wait())})") from None
    finally:
        process.kill()
        process.wait()


def main(descriptor: int) -> None:
    """Sample what the command asks for over this socket."""
    prctl(DEATH_SIGNAL, signal.SIGKILL)
    with Connection(descriptor) as connection:
        config, work = connection.recv()
        environments = environments_of(config)
        try:
            worker = RolloutWorker(config, 0, environments=environments)
            for item in worker.stream(work, step=0, evaluation=True):
                if isinstance(item, list):
                    connection.send(item)
            connection.send(None)
        except Exception as error:  # of any kind, for the command to say
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            connection.send(kind(str(error) or type(error).__name__))
        finally:
            if environments is not None:
                environments.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))

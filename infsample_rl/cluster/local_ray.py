"""Starting Ray on this machine, for a run that joins no cluster. Imports neither torch nor transformers: Ray's
processes come up while a driver imports those."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray._private import ray_constants, services, utils
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token
from ray._private.node import Node

from infsample_rl.cluster.fork_server import ForkServer
from infsample_rl.cluster.worker_environment import allocator_environment, worker_environment
from infsample_rl.cluster.worker_secrets import without_secrets
from infsample_rl.config import Config
from infsample_rl.plan.placement import WorkerGroup, local_cpus, worker_groups

START_ATTEMPTS = 3
# Every actor here has an environment of its own, which a worker that Ray starts for nobody cannot serve.
NO_IDLE_WORKERS = ("RAY_prestart_worker_first_driver", "RAY_enable_worker_prestart")
# What of a node serves other nodes, dashboards and drivers that show their workers' output. Nothing here uses it, and
# it takes half of the time until Ray is there.
NEEDLESS = ("start_api_server", "start_monitor", "start_log_monitor")
_fork_server: ForkServer | None = None
_session_folder: Path | None = None  # Ray's, of the cluster that this process has started


@contextlib.contextmanager
def no_session_left_if_refused() -> Iterator[None]:
    """Where the block refuses the run (ValueError), end the cluster that it started here and remove its folder: a
    session of no run has nothing to read in its logs, and Ray itself never removes one."""
    global _session_folder
    _session_folder = None
    try:
        yield
    except ValueError:
        if _session_folder is not None:
            ray.shutdown()
            latest = _session_folder.with_name(ray_constants.SESSION_LATEST)
            if latest.is_symlink() and latest.readlink() == _session_folder:  # else of a cluster that started later
                latest.unlink(missing_ok=True)
            shutil.rmtree(_session_folder, ignore_errors=True)
        raise


def start_local(config: Config, note: Callable[[str], None]) -> None:
    """A new cluster on this machine, unless this process is in one; its ports listen on the loopback address alone.

    Ray itself takes the token from its file. RuntimeError where Ray does not start, ValueError without that file.
    """
    global _session_folder
    if ray.is_initialized():
        return
    _make_token()
    keep_token_private(note)
    os.environ.update(dict.fromkeys(NO_IDLE_WORKERS, "0"))  # Ray's processes take it from here
    with _started_without_secrets(), _small_node(), without_rays_sigterm_handler():
        _start_fork_server(config)
        for attempts_left in reversed(range(START_ATTEMPTS)):
            try:
                context: Any = ray.init(
                    address="local", num_cpus=local_cpus(config), include_dashboard=False, **init_arguments(config)
                )
                break
            except Exception as error:  # Ray raises a bare one
                if not attempts_left or "timed out during startup" not in str(error):
                    raise RuntimeError(f"Ray could not be started here: {error}") from error
                note(
                    "warning: Ray's processes were not up within its 30 s, which a busy machine may need: they are "
                    "started again"
                )
                ray.shutdown()
    _session_folder = Path(context.address_info["session_dir"])
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        note(
            "Ray starts without authentication (RAY_AUTH_MODE): whoever reaches this machine's ports can run code on it"
        )


def _start_fork_server(config: Config) -> None:
    global _fork_server
    if any(forks(group) for group in worker_groups(config)):
        variables = worker_environment(config) | allocator_environment("rollout", gpus=0)
        _fork_server = ForkServer(without_secrets(os.environ) | variables)


def forks(group: WorkerGroup) -> bool:
    """Whether workers like these are forked. Those on a GPU are not: that has not been tried on one."""
    return group.gpus == 0 and sys.platform == "linux"


def forked_python() -> str | None:
    """What Ray calls as Python to have a worker forked; None where this process has started no Ray."""
    return None if _fork_server is None else _fork_server.py_executable


def init_arguments(config: Config) -> dict[str, Any]:
    """Arguments of ray.init(), for a cluster of this machine and for others."""
    return {
        "runtime_env": {"env_vars": worker_environment(config)},
        "log_to_driver": False,
        "logging_level": "ERROR",
    }


@contextlib.contextmanager
def _started_without_secrets() -> Iterator[None]:
    """Keep keys out of the environment of processes that Ray starts inside the block. This process keeps its own, which
    checks beside Ray's start read. AttributeError with a Ray that starts its processes otherwise."""
    start: Callable[..., Any] = services.ConsolePopen

    def start_keyless(*arguments: Any, env: dict[str, str], **settings: Any) -> Any:
        return start(*arguments, env=without_secrets(env), **settings)

    with mock.patch.object(services, "ConsolePopen", start_keyless):
        yield


@contextlib.contextmanager
def _small_node() -> Iterator[None]:
    """Let a node that Ray starts inside the block listen on the loopback address, and leave out what is NEEDLESS, for
    which Ray has no switch."""
    with on_loopback_address(), contextlib.ExitStack() as patches:
        for name in NEEDLESS:
            if hasattr(Node, name):
                patches.enter_context(mock.patch.object(Node, name, lambda self, **settings: None))
        yield


def on_loopback_address() -> contextlib.AbstractContextManager[Any]:
    """Let this machine be 127.0.0.1 to Ray inside the block, not an address that others reach. Ray's own switch is read
    where it is imported, before it is known which cluster a run joins."""
    return mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False)


@contextlib.contextmanager
def without_rays_sigterm_handler() -> Iterator[None]:
    """Leave SIGTERM's handler the caller's all through ray.init(), which would put its own in its place. That one
    raises SystemExit, wherever it is: in an import's callbacks it is dropped, and the lock of the import stays held."""
    handler = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    try:
        with mock.patch.object(utils, "set_sigterm_handler", lambda handler: None):
            yield
    finally:  # below Python, Ray's C++ has put one before it that prints a stack
        signal.signal(signal.SIGTERM, handler)


def _make_token() -> None:
    """Make the file of Ray's token where there is none yet, with no mode of the umask's. ValueError where it cannot be
    made."""
    path = _token_path()
    try:
        if path is not None and not path.exists():
            path.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError), open(path, "x", opener=partial(os.open, mode=0o600)) as file:
                file.write(generate_new_authentication_token())
    except OSError as error:
        raise ValueError(
            f"Ray's token cannot be kept in {path} ({error.strerror}): set RAY_AUTH_TOKEN_PATH to a file in a folder "
            "that you may write to"
        ) from None


def keep_token_private(note: Callable[[str], None]) -> None:
    """Give the file of Ray's token mode 600, whoever made it."""
    path = _token_path()
    if path is not None and os.path.isfile(path) and path.stat().st_mode & 0o077:
        try:
            path.chmod(0o600)
        except OSError as error:  # another user's, or a pod's read-only volume
            note(f"warning: others can read {path}, the cluster's token, and its mode stays ({error.strerror})")


def _token_path() -> Path | None:
    """Where Ray looks for its token; None where it needs no file."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or "RAY_AUTH_TOKEN" in os.environ:
        return None
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")

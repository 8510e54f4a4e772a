"""Joining a Ray cluster or starting one here: address, token, what processes inherit, whether Ray still lives."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.grpc_utils import init_grpc_channel
from ray._private.services import JEMALLOC_SO, canonicalize_bootstrap_address
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from infsample_rl.cluster.interruption import Interruption, Terminated
from infsample_rl.cluster.worker_secrets import without_secrets
from infsample_rl.config import Config
from infsample_rl.model.peak_memory import FEW_COMPILED_PRODUCTS
from infsample_rl.plan.placement import local_cpus

PROBE_TIMEOUT_S = 5.0  # for the cluster's control service to answer one small call
CONNECT_TIMEOUT_S = 1.0
RETRY_S = 2.0
START_ATTEMPTS = 3  # of a local cluster
RAYLET_GONE_S = 3.0  # without an answer: nobody starts it again
# a cluster that keeps its state in Redis may start it again; after 60 s Ray ends every process
CONTROL_SERVICE_GONE_S = 20.0
# Every actor here has an environment of its own, which a worker that Ray starts for nobody cannot serve.
NO_IDLE_WORKERS = ("RAY_prestart_worker_first_driver", "RAY_enable_worker_prestart")
TENSOR_ROLES = ("rollout", "reference", "learner")


def connect(config: Config, note: Callable[[str], None], interruption: Interruption) -> None:
    """Start a local cluster, or join cluster.address. ValueError for one that is not there, refuses us, or lets anybody
    in; Terminated after SIGTERM, whose handler stays the caller's: Ray puts its own in its place, which exits."""
    _keep_token_private(note)
    handler = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    arguments: dict[str, Any] = {
        "runtime_env": {"env_vars": worker_environment(config)},
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    try:
        if config.cluster.address is None:
            _start_local(config, arguments, note)
        else:
            _join(config, arguments, note, interruption)
    except SystemExit as ended:  # by Ray's handler
        raise Terminated from ended
    finally:
        signal.signal(signal.SIGTERM, handler)
    interruption.check()


class RayProcesses:
    """The two processes of Ray without which a run cannot go on. Without the raylet of its node a driver waits for ever
    for workers to start; without the cluster's control service Ray ends it after a minute, nothing saved."""

    def __init__(self) -> None:
        """Of the cluster this process is connected to."""
        context = ray.get_runtime_context()
        node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        host, _, port = context.gcs_address.rpartition(":")
        self._processes = [
            ("Ray's raylet on the driver's node", (node["NodeManagerAddress"], node["NodeManagerPort"]), RAYLET_GONE_S),
            ("Ray's control service (gcs_server)", (host.strip("[]"), int(port)), CONTROL_SERVICE_GONE_S),
        ]
        self._silent_since: dict[str, float] = {}

    def failure(self) -> str | None:
        """Which of them has not taken a connection for so long that it is gone; None while both are there."""
        for name, (host, port), limit_s in self._processes:
            if _listens(host, port):
                self._silent_since.pop(name, None)
            elif (silent_s := time.monotonic() - self._silent_since.setdefault(name, time.monotonic())) >= limit_s:
                return f"{name} has not answered at {host}:{port} for {silent_s:.0f} s"
        return None


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def worker_environment(config: Config) -> dict[str, str]:
    """Environment variables of every worker. Dashboards show them: no secret may be among them (worker_secrets.py)."""
    threads = str(config.cluster.threads_per_worker)
    package = str(Path(__file__).resolve().parents[2])
    python_path = os.pathsep.join(path for path in (package, os.environ.get("PYTHONPATH", "")) if path)
    environment = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": python_path,
    }
    if config.cluster.address is None:  # this machine: nothing has to come from another one
        loopback = socket.if_indextoname(1)
        environment |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return environment


def allocator_environment(role: str, gpus: float, *, samples: bool = False) -> dict[str, str]:
    """Environment variables that give a worker with tensors in host memory the jemalloc that Ray brings; nothing where
    another library is preloaded.

    glibc keeps much of what a learner row frees, so that its peak grows from step to step. Without
    `oversize_threshold:0` jemalloc would return every tensor of 8 MB and more at once (docs/plan.md). MKL keeps the
    buffers of its products, 10 to 45 MB a thread, unless it is told not to. Who runs rows keeps few compiled products;
    not who `samples`, whose row counts come back.
    """
    if role not in TENSOR_ROLES or gpus > 0 or JEMALLOC_SO is None or "LD_PRELOAD" in os.environ:
        return {}
    found = {"LD_PRELOAD": JEMALLOC_SO, "MALLOC_CONF": "oversize_threshold:0", "MKL_DISABLE_FAST_MM": "1"}
    return found if samples or role == "rollout" else found | FEW_COMPILED_PRODUCTS


def _start_local(config: Config, arguments: dict[str, Any], note: Callable[[str], None]) -> None:
    """A new cluster on this machine, whose ports listen on the loopback address alone; Ray itself takes the token of
    this user's home folder."""
    os.environ.update(dict.fromkeys(NO_IDLE_WORKERS, "0"))  # Ray's processes take it from here
    with without_secrets(), _on_loopback():
        for attempts_left in reversed(range(START_ATTEMPTS)):
            try:
                ray.init(address="local", num_cpus=local_cpus(config), include_dashboard=False, **arguments)
                break
            except Exception as error:  # Ray raises a bare one
                if not attempts_left or "timed out during startup" not in str(error):
                    raise RuntimeError(f"Ray could not be started here: {error}") from error
                note(
                    "warning: Ray's processes were not up within its 30 s, which a busy machine may need: they are "
                    "started again"
                )
                ray.shutdown()
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        note(
            "Ray starts without authentication (RAY_AUTH_MODE): whoever reaches this machine's ports can run code on it"
        )


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray take the loopback address for a node that is started inside the block. Its own switch for that is read
    where Ray is imported, before it is known whether a run joins a cluster."""
    kept = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = kept


def _keep_token_private(note: Callable[[str], None]) -> None:
    """Give the file of Ray's token mode 600, whoever made it; make it where Ray would, with the umask's mode."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or "RAY_AUTH_TOKEN" in os.environ:
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if "RAY_AUTH_TOKEN_PATH" not in os.environ and not path.exists():
        path.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError), open(path, "x", opener=partial(os.open, mode=0o600)) as file:
            file.write(generate_new_authentication_token())
    if path.is_file() and path.stat().st_mode & 0o077:
        try:
            path.chmod(0o600)
        except OSError as error:  # another user's, or a pod's read-only volume
            note(f"warning: others can read {path}, the cluster's token, and its mode stays ({error.strerror})")


def _join(config: Config, arguments: dict[str, Any], note: Callable[[str], None], interruption: Interruption) -> None:
    address = _find(config, note, interruption)
    there = f"the Ray cluster at {address}"
    if _uses_tls():
        pass  # a client certificate takes the token's place
    elif _probe(address) is None:
        if not config.cluster.allow_unauthenticated:
            raise ValueError(
                f"cluster.address={config.cluster.address}: {there} asks for no token, so whoever reaches its ports "
                "can run code on it; turn authentication on: `ray get-auth-token --generate` once, the token's file on "
                "every node, and RAY_AUTH_MODE=token with RAY_AUTH_TOKEN_PATH=FILE for `ray start` and for this "
                "command; or accept it with cluster.allow_unauthenticated=true"
            )
        note(f"warning: {there} asks for no token (cluster.allow_unauthenticated=true)")
    elif not _has_token_of(address):
        # Ray itself would try for 20 s, and then say less
        raise ValueError(
            f"cluster.address={config.cluster.address}: {there} asks for a token, and this process has none or "
            "another; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE, the file of the cluster's token"
        )
    ray.init(address=address, **arguments)


def _has_token_of(address: str) -> bool:
    try:
        has_one = maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    except ray.exceptions.AuthenticationError:  # a file that is not there, or empty
        return False
    return has_one and _probe(address, with_token=True) != grpc.StatusCode.UNAUTHENTICATED


def _find(config: Config, note: Callable[[str], None], interruption: Interruption) -> str:
    """host:port of the cluster's control service, once it answers; waited for as long as for nodes."""
    started, limit = time.monotonic(), config.cluster.wait_for_nodes_s
    while True:
        try:
            # None: this machine's own
            address = canonicalize_bootstrap_address(config.cluster.address)  # type: ignore[arg-type]
            if address is not None and _answers(address):
                return address
            problem = f"nothing answers at {address}"
        except (ConnectionError, OSError) as error:
            problem = str(error).splitlines()[0]
        waited = time.monotonic() - started
        if waited >= limit:
            raise ValueError(
                f"cluster.address={config.cluster.address}: {problem}; start Ray there, or leave cluster.address out"
            )
        note(f"waiting for the Ray cluster at {config.cluster.address}: {problem}; {waited:.0f} of {limit:g} s")
        interruption.sleep(min(RETRY_S, limit - waited))


def _answers(address: str) -> bool:
    return _uses_tls() or _probe(address) not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _probe(address: str, *, with_token: bool = False) -> grpc.StatusCode | None:
    """Ask the cluster's control service for its id: none when it answers, else gRPC's reason."""
    open_channel = init_grpc_channel if with_token else grpc.insecure_channel  # Ray's own sends the token
    with open_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            # protobuf makes the module's classes at import
            request = gcs_service_pb2.GetClusterIdRequest()  # type: ignore[attr-defined]
            stub.GetClusterId(request, timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code()
    return None

"""Joining a Ray cluster: address, token, whether Ray still lives."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import grpc
import ray
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.grpc_utils import init_grpc_channel
from ray._private.services import canonicalize_bootstrap_address, is_localhost, parse_address
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from infsample_rl.cluster.interruption import Interruption
from infsample_rl.cluster.local_ray import (
    init_arguments,
    keep_token_private,
    on_loopback_address,
    start_local,
    without_rays_sigterm_handler,
)
from infsample_rl.config import Config

PROBE_TIMEOUT_S = 5.0  # for the cluster's control service to answer one small call
CONNECT_TIMEOUT_S = 1.0
RETRY_S = 2.0
RAYLET_GONE_S = 3.0  # without an answer: nobody starts it again
# a cluster that keeps its state in Redis may start it again; after 60 s Ray ends every process
CONTROL_SERVICE_GONE_S = 20.0


def connect(config: Config, note: Callable[[str], None], interruption: Interruption) -> None:
    """Join cluster.address; without one start a cluster here, unless that has been done. ValueError for one that is not
    there, refuses us, or lets anybody in; Terminated after SIGTERM."""
    if config.cluster.address is None:
        start_local(config, note)
    else:
        keep_token_private(note)
        address = _admitting_address(config, note, interruption)
        is_loopback = is_localhost(parse_address(address)[0])
        with without_rays_sigterm_handler(), on_loopback_address() if is_loopback else nullcontext():
            ray.init(address=address, **init_arguments(config))
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


def _admitting_address(config: Config, note: Callable[[str], None], interruption: Interruption) -> str:
    """host:port of the cluster; ValueError for one that lets anybody in, or not us."""
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
    return address


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
            addresses = _meant_by(config.cluster.address)
            for address in addresses:
                if _answers(address):
                    return address
            problem = f"nothing answers at {' or '.join(addresses) or config.cluster.address}"
        except (ConnectionError, OSError) as error:
            problem = str(error).splitlines()[0]
        waited = time.monotonic() - started
        if waited >= limit:
            raise ValueError(
                f"cluster.address={config.cluster.address}: {problem}; start Ray there, or leave cluster.address out"
            )
        note(f"waiting for the Ray cluster at {config.cluster.address}: {problem}; {waited:.0f} of {limit:g} s")
        interruption.sleep(min(RETRY_S, limit - waited))


def _meant_by(address: Any) -> list[str]:
    """Where a cluster of this address may answer. Ray takes 127.0.0.1 for the address by which others reach this
    machine, but a cluster that a run or ray.init() has started listens on the loopback one."""
    with on_loopback_address():
        by_loopback = canonicalize_bootstrap_address(address)
    found = [canonicalize_bootstrap_address(address), by_loopback]
    return [each for each in dict.fromkeys(found) if each is not None]


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

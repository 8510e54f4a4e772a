"""The policy of a program that calls it itself: in the program's own process, on 127.0.0.1, with a key. An answer is
the turn that the run's engine samples, whenever that is. Standard library only."""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from infsample_rl.reward.policy_conversation import ROUTES, Asked, Conversation, PolicyTurn
from infsample_rl.reward.policy_requests import (
    MODELS,
    Refused,
    body_size,
    list_models,
    read_json,
    reason_phrase,
    refusal,
)

LARGEST_BODY = 1 << 24
LINGER_S = 2.0  # for a client to read why its request is refused
OVER = "the trajectory gets no further turn (environment.max_turns, rollout.max_new_tokens): return its reward"
Reply = queue.SimpleQueue[dict[str, Any] | Refused]


class PolicyEndpoint:
    """One program's policy. `asked` has one request after another; `answer` answers the last."""

    def __init__(self) -> None:
        self.key, self.is_over = secrets.token_urlsafe(), False  # whether no turn is sampled any more
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.endpoint = self
        self.asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()  # None, of its owner: no more come
        self._reply: Reply = queue.SimpleQueue()  # of the request that waits
        self._conversations: dict[str, Conversation] = {path: kind() for path, kind in ROUTES.items()}
        self._path = ""  # by which the trajectory began
        self._last, self._waits, self._lock = Asked([]), False, threading.Lock()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def base_url(self) -> str:
        """As OpenAI's client takes it."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def answer(self, turn: PolicyTurn | None, *, is_last: bool) -> None:
        """The policy's turn, for the request that waits; None: there is none. After the last all requests are
        refused."""
        with self._lock:
            self.is_over, self._waits = is_last, False
            try:
                self._reply.put(Refused(OVER) if turn is None else self._conversations[self._path].answer(turn))
            except Refused as error:
                self._reply.put(error)

    def models(self, path: str, authorization: str) -> dict[str, Any]:
        """The JSON of a GET: the policy, as the only model. Refused as respond."""
        self._admit(authorization)
        if path != MODELS:
            raise Refused(f"there is no GET {path}: GET {MODELS} and POST {' and '.join(ROUTES)} are all there is", 404)
        return list_models("policy", None)

    def respond(self, path: str, authorization: str, body: bytes, *, is_retry: bool) -> dict[str, Any]:
        """The JSON of a POST, once the policy's turn is there. `is_retry`: of a client that did not wait. Refused for
        who has not the key, and for what cannot be a turn."""
        reply: Reply = queue.SimpleQueue()
        self._admit(authorization)
        if path not in ROUTES:
            raise Refused(f"there is no {path}: {' and '.join(ROUTES)} are all there is", 404)
        request = read_json(body)
        with self._lock:
            conversation = self._conversations[path]
            asked = conversation.read(request)
            if not (is_retry and self._waits and asked == self._last):
                self._check(path, asked)
                self._path, self._last, self._waits = path, asked, True
                self.asked.put(conversation.ask(asked))
            self._reply = reply
        found = reply.get()
        if isinstance(found, Refused):
            raise found
        return found

    def _admit(self, authorization: str) -> None:
        """Refused for who has not the key."""
        if not hmac.compare_digest(authorization.encode(), f"Bearer {self.key}".encode()):
            raise Refused("the key is missing or another: give Authorization: Bearer API_KEY", 401)

    def _check(self, path: str, asked: Asked) -> None:
        """Refused where the trajectory cannot go on with it."""
        if self.is_over:
            raise Refused(OVER)
        if self._waits:
            raise Refused("another request waits for the policy: a trajectory has one turn after another")
        if self._path not in ("", path):
            raise Refused(f"the trajectory began by {self._path}, and goes on by it")
        self._conversations[path].check(asked)


def check_network() -> None:
    """ValueError in one line where nothing can be served to this process itself."""
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        raise ValueError(
            "environment.factory has rollout, which calls the policy at 127.0.0.1, and cannot here "
            f"({error.strerror}); reward.isolation=limits lets it"
        ) from None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    endpoint: PolicyEndpoint

    def server_bind(self) -> None:
        """Without HTTPServer's, which asks for this machine's name, maybe over a network."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away is none of this side's errors, whose traceback would be printed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"  # clients keep their connection
    default_request_version = "HTTP/1.0"  # of a line that says none: 0.9 would have no status
    disable_nagle_algorithm = True  # head and body are sent apart

    def do_GET(self) -> None:
        self._answer(lambda: self.server.endpoint.models(self.path, self._authorization))

    def do_POST(self) -> None:
        try:
            size = body_size(self.headers.get("Content-Length"), LARGEST_BODY)
        except Refused as error:
            return self.send_error(error.status, str(error))
        body = self.rfile.read(size)
        is_retry = self.headers.get("x-stainless-retry-count", "0") != "0"  # OpenAI's client counts
        self._answer(lambda: self.server.endpoint.respond(self.path, self._authorization, body, is_retry=is_retry))

    @property
    def _authorization(self) -> str:
        return self.headers.get("Authorization") or ""

    def _answer(self, respond: Callable[[], dict[str, Any]]) -> None:
        try:
            self._send(200, respond())
        except Refused as error:
            self._send(error.status, refusal(str(error), error.status, error.parameter), reason_phrase(str(error)))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For what is wrong with a request's HTTP, in JSON; where its body begins and ends is not known any more."""
        said = message or HTTPStatus(code).phrase
        self.close_connection = True
        self._send(code, refusal(said, code), reason_phrase(said))
        self._read_on()

    def _send(self, status: int, found: dict[str, Any], phrase: str | None = None) -> None:
        text = json.dumps(found).encode()
        self.send_response(status, phrase)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _read_on(self) -> None:
        """Until the client has closed: a connection closed with bytes unread takes back what it was sent."""
        ends = time.monotonic() + LINGER_S
        self.connection.settimeout(LINGER_S)
        while time.monotonic() < ends and self.connection.recv(1 << 16):
            pass

    def log_message(self, *_: Any) -> None:
        """Nothing: a line for every turn of every trajectory would say nothing."""

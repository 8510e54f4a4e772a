"""The policy of a program that calls it itself: in the program's own process, on 127.0.0.1, with a key. An answer is
the turn that the run's engine samples, whenever that is. Standard library only."""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from infsample_rl.reward.policy_conversation import ROUTES, Asked, Conversation, PolicyTurn, Refused

LARGEST_BODY = 1 << 24
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

    def respond(self, path: str, authorization: str, body: bytes, *, is_retry: bool) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a request, once the policy's turn is there. `is_retry`: of a client that did not wait."""
        reply: Reply = queue.SimpleQueue()
        try:
            if not hmac.compare_digest(authorization.encode(), f"Bearer {self.key}".encode()):
                raise Refused("the key is missing or another: give Authorization: Bearer API_KEY", 401)
            if path not in ROUTES:
                raise Refused(f"there is no {path}: {' and '.join(ROUTES)} are all there is", 404)
            request = _read_json(body)
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
        except Refused as error:
            said = {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.status}
            return error.status, {"error": said}
        return 200, found

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


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"  # clients keep their connection
    disable_nagle_algorithm = True  # head and body are sent apart

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if size > LARGEST_BODY:
            self.close_connection = True
            return self._send(413, {"error": {"message": f"the body has {size} bytes, not at most {LARGEST_BODY}"}})
        body, key = self.rfile.read(size), self.headers.get("Authorization") or ""
        is_retry = self.headers.get("x-stainless-retry-count", "0") != "0"  # OpenAI's client counts
        self._send(*self.server.endpoint.respond(self.path, key, body, is_retry=is_retry))

    def _send(self, status: int, found: dict[str, Any]) -> None:
        text = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Nothing: a line for every turn of every trajectory would say nothing."""


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except ValueError:
        raise Refused("the body must be JSON") from None
    if not isinstance(request, dict):
        raise Refused("the body must be a JSON object")
    return request

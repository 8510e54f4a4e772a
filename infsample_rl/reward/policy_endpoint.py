"""OpenAI's chat completions for a program that calls the policy itself: in the program's own process, on 127.0.0.1,
with a key. An answer is the turn that the run's engine samples, whenever that is. Standard library only.

The first request is a trajectory's prompt. Each one after it must be the one before, its answer, and one message of the
user, so that what was sampled stands as it is, token by token.
"""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import socket
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Message = dict[str, str]
ROUTE = "/v1/chat/completions"
ROLES = ("system", "developer", "user", "assistant")
LARGEST_BODY = 1 << 24
OVER = "the trajectory gets no further turn (environment.max_turns, rollout.max_new_tokens): return its reward"
# What changes nothing. All else would say how to sample, which the run's settings do.
PASSED_OVER = {"messages": None, "model": None, "user": None, "metadata": None, "store": None, "n": 1, "stream": False}


class Refused(Exception):
    """What is wrong with a request, and its HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class PolicyEndpoint:
    """One program's policy. `asked` has the messages of one request after another; `answer` answers the last."""

    def __init__(self) -> None:
        self.key, self.is_over = secrets.token_urlsafe(), False  # whether no turn is sampled any more
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.endpoint = self
        self.asked: queue.SimpleQueue[list[Message] | None] = queue.SimpleQueue()  # None, of its owner: no more come
        self._reply: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # of the request that waits
        self._messages: list[Message] = []  # of the last request, with its answer once there is one
        self._waits, self._lock = False, threading.Lock()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def base_url(self) -> str:
        """As OpenAI's client takes it."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def answer(self, text: str | None, *, is_last: bool) -> None:
        """The policy's turn, for the request that waits; None: there is none. After the last all others are refused."""
        with self._lock:
            self.is_over = is_last
            self._messages.append({"role": "assistant", "content": text or ""})
            self._waits = False
            self._reply.put(text)

    def respond(self, path: str, authorization: str, body: bytes, *, is_retry: bool) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a request, once the policy's turn is there. `is_retry`: of a client that did not wait."""
        reply: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        try:
            if not hmac.compare_digest(authorization.encode(), f"Bearer {self.key}".encode()):
                raise Refused("the key is missing or another: give Authorization: Bearer API_KEY", 401)
            if path != ROUTE:
                raise Refused(f"there is no {path}: {ROUTE} is all there is", 404)
            asked = read_request(body)
            with self._lock:
                if not (is_retry and self._waits and asked == self._messages):
                    self._check(asked)
                    self._messages, self._waits = list(asked), True
                    self.asked.put(asked)
                self._reply = reply
            text = reply.get()
            if text is None:
                raise Refused(OVER)
        except Refused as error:
            said = {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.status}
            return error.status, {"error": said}
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion", "created": int(time.time())}
        return 200, head | {"model": "policy", "choices": [choice]}

    def _check(self, asked: list[Message]) -> None:
        """Refused where the trajectory cannot go on with it."""
        if self.is_over:
            raise Refused(OVER)
        if self._waits:
            raise Refused("another request waits for the policy: a trajectory has one turn after another")
        before = self._messages
        if not before:
            return
        changed = next((place for place, pair in enumerate(zip(before, asked, strict=False)) if not _same(*pair)), None)
        if changed is not None:
            raise Refused(
                f"messages[{changed}] is not what it was: a request must be the one before, its answer, and one "
                "message of the user"
            )
        if [message["role"] for message in asked[len(before) :]] != ["user"]:
            raise Refused(f"messages must have one message of the user more than the {len(before)} so far and no other")


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


def read_request(body: bytes) -> list[Message]:
    """The messages of a request. Refused for what cannot be, or would be passed over."""
    try:
        request = json.loads(body)
    except ValueError:
        raise Refused("the body must be JSON") from None
    if not isinstance(request, dict):
        raise Refused("the body must be a JSON object")
    for name, value in request.items():
        if value is not None and (name not in PASSED_OVER or PASSED_OVER[name] not in (None, value)):
            raise Refused(f"{name}={json.dumps(value)[:60]}: how is sampled the run's settings say; leave it out")
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("give messages, a list of objects")
    return [_read_message(place, message) for place, message in enumerate(messages)]


def _read_message(place: int, message: Any) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise Refused(f"messages[{place}].role must be one of {', '.join(ROLES)}, got {role!r}")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str) or message.get("tool_calls"):
        raise Refused(f"messages[{place}].content must be text, without tool calls")
    return {"role": role, "content": content}


def _same(before: Message, now: Message) -> bool:
    """Programs may take white space off an answer's ends; the sampled tokens stand."""
    if before["role"] == "assistant":
        return now["role"] == "assistant" and now["content"].strip() == before["content"].strip()
    return now == before

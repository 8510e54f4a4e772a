"""OpenAI's chat completions for a program that calls the policy itself: in the program's own process, on 127.0.0.1,
with a key. An answer is the turn that the run's engine samples, whenever that is. Standard library only.

The first request is a trajectory's prompt, with the tools that it offers. Each one after it must be the one before, its
answer, and one message of the user or, where the answer calls tools, one of each tool, so that what was sampled stands
as it is, token by token.
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
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

Message = dict[str, Any]
Tool = dict[str, Any]
ROUTE = "/v1/chat/completions"
ROLES = ("system", "developer", "user", "assistant", "tool")
LARGEST_BODY = 1 << 24
OVER = "the trajectory gets no further turn (environment.max_turns, rollout.max_new_tokens): return its reward"
# What changes nothing. All else would say how to sample, which the run's settings do.
PASSED_OVER: dict[str, Any] = {
    **{"messages": None, "tools": None, "model": None, "user": None, "metadata": None, "store": None, "n": 1},
    **{"stream": False, "tool_choice": "auto", "parallel_tool_calls": True},
}


class Refused(Exception):
    """What is wrong with a request, and its HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Asked(NamedTuple):
    """A request."""

    messages: list[Message]
    tools: list[Tool] = []  # as chat templates take them


class PolicyEndpoint:
    """One program's policy. `asked` has one request after another; `answer` answers the last."""

    def __init__(self) -> None:
        self.key, self.is_over = secrets.token_urlsafe(), False  # whether no turn is sampled any more
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.endpoint = self
        self.asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()  # None, of its owner: no more come
        self._reply: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # of the request that waits
        self._messages: list[Message] = []  # of the last request, with its answer once there is one
        self._tools: list[Tool] = []
        self._waits, self._lock = False, threading.Lock()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def base_url(self) -> str:
        """As OpenAI's client takes it."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def answer(self, text: str | None, calls: Sequence[tuple[str, dict[str, Any]]] = (), *, is_last: bool) -> None:
        """The policy's turn, for the request that waits, and the tools that it calls with their arguments; None: there
        is no turn. After the last all others are refused."""
        made = [{"id": f"call_{secrets.token_hex(12)}", "name": name, "arguments": given} for name, given in calls]
        message = {"role": "assistant", "content": text or ""} | ({"calls": made} if made else {})
        with self._lock:
            self.is_over = is_last
            self._messages.append(message)
            self._waits = False
            self._reply.put(None if text is None else message)

    def respond(self, path: str, authorization: str, body: bytes, *, is_retry: bool) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a request, once the policy's turn is there. `is_retry`: of a client that did not wait."""
        reply: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        try:
            if not hmac.compare_digest(authorization.encode(), f"Bearer {self.key}".encode()):
                raise Refused("the key is missing or another: give Authorization: Bearer API_KEY", 401)
            if path != ROUTE:
                raise Refused(f"there is no {path}: {ROUTE} is all there is", 404)
            asked = read_request(body)
            with self._lock:
                if not (is_retry and self._waits and asked.messages == self._messages):
                    self._check(asked)
                    self._messages, self._tools, self._waits = list(asked.messages), asked.tools, True
                    self.asked.put(asked)
                self._reply = reply
            answer = reply.get()
            if answer is None:
                raise Refused(OVER)
        except Refused as error:
            said = {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.status}
            return error.status, {"error": said}
        reason = "tool_calls" if "calls" in answer else "stop"
        choice = {"index": 0, "message": _as_openai(answer), "finish_reason": reason, "logprobs": None}
        head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion", "created": int(time.time())}
        return 200, head | {"model": "policy", "choices": [choice]}

    def _check(self, asked: Asked) -> None:
        """Refused where the trajectory cannot go on with it."""
        if self.is_over:
            raise Refused(OVER)
        if self._waits:
            raise Refused("another request waits for the policy: a trajectory has one turn after another")
        before, now = self._messages, asked.messages
        if not before:
            return _check_prompt(now)
        if asked.tools != self._tools:
            raise Refused("tools are not what they were: a trajectory offers the same in every turn")
        changed = next((place for place, pair in enumerate(zip(before, now, strict=False)) if not _same(*pair)), None)
        if changed is not None:
            raise Refused(
                f"messages[{changed}] is not what it was: a request must be the one before, its answer, and one "
                "message of the user"
            )
        calls, new = before[-1].get("calls", []), now[len(before) :]
        if calls and [message.get("call") for message in new] != [call["id"] for call in calls]:
            raise Refused(
                f"messages must have one of role tool for each of the {len(calls)} calls more than the {len(before)} "
                "so far, in their order, and no other"
            )
        if not calls and [message["role"] for message in new] != ["user"]:
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


def read_request(body: bytes) -> Asked:
    """Refused for what cannot be, or would be passed over."""
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
    tools = request.get("tools") or []
    if not isinstance(tools, list) or not all(map(is_tool, tools)):
        raise Refused('tools must be a list of {"type": "function", "function": {"name": ..., "parameters": {...}}}')
    return Asked([_read_message(place, message) for place, message in enumerate(messages)], tools)


def is_tool(value: Any) -> bool:
    """Whether it offers a function, as OpenAI's API has it."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _check_prompt(messages: list[Message]) -> None:
    for place, message in enumerate(messages):
        if message["role"] == "tool" or "calls" in message:
            raise Refused(f"messages[{place}]: a trajectory begins without tool calls")


def _read_message(place: int, message: Any) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise Refused(f"messages[{place}].role must be one of {', '.join(ROLES)}, got {role!r}")
    content, calls = message.get("content"), message.get("tool_calls") or []
    if content is None and calls:
        content = ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise Refused(f"messages[{place}].content must be text")
    read = {"role": role, "content": content}
    try:
        if calls and role == "assistant":
            functions = [(call["id"], call["function"]) for call in calls]
            read["calls"] = [
                {"id": number, "name": function["name"], "arguments": json.loads(function["arguments"])}
                for number, function in functions
            ]
        if role == "tool":
            read["call"] = str(message["tool_call_id"])
    except (TypeError, KeyError, ValueError):
        raise Refused(f"messages[{place}] has tool calls in another form than OpenAI's") from None
    return read


def _as_openai(answer: Message) -> Message:
    """A turn of the policy as a message of OpenAI's API."""
    if "calls" not in answer:
        return answer
    calls = []
    for call in answer["calls"]:
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        calls.append({"id": call["id"], "type": "function", "function": function})
    return {"role": "assistant", "content": answer["content"] or None, "tool_calls": calls}


def _same(before: Message, now: Message) -> bool:
    """Programs may take white space off an answer's ends; the sampled tokens stand."""
    if before["role"] == "assistant":
        same = now["content"].strip() == before["content"].strip() and now.get("calls") == before.get("calls")
        return now["role"] == "assistant" and same
    return now == before

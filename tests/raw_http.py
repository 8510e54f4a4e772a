"""Requests that no client would send, and their answers."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from typing import NamedTuple
from urllib.parse import urlsplit

# sizes of a body that none has, and what is answered
BAD_SIZES = {"letters": 400, "-5": 400, "+2": 400, None: 411, "99999999999": 413}


class Answer(NamedTuple):
    """Of a server."""

    status: int
    reason: str  # of the status line
    found: dict


def head(path: str, key: str, size: object, method: str = "POST") -> str:
    """Of a request; without the size where it is None."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}"]
    return "\r\n".join([*lines, *([] if size is None else [f"Content-Length: {size}"])]) + "\r\n\r\n"


def ask(url: str, request: str) -> Answer:
    """The answer to what is sent as it is."""
    with connected(url, request) as connection:
        response = http.client.HTTPResponse(connection, method="POST")
        response.begin()
        return Answer(response.status, response.reason, json.loads(response.read()))


def give_up(url: str, request: str) -> None:
    """Send it, and break the connection off."""
    with connected(url, request) as connection:
        # closed so, what is written at the other end fails at once
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def connected(url: str, request: str) -> socket.socket:
    """A connection, with what has been sent."""
    connection = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=20)
    connection.sendall(request.encode())
    return connection

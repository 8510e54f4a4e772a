"""A server of `serve` in a thread of its own, and requests to it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import openai

from infsample_rl.commands.serve.__main__ import ServeOptions
from infsample_rl.commands.serve.server import Server, serve

KEY = "a key"
OPTIONS = ServeOptions(rows=4, waiting=3, max_new_tokens=24, name="tiny")
ASKED = [{"role": "user", "content": "1 + 1 = ?"}]


@dataclass
class Running:
    """A server in a thread of its own."""

    server: Server
    url: str

    def post(self, path: str, body: object, key: str = KEY) -> tuple[int, dict]:
        """Status and JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def client(self, **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=KEY, max_retries=0, timeout=60, **options)


def start(server: Server) -> tuple[Running, Callable[[], None]]:
    """A server that answers, and what ends it."""
    loop, listening = asyncio.new_event_loop(), socket.create_server(("127.0.0.1", 0))
    task = loop.create_task(serve(server.app, listening))

    def run():
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    def stop():
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return Running(server, f"http://127.0.0.1:{listening.getsockname()[1]}"), stop


def chat(running, **given):
    return running.client().chat.completions.create(model="tiny", messages=ASKED, **given)

"""A server of OpenAI's protocol over HTTP, for what a judge may say."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JudgeServer:
    """An OpenAI-compatible server whose answers are `reply(request, number)`: a text, or a function of the handler."""

    def __init__(self):
        self.reply = lambda request, number: "Score: 5"
        self.models = ["judge-1"]
        self.asked, self.keys, self.at_once, self.most_at_once = [], set(), 0, 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                self.answer({"object": "list", "data": [{"id": name, "object": "model"} for name in server.models]})

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.asked.append(request["messages"][0]["content"])
                    server.keys.add(self.headers["Authorization"])
                    server.at_once += 1
                    server.most_at_once = max(server.most_at_once, server.at_once)
                    number = len(server.asked)
                try:
                    said = server.reply(request, number)
                    said(self) if callable(said) else self.answer(completion(said))
                finally:
                    with server._lock:
                        server.at_once -= 1

            def answer(self, body, status=200, kind="application/json", **headers):
                text = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(text)))
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(text)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda *_: None  # clients are cut off on purpose
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def close(self):
        self._http.shutdown()
        self._http.server_close()


def completion(text, finish_reason="stop"):
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 1000, "completion_tokens": 10, "total_tokens": 1010}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}

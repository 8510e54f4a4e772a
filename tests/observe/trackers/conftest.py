"""A config whose trackers are the only thing that differs, and a W&B server on the loopback address that keeps what it
is sent."""

from __future__ import annotations

import gzip
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from infsample_rl.observe.run_log import RunLogger
from tests.observe.logged import logged_config, sample


@pytest.fixture
def log_run():
    """A start of a run in `run_dir`: reward/mean is step / 10, one sample a step."""

    def log(run_dir: Path, steps: range, *, start_step: int = 0, failed: bool = False, **logging: object) -> None:
        config = logged_config(**{"progress": False, **logging})
        logger = RunLogger(config, run_dir, total_steps=9, start_step=start_step)
        if start_step:
            logger.rewind(start_step)
        for step in steps:
            metrics = {"reward/mean": step / 10, "eval/accuracy": 0.5 / step, "eval/pass@1": 0.5, "learner/kl": None}
            logger.log_step(step, metrics, [sample(step)])
        (run_dir / "config.yaml").write_text("run: {name: tiny}\n")
        logger.close(failed=failed)

    return log


class Server(ThreadingHTTPServer):
    """Says nothing of a client that breaks its connections off, as W&B's does when it ends."""

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Recorder:
    """Answers what the W&B client asks, as one run of the project `infsample_rl`, and keeps every request."""

    def __init__(self) -> None:
        self.queries: list[tuple[str, dict]] = []  # operation, variables
        self.streamed: list[dict] = []  # bodies of the file stream
        self.uploaded: dict[str, bytes] = {}
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                if self.path.startswith("/sdk/otel/"):  # of the client about itself, in protobuf
                    self._body()
                    return self._answer({})
                body = json.loads(self._body() or "{}")
                self._answer(recorder.query(body) if self.path.endswith("/graphql") else recorder.stream(body))

            def do_PUT(self) -> None:
                recorder.uploaded[self.path.removeprefix("/upload/")] = self._body()
                self._answer({})

            def do_GET(self) -> None:
                self._answer({})

            def _body(self) -> bytes:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

            def _answer(self, answer: dict) -> None:
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def query(self, body: dict) -> dict:
        """The answer to a GraphQL request."""
        found = re.search(r"(?:query|mutation)\s+(\w+)", body.get("query", ""))
        name, variables = found[1] if found else "", body.get("variables") or {}
        self.queries.append((name, variables))
        entity = {"name": "team", "organization": None}
        project = {"id": "p", "name": "infsample_rl", "entity": entity}
        if name == "UpsertBucket":
            run = {"id": "r", "name": variables["name"], "displayName": "tiny", "description": "", "config": "{}"}
            run |= {"sweepName": None, "project": project, "historyLineCount": 0}
            return {"data": {"upsertBucket": {"bucket": run, "inserted": True}}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/upload/{file}"} for file in variables["files"]]
            return {"data": {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}}
        if name == "CreateArtifact":  # of the table; it is there already, so nothing of it is uploaded
            sequence = {"id": "s", "latestArtifact": {"id": "a", "versionIndex": 0}}
            artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}
            return {"data": {"createArtifact": {"artifact": artifact}}}
        if body.get("query", "").lstrip().startswith("mutation"):
            return {"errors": [{"message": f"{name}: the recorder knows no such mutation"}]}
        none = {"edges": []}
        viewer = {
            "id": "v",
            "entity": "team",
            "username": "me",
            "email": "",
            "flags": "{}",
            "teams": none,
            "apiKeys": none,
        }
        known = {"viewer": viewer, "serverInfo": {"features": []}}
        return {"data": known | dict.fromkeys(("model", "project", "entity"))}

    def stream(self, body: dict) -> dict:
        """A piece of the run's file stream."""
        self.streamed.append(body)
        return {"exitcode": None, "limits": {}}

    def history(self) -> list[dict]:
        """Rows of metrics that have come."""
        files = [body.get("files", {}).get("wandb-history.jsonl", {}) for body in self.streamed]
        return [json.loads(line) for file in files for line in file.get("content", [])]


@pytest.fixture
def recorder(monkeypatch):
    """A recording W&B server, and the environment that makes W&B report to it."""
    import wandb

    wandb.teardown()  # a process reads the environment once
    server = Recorder()
    key = "local-" + "0" * 40
    for name, value in (("WANDB_API_KEY", key), ("WANDB_BASE_URL", server.url), ("WANDB_MODE", "online")):
        monkeypatch.setenv(name, value)
    yield server
    wandb.teardown()
    server.close()

"""A model name without a hub that answers: from the cache, or one line within seconds, never a wait for retries."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from infsample_rl.model import hub
from infsample_rl.model.hub import cached_only, hub_reachable

CODE = """
import json, sys, time
from infsample_rl.config import ModelConfig
from infsample_rl.model.loading import load_model, load_model_config
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.rollout.length_prediction.bert import BertLengthPredictor
missing = ModelConfig(path="nowhere/nothing")
calls = [lambda: load_tokenizer(missing), lambda: load_model_config(missing), lambda: load_model(missing)]
calls += [lambda: BertLengthPredictor.load("nowhere/nothing", setting="encoder")]
for call in calls:
    started = time.time()
    try:
        call()
    except ValueError as error:
        print(json.dumps([str(error), time.time() - started]))
cached = ModelConfig(path="someone/tiny")
configs = load_model_config(cached), load_model(cached).config
print(json.dumps([len(load_tokenizer(cached)), *(config.hidden_size for config in configs)]))
"""


@pytest.fixture
def endpoint(monkeypatch):
    """Sets the hub's address, with HF_HUB_OFFLINE off and no proxy."""
    for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return lambda address: monkeypatch.setenv("HF_ENDPOINT", address)


@pytest.fixture
def refusing():
    """The address of a server that answers 404 to all, and what it was asked."""
    asked = []

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_a_refusal_is_an_answer(endpoint, refusing):
    address, asked = refusing
    endpoint(address)
    assert hub_reachable("a/b", "datasets") and not cached_only("a name/with blanks")
    assert asked == ["/api/datasets/a/b", "/api/models/a%20name/with%20blanks"]


def test_a_hub_that_is_silent_or_not_there_is_not_waited_for(endpoint, monkeypatch):
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for address in (f"http://127.0.0.1:{silent.getsockname()[1]}", "http://127.0.0.1:9", "no address"):
            endpoint(address)
            started = time.monotonic()
            assert not hub_reachable("a/b") and cached_only("a/b")
            assert time.monotonic() - started < 10


def test_a_slow_look_up_of_the_hubs_name_is_not_waited_for(endpoint, monkeypatch):
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setattr(hub, "_answers", lambda url: time.sleep(60) or True)
    started = time.monotonic()
    assert not hub_reachable("a/b") and time.monotonic() - started < 10


def test_folders_and_offline_runs_ask_nothing(endpoint, refusing, monkeypatch, tmp_path):
    address, asked = refusing
    endpoint(address)
    assert not cached_only(str(tmp_path)) and cached_only(str(tmp_path / "missing"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cached_only("a/b") and asked == []


@pytest.mark.slow
def test_names_that_do_not_exist_are_one_line_at_once_and_cached_models_load(tiny_qwen3, tmp_path):
    cached = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(tiny_qwen3, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    without = {
        name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    }
    places = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=without | places, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    *refused, loaded = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(refused) == 4
    for message, seconds in refused:
        assert "nowhere/nothing: no " in message and "\n" not in message and seconds < 5
    assert loaded == [259, 64, 64]

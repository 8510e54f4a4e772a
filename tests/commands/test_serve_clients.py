"""`serve` by the real command, called by the clients that harnesses have."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.raw_http import BAD_SIZES, connected, give_up, head

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "infsample_rl" / "assets" / "kk_tiny" / "policy"
VERIFIERS = ROOT / ".venv-verifiers" / "bin" / "python"
KEY = "of the test"


@pytest.fixture
def served(tmp_path):
    """The URL of the embedded policy's server."""
    command = [sys.executable, "-m", "infsample_rl", "serve", str(POLICY), "port=0", "name=kk", "max_new_tokens=64"]
    environment = os.environ | {"INFSAMPLE_RL_SERVE_KEY": KEY}
    log = (tmp_path / "log").open("w+")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=tmp_path)
    try:
        line = server.stdout.readline()
        imported = (tmp_path / "log").read_text()  # what libraries say as they are imported
        assert KEY not in line, "a key that is given is not shown"
        yield re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0, (tmp_path / "log").read_text()
        assert (tmp_path / "log").read_text() == imported, "nothing that a client did is printed"
        assert server.stdout.read() == ""
    finally:
        server.kill()
        server.wait()


def test_whoever_reads_its_line_may_call_and_what_clients_do_wrong_is_not_printed(served):
    for size, status in BAD_SIZES.items():
        with connected(served, head("/v1/chat/completions", KEY, size)) as connection:
            assert f" {status} ".encode() in connection.recv(20)
    give_up(served, head("/v1/chat/completions", KEY, 100) + "{")
    assert [model.id for model in openai.OpenAI(base_url=served + "/v1", api_key=KEY).models.list()] == ["kk"]


@pytest.mark.slow
@pytest.mark.skipif(not VERIFIERS.exists(), reason="verifiers has an environment of its own: make verifiers")
def test_verifiers_training_client_gets_the_tokens_that_were_sampled(served):
    command = [str(VERIFIERS), str(Path(__file__).with_name("verifiers_client.py")), served + "/v1", "kk", str(POLICY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"KEY": KEY})
    assert done.returncode == 0, done.stderr[-3000:]
    prompt_ids, ids, logprobs, _ = json.loads(done.stdout.splitlines()[-1])
    client = openai.OpenAI(base_url=served + "/v1", api_key=KEY)
    sampling = {"temperature": 0.9, "max_tokens": 12, "seed": 3, "logprobs": 1}
    body = {"model": "kk", "token_ids": prompt_ids, "sampling_params": sampling}
    [choice] = client.post(served + "/inference/v1/generate", cast_to=object, body=body)["choices"]
    assert choice["token_ids"] == ids and len(ids) > 0
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == logprobs

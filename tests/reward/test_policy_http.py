"""The policy's endpoint of a program, and clients whose HTTP or JSON is wrong."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

import pytest

from infsample_rl.reward.policy_conversation import PolicyTurn
from infsample_rl.reward.policy_endpoint import PolicyEndpoint
from infsample_rl.reward.policy_requests import Refused, parse_json, reason_phrase
from tests.raw_http import BAD_SIZES, ask, give_up, head
from tests.reward.test_policy_endpoint import WHO, posted

CHAT = "/v1/chat/completions"


@pytest.fixture
def endpoint():
    return PolicyEndpoint()


@pytest.fixture
def silent(capfd):
    """Nothing is printed by the test's end."""
    yield
    time.sleep(0.2)  # for the threads of connections
    assert capfd.readouterr() == ("", "")


def get(url, key):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)


def test_the_policy_is_listed_as_the_only_model_for_who_has_the_key(endpoint):
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "infsample_rl", "max_model_len": None}
    assert get(endpoint.base_url + "/models", endpoint.key) == {"object": "list", "data": [model]}
    with pytest.raises(urllib.error.HTTPError, match="401: the key is missing or another"):
        get(endpoint.base_url + "/models", "another")
    with pytest.raises(urllib.error.HTTPError, match="404: there is no GET /v1/engines: GET /v1/models and POST"):
        get(endpoint.base_url + "/engines", endpoint.key)


def test_openais_client_lists_it(endpoint):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
    assert [model.id for model in client.models.list()] == ["policy"]


def test_urllibs_exception_says_why(endpoint):
    request = urllib.request.Request(endpoint.base_url + "/chat/completions", b'{"messages": []}')
    request.add_header("Authorization", f"Bearer {endpoint.key}")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    assert str(refused.value) == "HTTP Error 400: give messages, a list of objects"


@pytest.mark.parametrize(
    ("message", "phrase"),
    [
        ("two\r\n lines", "two lines"),
        ("na\u00efve \u4e2d \ud800", r"na\xefve \u4e2d \ud800"),
        ("a\x00b\x1b", "ab"),
        ("a" * 300, "a" * 196 + " ..."),
        ("", ""),
    ],
)
def test_a_reason_phrase_is_one_short_line_of_ascii(message, phrase):
    assert reason_phrase(message) == phrase


@pytest.mark.parametrize(("size", "status"), BAD_SIZES.items())
def test_a_body_without_a_size_that_can_be_is_refused_in_json(endpoint, silent, size, status):
    answer = ask(endpoint.base_url, head(CHAT, endpoint.key, size))
    assert answer.status == answer.found["error"]["code"] == status
    assert answer.reason == answer.found["error"]["message"] and "Content-Length" in answer.reason


def test_who_sends_a_body_that_is_too_large_is_told_so(endpoint, silent):
    with pytest.raises(RuntimeError, match="413: Content-Length=17000000 must be at most 16777216"):
        posted(endpoint.base_url + "/chat/completions", endpoint.key, b" " * 17_000_000)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [("PUT /v1/models HTTP/1.1", 501), ("POST /v1 x y", 400), ("GET / HTTP/9.1", 505), (f"GET /{'a' * 70_000}", 414)],
)
def test_what_is_no_request_is_refused_in_json(endpoint, silent, request_line, status):
    answer = ask(endpoint.base_url, f"{request_line}\r\nHost: localhost\r\n\r\n")
    assert answer.status == answer.found["error"]["code"] == status


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" * 10_000, "400: the body must be JSON: it has more than 100 levels"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', r"400: the body has \ud800, half of a surrogate"),
    ],
)
def test_what_no_template_takes_is_refused(endpoint, silent, body, said):
    with pytest.raises(RuntimeError) as refused:
        posted(endpoint.base_url + "/chat/completions", endpoint.key, body)
    assert str(refused.value).startswith(said)


def test_the_levels_of_json_are_counted():
    assert parse_json("[" * 100 + "]" * 100, "it") and parse_json('{"a": {"b": [1]}}', "it") == {"a": {"b": [1]}}
    for levels in (101, 10_000):
        with pytest.raises(Refused, match="it must be JSON: it has more than 100 levels"):
            parse_json("[" * levels + "]" * levels, "it")


def test_a_client_that_gives_up_is_not_spoken_of(endpoint, silent):
    """While it sends, or waits for its answer."""
    body = json.dumps({"messages": WHO})
    give_up(endpoint.base_url, head(CHAT, endpoint.key, 100) + "{")
    give_up(endpoint.base_url, head(CHAT, endpoint.key, len(body)) + body)
    assert endpoint.asked.get(timeout=20).messages == WHO
    endpoint.answer(PolicyTurn("me" * 100_000), is_last=False)

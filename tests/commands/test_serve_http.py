"""`serve` and clients whose HTTP or JSON is wrong: each is told in one line, and the console nothing."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

import pytest

from tests.raw_http import ask, give_up, head
from tests.served import ASKED, KEY

CHAT = "/v1/chat/completions"


@pytest.fixture
def silent(caplog, capfd):
    """Nothing is logged or printed by the test's end."""
    yield
    assert caplog.records == [] and capfd.readouterr() == ("", "")


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [{"role": "user", "content": "\ud800"}]}, r"the body has \ud800, half of a surrogate pair"),
        ({"messages": ASKED, "\udfff": 1}, r"the body has \udfff, half of a surrogate pair"),
        (b"[" * 10_000, "the body must be JSON: it has more than 100 levels"),
        (deep(10_000), "the body must be JSON: it has more than 100 levels"),
        (b'{"messages": ' + deep(900) + b"}", "the body must be JSON: it has more than 100 levels"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 10_000}}]}]},
            "a call's arguments must be JSON: it has more than 100 levels",
        ),
        (b'{"messages": "\xff"}', "the body must be JSON: 'utf-8' codec can't decode byte 0xff"),
    ],
    ids=["surrogate", "name", "open", "closed", "object", "arguments", "bytes"],
)
def test_what_no_template_takes_is_refused_as_the_clients_fault(running, silent, body, said):
    status, found = running.post(CHAT, body)
    assert status == 400 and found["error"]["message"].startswith(said)


def test_a_whole_surrogate_pair_is_a_character(running):
    asked = json.dumps({"messages": [{"role": "user", "content": "\U0001f600"}], "max_tokens": 2})
    assert r"\ud83d\ude00" in asked and running.post(CHAT, asked.encode())[0] == 200


@pytest.mark.parametrize(("size", "status"), [(None, 411), ("99999999999", 413)])
def test_a_body_without_a_size_that_can_be_is_refused_in_json(running, silent, size, status):
    answer = ask(running.url, head(CHAT, KEY, size))
    assert answer.status == answer.found["error"]["code"] == status
    assert "Content-Length" in answer.found["error"]["message"] and "Content-Length" in answer.reason


def test_a_body_in_another_encoding_than_its_headers_is_refused(running, silent):
    request = head(CHAT, KEY, 2).replace("\r\n\r\n", "\r\nContent-Encoding: gzip\r\n\r\n{}")
    answer = ask(running.url, request)
    assert answer.status == 400 and answer.found["error"]["message"].startswith("the body cannot be read")


def test_a_client_that_gives_up_is_not_spoken_of(running, silent):
    body = json.dumps({"messages": ASKED, "n": 4})
    for request in ("POST ", head(CHAT, KEY, 100) + "{", head(CHAT, KEY, len(body)) + body):
        give_up(running.url, request)
        time.sleep(0.2)
    assert running.post(CHAT, {"messages": ASKED, "max_tokens": 2})[0] == 200, "it goes on"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "give messages, a list of objects"),
        ({"messages": ASKED, "stop": 3}, "stop=3, which must be texts"),
        ({"messages": ASKED, "\u4e2d\n": 1}, r"\u4e2d =1, which is unknown; known are"),
    ],
)
def test_urllibs_exception_says_why(running, body, said):
    request = urllib.request.Request(running.url + CHAT, json.dumps(body).encode(), {"Authorization": f"Bearer {KEY}"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    assert str(refused.value).startswith(f"HTTP Error 400: {said}") and len(str(refused.value)) < 220

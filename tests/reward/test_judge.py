"""A model as the judge, over HTTP: verdicts of three forms, and servers that stall, lie, cut, answer HTML or refuse."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sqlite3
import subprocess
import threading
import time

import numpy as np
import pytest

from infsample_rl.cluster.rollout_interpreter import MADE_HERE
from infsample_rl.cluster.worker_secrets import check_reward_environment, worker_secrets
from infsample_rl.config import Config, DataConfig, ModelConfig, RewardConfig
from infsample_rl.config.loading import cache_folder, load_config
from infsample_rl.config.overrides import ConfigError
from infsample_rl.reward import judge as judge_module
from infsample_rl.reward.hidden_values import hide_values_of
from infsample_rl.reward.judge import Judge, check_judge
from infsample_rl.reward.worker import RewardWorker
from infsample_rl.types import Prompt
from tests.judge_server import JudgeServer, completion

openai = pytest.importorskip("openai")
KEY = "sk-0123456789abcdef"
SMOLLM2 = cache_folder() / "SmolLM2-135M-Instruct"  # where `make smollm2` puts it


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setenv("INFSAMPLE_RL_CACHE", str(tmp_path / "cache"))
    found = JudgeServer()
    yield found
    found.close()
    hide_values_of([])


@pytest.fixture
def entry(server, tmp_path):
    """Builds an entry of reward.functions."""

    def build(text="Was {response} right? It should be {answer}.", **settings):
        (tmp_path / "ask.md").write_text(text)
        found = {"name": "judge", "url": server.url, "model": "judge-1", "prompt": str(tmp_path / "ask.md")}
        return found | settings

    return build


def config_of(entry):
    return RewardConfig(functions=[entry]).judges[0]


def prompt_of(**columns):
    return Prompt(
        prompt_index=0,
        row=3,
        messages=[{"role": "user", "content": "1 + 2 = ?"}],
        text="",
        token_ids=np.array([1], np.int32),
        columns={"answer": "3"} | columns,
    )


def judged(entry, responses, *, timeout_s=10.0, **columns):
    judge = Judge(config_of(entry), timeout_s)
    (call,) = judge.submit(prompt_of(**columns), responses).result()
    judge.close()
    return call


def test_a_score_on_the_scale_becomes_a_reward_from_0_to_1(server, entry):
    said = {"3": "Well. Score: 2, no: \n**Score: 10**", "4": "score = 2.5", "5": "Score: -5/10"}
    server.reply = lambda request, _: said[request["messages"][0]["content"][4]]
    given = entry(scale=[-5, 10], price=[2.0, 100.0], options={"max_tokens": 7, "seed": 1})
    call = judged(given, ["3", "4", "5"])
    assert call.values == [1.0, 0.5, 0.0] and call.problems == ["", "", ""]
    assert call.reported == {"tokens": [1010.0] * 3, "cost": pytest.approx([0.003] * 3)}
    asked = sorted(server.asked)
    assert asked[0].startswith("Was 3 right? It should be 3.\n\n") and "a number from -5 to 10" in asked[0]


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("Score (0-10): 8", 0.8),
        ("**Score [0 to 10]:** 8", 0.8),
        ("Score: [8]", 0.8),
        ("Score: .5", 0.05),
        ("Score - 8.", 0.8),
        ('{"score": 8, "why": "3 of 4"}', 0.8),
        ("Score: −5", None),
        ("Score: 7,5", None),
        ("Score: 7-8", None),
        ("Score (0-10) 8", None),
    ],
)
def test_a_score_is_read_as_it_is_meant_or_not_at_all(server, entry, said, reward):
    server.reply = lambda *_: said
    assert judged(entry(), ["3"]).values == [reward]


@pytest.mark.parametrize("usage", [{"prompt_tokens": "12", "completion_tokens": -3}, "much", None])
def test_usage_that_is_none_costs_nothing(server, entry, usage):
    server.reply = lambda *_: lambda handler: handler.answer(completion("Score: 5") | {"usage": usage})
    call = judged(entry(price=[1.0, 1.0]), ["3"])
    assert call.values == [0.5] and call.reported == {"tokens": [0.0], "cost": [0.0]}


def test_verdicts_are_kept_by_content_and_asked_for_once(server, entry):
    assert judged(entry(), ["3", "3", "4"]).values == [0.5, 0.5, 0.5] and len(server.asked) == 2
    again = judged(entry(price=[1, 1]), ["3", "4", "5"])
    assert again.values == [0.5] * 3 and len(server.asked) == 3
    assert again.reported["tokens"] == [0.0, 0.0, 1010.0] and again.reported["cost"][:2] == [0.0, 0.0]
    judged(entry(options={"temperature": 1}), ["3"])
    judged(entry(text="{response}"), ["3"])
    assert len(server.asked) == 5, "another request is another verdict"
    judged(entry(keep=False), ["3"])
    assert len(server.asked) == 6


def test_where_verdicts_cannot_be_kept_it_is_said_and_they_count(server, entry, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "verdicts.sqlite").write_bytes(b"no database" * 100)
    store = judge_module.VerdictStore(tmp_path / "cache" / "verdicts.sqlite")
    with pytest.warns(UserWarning, match="verdicts are not kept: .*verdicts.sqlite cannot be used"):
        assert store.get("a") is None
    assert store.put("a", "b") == "b" and judged(entry(), ["3"]).values == [0.5]


def test_the_first_verdict_of_several_processes_is_everybodys(server, entry, tmp_path):
    stores = [judge_module.VerdictStore(tmp_path / "verdicts.sqlite") for _ in range(2)]
    assert [store.put("a", said) for store, said in zip(stores, ("Score: 1", "Score: 2"), strict=True)] == [
        "Score: 1"
    ] * 2


def test_a_kept_reply_that_gives_no_verdict_any_more_is_asked_for_again(server, entry):
    judged(entry(), ["3"])
    path = judge_module.cache_folder() / "verdicts.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as kept, kept:
        kept.execute("UPDATE verdicts SET text = 'It is fine.'")
    server.reply = lambda *_: "None."
    assert judged(entry(), ["3"]).problems == ["gave no verdict: no `Score: N` in 'None.'"]
    server.reply = lambda *_: "Score: 7"
    call = judged(entry(), ["3"])
    assert call.values == [0.7] and call.reported["tokens"] == [1010.0] and len(server.asked) == 3
    assert judged(entry(), ["3"]).values == [0.7] and len(server.asked) == 3, "what replaced it is kept"
    store = judge_module.VerdictStore(path)
    store.put("a", "Score: 1")
    store.remove("a", "Score: 2")
    assert store.get("a") == "Score: 1", "another process has replaced it"


def test_a_run_that_can_be_repeated_keeps_its_verdicts(entry, tmp_path, monkeypatch):
    listed = ", ".join(f"{name}: '{value}'" for name, value in entry().items())
    load_config([f"reward.functions=[{{{listed}}}]", "run.deterministic=true"])
    with pytest.raises(ConfigError, match="run.deterministic=true needs keep=true of reward.functions: judge"):
        load_config([f"reward.functions=[{{{listed}, keep: false}}]", "run.deterministic=true"])


def test_pairwise_asks_both_ways_round(server, entry):
    def reply(request, _):
        text = request["messages"][0]["content"].split("\n\n")[0]
        return {"A=x B=ref": "Verdict: first", "A=ref B=x": "**Verdict:** second"}.get(text, "verdict: First")

    server.reply = reply
    given = entry(text="A={first} B={second}", form="pairwise", against="answer")
    call = judged(given, ["x", "y"], answer="ref")
    assert call.values == [1.0, 0.5], "who always prefers the first has said nothing"
    assert call.reported["tokens"] == [2020.0, 2020.0]
    server.reply = lambda request, _: "no" if "A=ref" in str(request) else time.sleep(0.2) or "Verdict: tie"
    call = judged(given | {"keep": False}, ["x"], answer="ref")
    assert call.values == [None] and call.reported["tokens"] == [2020.0], "what the other way cost counts"
    server.reply = lambda *_: "Verdict: tie"
    server.asked.clear()
    judged(entry(text="{answer}: {first} {second}", form="pairwise", against="answer"), ["x"], answer_as_given="3, as")
    assert [asked.split("\n")[0] for asked in sorted(server.asked)] == ["3: 3, as x", "3: x 3, as"]


def test_a_rubric_is_the_share_of_criteria_that_are_met(server, entry):
    server.reply = lambda request, _: "1: yes\n2. No, since ...\n - 3) YES" if "3. c" in str(request) else "1: no"
    text = "{question} {response}\n{criteria}"
    given = entry(text=text, form="rubric", criteria=["a", "b", "c"])
    assert judged(given, ["x"]).values == [pytest.approx(2 / 3)]
    assert server.asked[0].startswith("1 + 2 = ? x\n1. a\n2. b\n3. c\n\n")
    given = entry(text=text, form="rubric", criteria=["{wanted}"])
    call = judged(given, ["x"], wanted=["a", "b"])
    assert call.values == [None] and "not every one of 2 criteria" in call.problems[0]
    assert judged(given, ["x"], wanted=["only"]).values == [0.0]


def cut(handler):
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("It is fine.", "gave no verdict: no `Score: N` in 'It is fine.'"),
        ("Score: 11", "gave no verdict: Score: 11 is outside 0 to 10"),
        ("Score: -1", "gave no verdict: Score: -1 is outside 0 to 10"),
        (None, "gave no verdict: no `Score: N` in ''"),
        (lambda handler: handler.answer("<html>Sign in</html>", kind="text/html"), "is no chat completion"),
        (lambda handler: handler.answer({"choices": []}), "is no chat completion"),
        (
            lambda handler: handler.answer(completion("Score: 3, or", "length")),
            "gave no verdict: it was cut at max_tok",
        ),
        (lambda handler: handler.answer({"error": {"message": f"bad key {KEY}"}}, 401), "AuthenticationError.*<JUDGE>"),
        (lambda handler: handler.answer('{"choices', 200), "gave no verdict"),
        (cut, "gave no verdict: "),
        (lambda handler: time.sleep(5), "timed out after 0.5 s"),
    ],
    ids=["none", "above", "below", "empty", "html", "no choice", "length", "refused", "no json", "cut", "stalls"],
)
def test_what_is_no_verdict_is_no_reward(server, entry, reply, problem, monkeypatch):
    monkeypatch.setenv("JUDGE", KEY)
    hide_values_of(["JUDGE"])
    server.reply = lambda request, number: reply if "bad" in str(request) else "Score: 10"
    began = time.monotonic()
    call = judged(entry(key="JUDGE", retries=0), ["bad", "good"], timeout_s=0.5 if problem.startswith("timed") else 10)
    assert call.values == [None, 1.0] and call.problems[1] == "" and time.monotonic() - began < 5
    assert re.search(problem, call.problems[0]), call.problems[0]
    assert KEY not in call.problems[0] and len(call.problems[0]) < 260 and "\n" not in call.problems[0]
    assert server.keys == {f"Bearer {KEY}"}
    kept = sqlite3.connect(judge_module.cache_folder() / "verdicts.sqlite").execute("SELECT text FROM verdicts")
    assert kept.fetchall() == [("Score: 10",)], "what says nothing is asked for again"


def test_busy_servers_are_asked_again_within_the_time(server, entry, monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)

    def busy(status):
        return lambda handler: handler.answer({"error": {"message": "later"}}, status)

    server.reply = lambda request, number: busy((429, 503, 500)[number - 1]) if number < 4 else "Score: 5"
    assert judged(entry(), ["3"]).values == [0.5] and len(server.asked) == 4
    server.asked.clear()
    call = judged(entry(retries=1), ["4"])
    assert call.values == [None] and "InternalServerError" in call.problems[0] and len(server.asked) == 2
    server.asked.clear()
    server.reply = lambda request, number: (
        "Score: 5" if number > 1 else lambda handler: handler.answer({}, 429, Retry_After="0.3")
    )
    began = time.monotonic()
    assert judged(entry(), ["5"]).values == [0.5] and time.monotonic() - began >= 0.3, "as long as it asks for"


def test_many_are_asked_at_a_time_and_no_more_than_that(server, entry):
    server.reply = lambda request, number: time.sleep(0.2) or "Score: 5"
    judged(entry(at_once=4), [str(number) for number in range(12)])
    assert 2 <= server.most_at_once <= 4


def test_a_judge_that_stalls_is_not_asked_by_all_that_wait(server, entry):
    until = threading.Event()
    server.reply = lambda *_: until.wait(30) and "Score: 5"
    judge, responses = Judge(config_of(entry(at_once=4)), timeout_s=0.5), [str(number) for number in range(24)]
    (call,) = judge.submit(prompt_of(), responses).result()
    assert call.values == [None] * 24 and len(server.asked) <= 4 + 3, "one that times out gives its place to the next"
    assert set(call.problems) == {"timed out after 0.5 s", "was not asked: the 4 requests before it timed out"}
    until.set()
    (call,) = judge.submit(prompt_of(), responses).result()
    judge.close()
    assert call.values == [0.5] * 24, "the next step asks again"


def test_a_judge_that_answers_between_timeouts_is_asked_by_all(server, entry):
    until = threading.Event()
    server.reply = lambda request, _: "Score: 5" if request["messages"][0]["content"][4] in "35" else until.wait(30)
    call = judged(entry(at_once=1), list("012345"), timeout_s=0.5)
    until.set()
    late = "timed out after 0.5 s"
    assert call.values == [None, None, None, 0.5, None, 0.5] and call.problems == [late, late, late, "", late, ""]


def test_a_worker_begins_all_micro_groups_of_a_call(server, entry, tiny_qwen3):
    server.reply = lambda request, number: time.sleep(0.3) or "Score: 5"
    reward = RewardConfig(functions=[entry(weight=2.0), "gsm8k"])
    worker = RewardWorker(Config(model=ModelConfig(path=str(tiny_qwen3)), data=DataConfig(source="kk"), reward=reward))
    begun = [worker._begin(prompt_of(answer=str(number)), ["3"], [[]], 0, [None]) for number in range(4)]
    results = [worker._finish(each) for each in begun]
    assert server.most_at_once > 1 and worker.progress() >= 12
    assert [result.rewards for result in results] == [[1.0], [1.0], [1.0], [2.0]]
    assert results[3].components == {"judge": [0.5], "gsm8k": [1.0], "judge/tokens": [1010.0]}
    worker.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": ""}, "judge: url must be given"),
        ({"url": "localhost:8000"}, "judge: url must be http"),
        ({"url": "https://user:key@host/v1"}, "without a key in it"),
        ({"model": ""}, "judge: model must be given"),
        ({"scale": [3, 3]}, "scale must be .lowest, highest., got .3, 3."),
        ({"scale": [1]}, "scale must be two numbers, got .1."),
        ({"price": ["a", 1]}, "price must be two numbers"),
        ({"form": "score", "against": "answer"}, "against names a column for form=pairwise"),
        ({"form": "pairwise"}, "against names a column for form=pairwise, got None for pairwise"),
        ({"form": "rubric"}, "criteria are for form=rubric, got .. for rubric"),
        ({"form": "best"}, "form must be one of score, pairwise, rubric, got 'best'"),
        ({"at_once": 0}, "at_once must be >= 1"),
        ({"temperature": 1}, "an entry takes name, weight, kwargs, url, .*, not temperature"),
        ({"options": [1]}, "options must be .key: value., got .1."),
        ({"form": "rubric", "criteria": "{wanted}"}, "criteria must be a list, got '.wanted.'"),
        ({"form": "rubric", "criteria": [3]}, "criteria.0. must be a text, got 3"),
        ({"url": 8000}, "judge: url must be http"),
        ({"key": 5}, "key is the name of an environment variable, never its value$"),
        ({"key": "abc-123"}, "key is the name of an environment variable, never its value$"),
        ({"kwargs": {"a": 1}}, "fields of its requests go into options"),
    ],
)
def test_settings_that_cannot_be_are_refused(entry, settings, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(functions=[entry(**settings)])


def test_a_judge_without_settings_is_refused_with_what_it_needs():
    with pytest.raises(ConfigError, match="reward.functions: judge: url must be given"):
        load_config(["reward.functions=[judge]"])


def test_a_judge_is_tried_before_a_run_starts(server, entry, monkeypatch, caplog):
    assert check_judge(config_of(entry())) == [["answer"]]
    assert check_judge(config_of(entry(text="{question} {response}"))) == []
    pairwise = config_of(entry(text="{first} {second} {topic}", form="pairwise", against="gold"))
    assert check_judge(pairwise) == [["topic", "gold"]]
    rubric = config_of(entry(text="{response} {criteria}", form="rubric", criteria=["{wanted}"]))
    assert check_judge(rubric) == [["wanted"]]
    refused = [
        ({"text": "Was it right?"}, r"must show \{response\}, which form=score judges by"),
        ({"prompt": "/nowhere.md"}, "prompt=/nowhere.md cannot be read .No such file"),
        ({"model": "other"}, "has no model other; it has judge-1"),
        ({"key": "NO_SUCH_KEY"}, "key names NO_SUCH_KEY, which is not set"),
        ({"url": "http://127.0.0.1:9/v1"}, "127.0.0.1:9/v1 does not answer a chat completion .APIConnectionError"),
        ({"options": {"max_token": 5}}, "does not answer a chat completion .BadRequestError.*max_token"),
    ]

    def reply(request, _):
        if "max_token" in request or request["model"] != "judge-1":
            return lambda handler: handler.answer({"error": {"message": "there is no max_token"}}, 400)
        return "OK"

    server.reply = reply
    for given, message in refused:
        with pytest.raises(ValueError, match=message):
            check_judge(config_of(entry(**given)))
    server.models = []  # a server that answers need not keep a list
    assert check_judge(config_of(entry())) == [["answer"]]
    caplog.clear()
    server.reply = lambda *_: lambda handler: handler.answer({"error": {"message": "later"}}, 429)
    assert check_judge(config_of(entry(retries=2))) == [["answer"]], "a busy server is one"
    (said,) = caplog.messages
    assert "does not answer yet (RateLimitError: Error code: 429 - later)" in said and "retries=2 times" in said
    for quota in ({"code": "insufficient_quota"}, {"type": "insufficient_quota", "code": None}):
        server.reply = lambda *_, quota=quota: lambda handler: handler.answer({"error": {"message": "no"} | quota}, 429)
        with pytest.raises(ValueError, match="says insufficient_quota: add to it, or give another key$"):
            check_judge(config_of(entry()))
    server.reply = lambda *_: lambda handler: handler.answer("<html>Sign in</html>", kind="text/html")
    with pytest.raises(ValueError, match="does not answer a chat completion .*Sign in"):
        check_judge(config_of(entry()))
    monkeypatch.setattr(judge_module, "CHECK_S", 0.3)
    server.reply = lambda *_: time.sleep(1) or "OK"
    with pytest.raises(ValueError, match="chat completion .nothing within 0 s"):
        check_judge(config_of(entry()))
    server.models = ["judge-1"]
    assert check_judge(config_of(entry())) == [["answer"]], "a slow server that has the model is one"


def test_its_key_goes_to_the_reward_worker_alone(entry, monkeypatch):
    config = load_config(["objective=no_kl", "environment.factory=game.py:Game"])
    config.reward = RewardConfig(functions=[entry(key="JUDGE")])
    with pytest.raises(ValueError, match="reward.functions: judge: key names JUDGE, which is not set"):
        check_reward_environment(config)
    monkeypatch.setenv("JUDGE", KEY)
    check_reward_environment(config)
    assert {role for role, given in worker_secrets(config).items() if "JUDGE" in given} == {"reward"}


def test_prompt_files_are_found_from_anywhere(entry, tmp_path, monkeypatch):
    text = entry(prompt="ask.md")
    monkeypatch.chdir(tmp_path)
    listed = ", ".join(f"{name}: '{value}'" for name, value in text.items())
    config = load_config([f"reward.functions=[{{{listed}}}]"])
    assert config.reward.judges[0].prompt == str(tmp_path / "ask.md")


@pytest.mark.slow
def test_smollm2_in_vllm_judges_arithmetic(tmp_path, entry):
    """A real server of the protocol, whose replies are held to the form by its own structured outputs."""
    assert MADE_HERE.exists(), "make vllm makes the interpreter, which make test-all does before"
    if not SMOLLM2.exists():
        pytest.skip("SmolLM2 is not here: make test-all fetches it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        MADE_HERE,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        SMOLLM2,
        "--served-model-name",
        "judge-1",
    ]
    command += ["--host", "127.0.0.1", "--port", port, "--api-key", KEY, "--max-model-len", 512, "--dtype", "float32"]
    room = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        running = subprocess.Popen(list(map(str, command)), env=os.environ | room, stdout=log, stderr=log)
    try:
        os.environ["JUDGE"] = KEY
        options = {"max_tokens": 16, "structured_outputs": {"regex": "Score: ([0-9]|10)"}}
        settings = {"url": f"http://127.0.0.1:{port}/v1", "key": "JUDGE"}
        given = entry(**settings, options=dict(options), price=[1.0, 1.0])
        until = time.monotonic() + 400
        while True:
            try:
                check_judge(config_of(given))
                break
            except ValueError:
                assert running.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()[-3000:]
                time.sleep(1)
        call = judged(given, [str(number) for number in range(20)], timeout_s=120)
        assert call.problems == [""] * 20 and all(value in [each / 10 for each in range(11)] for value in call.values)
        assert min(call.reported["tokens"]) > 20 and min(call.reported["cost"]) > 2e-5
        assert judged(given, ["0", "1"]).reported["tokens"] == [0.0, 0.0], "asked for once"
        options["structured_outputs"] = {"regex": "Verdict: (first|second|tie)"}
        pairwise = entry(**settings, text="{first} {second}", form="pairwise", against="answer", options=options)
        assert set(judged(pairwise, ["3", "4"], timeout_s=120).values) <= {0.0, 0.25, 0.5, 0.75, 1.0}
        options["structured_outputs"] = {"regex": "1: (yes|no)\n2: (yes|no)"}
        rubric = entry(**settings, text="{response} {criteria}", form="rubric", criteria=["a", "b"], options=options)
        assert set(judged(rubric, ["3", "4"], timeout_s=120).values) <= {0.0, 0.5, 1.0}
        refused = judged(given | {"options": {"structured_outputs": {"regex": "("}}}, ["3"], timeout_s=60)
        assert refused.values == [None] and refused.problems[0].startswith("gave no verdict: ")
        hide_values_of(["JUDGE"])
        os.environ["JUDGE"] = "wrong-key"
        refused = judged(given | {"keep": False}, ["3"])
        assert refused.values == [None] and "AuthenticationError" in refused.problems[0]
    finally:
        os.environ.pop("JUDGE", None)
        running.terminate()
        running.wait(60)

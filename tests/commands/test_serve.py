"""A checkpoint behind HTTP, called by OpenAI's client: the engine's own samples whoever else asks, every refusal."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict

import openai
import pytest
import yaml

from infsample_rl.commands.serve.__main__ import build, main
from infsample_rl.commands.serve.request_queue import QueueFull, Waiting
from infsample_rl.commands.serve.server import Server
from infsample_rl.config.loading import load_config
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine
from tests.data.test_turns import ADD, HERMES
from tests.served import ASKED, KEY, OPTIONS, chat, start
from tests.tiny_models import finished
from tests.waiting import wait_until


def engines_own(running, prompt_ids, *, seed, count, max_tokens, temperature):
    """What the engine of a run samples of this seed."""
    served = running.server._served
    engine = SamplingEngine(running.server._queue._engine.runner.model, served.tokenizer, served.config.rollout)
    engine.sample_by(engine.config.__class__(**{**vars(engine.config), "max_new_tokens": max_tokens}))
    indices = {"prompt_indices": [seed], "sample_indices": [list(range(count))]}
    [found] = engine.generate([prompt_ids], served.config.run.seed, **indices, evaluation=True, temperature=temperature)
    return found


def test_samples_and_log_probabilities_are_the_engines(running):
    given = {"temperature": 0.7, "max_tokens": 9, "n": 3, "seed": 5}
    extra = {"return_token_ids": True}
    found = chat(running, **given, logprobs=True, extra_body=extra)
    wanted = engines_own(running, found.prompt_token_ids, seed=5, count=3, max_tokens=9, temperature=0.7)
    tokenizer = running.server._served.tokenizer
    for choice, completion in zip(found.choices, wanted, strict=True):
        assert choice.token_ids == completion.token_ids.tolist()
        assert choice.message.content == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert [each.logprob for each in choice.logprobs.content] == completion.logprobs.tolist()
        assert choice.finish_reason == completion.finish_reason
    assert found.usage.completion_tokens == sum(len(each.token_ids) for each in wanted)
    body = {"model": "tiny", "token_ids": found.prompt_token_ids, "sampling_params": {**given, "logprobs": 1}}
    status, ids = running.post("/inference/v1/generate", body)
    assert status == 200 and len(ids["choices"]) == 3
    for choice, completion in zip(ids["choices"], wanted, strict=True):
        assert choice["token_ids"] == completion.token_ids.tolist()
        assert [each["token"] for each in choice["logprobs"]["content"]] == [
            f"token_id:{i}" for i in choice["token_ids"]
        ]
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == completion.logprobs.tolist()


def test_an_answer_of_a_seed_is_the_same_in_any_company(running):
    alone = chat(running, seed=11, max_tokens=20).choices[0].message.content
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        seed = {"seed": 11} if number == 0 else {}
        found[number] = chat(running, **seed, max_tokens=20).choices[0].message.content

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == alone and len(found) == 3 and len(set(found.values())) > 1


def test_parameters_reach_the_engine(running):
    greedy = [chat(running, temperature=0, max_tokens=6).choices[0].message.content for _ in range(2)]
    assert greedy[0] == greedy[1]
    truncated = chat(running, extra_body={"top_k": 1}, max_tokens=6).choices[0].message.content
    assert truncated == greedy[0]
    last = greedy[0][-1]
    stopped = chat(running, temperature=0, max_tokens=6, stop=[last]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (greedy[0].partition(last)[0], "stop")
    prompt = chat(running, max_tokens=1, extra_body={"return_token_ids": True}).prompt_token_ids
    first = running.server._served.tokenizer.encode(greedy[0])[0]
    parameters = {"temperature": 0, "max_tokens": 6, "stop_token_ids": [first]}
    _, found = running.post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": parameters})
    assert found["choices"][0]["token_ids"] == [first] and found["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "given",
    [
        {"parallel_tool_calls": True, "response_format": {"type": "text"}, "store": False, "metadata": {"run": "a"}},
        dict.fromkeys(["parallel_tool_calls", "response_format", "stream_options", "logit_bias", "n", "seed", "tools"]),
    ],
)
def test_what_changes_nothing_may_be_given(running, given):
    assert running.post("/v1/chat/completions", {"messages": ASKED, "max_tokens": 1, **given})[0] == 200
    limits = {"max_tokens": None, "max_completion_tokens": 1}
    assert chat(running, extra_body=limits).usage.completion_tokens == 1
    plain = {name: value for name, value in given.items() if value is None}
    assert running.post("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}, **plain})[0] == 200


def test_models_are_listed_for_who_has_the_key(running):
    [model] = running.client().models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 4096)
    for key in ("another", ""):
        status, found = running.post("/v1/chat/completions", {"messages": ASKED}, key=key)
        assert status == 401 and "the key is missing or another" in found["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("chat/completions", b"{", 400, "the body must be JSON"),
        ("chat/completions", [], 400, "the body must be a JSON object"),
        ("chat/completions", {"model": "gpt", "messages": ASKED}, 404, "model=gpt is not served: tiny is"),
        ("chat/completions", {"messages": []}, 400, "give messages, a list of objects"),
        ("chat/completions", {"messages": ASKED, "stream": True}, 400, "answers come whole"),
        ("chat/completions", {"messages": ASKED, "temprature": 1}, 400, "temprature=1, which is unknown; known are"),
        ("chat/completions", {"messages": ASKED, "temperature": -1}, 400, "temperature=-1, which must be from 0 to 10"),
        (
            "chat/completions",
            {"messages": ASKED, "presence_penalty": 1},
            400,
            "presence_penalty=1, which is not",
        ),
        (
            "chat/completions",
            {"messages": ASKED, "response_format": {"type": "json_object"}},
            400,
            "which is not served",
        ),
        ("chat/completions", {"messages": ASKED, "parallel_tool_calls": False}, 400, "which is not served"),
        ("chat/completions", {"messages": ASKED, "chat_template_kwargs": "x"}, 400, "which must be an object"),
        ("chat/completions", {"messages": ASKED, "seed": 1 << 63}, 400, "an integer from -2^62 to 2^63 - 1"),
        ("chat/completions", {"messages": ASKED, "n": 0}, 400, "n=0, which must be an integer from 1 to 1024"),
        (
            "chat/completions",
            {"messages": ASKED, "max_tokens": 25},
            400,
            "max_tokens=25, which must be an integer",
        ),
        ("chat/completions", {"messages": ASKED, "stop": ["<|im_end|>"]}, 400, "must not hold special tokens"),
        ("chat/completions", {"messages": ASKED, "tool_choice": "required"}, 400, "no call can be forced"),
        ("chat/completions", {"messages": ASKED, "tools": [{"name": "add"}]}, 400, "tools must be"),
        (
            "chat/completions",
            {"messages": ASKED, "tools": [{"type": "function", "function": {"name": "add", "parameters": 1}}]},
            400,
            "tools must be",
        ),
        ("chat/completions", {"messages": ASKED, "tools": [ADD]}, 400, "writes tool calls in no known form"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "must be texts",
        ),
        ("chat/completions", {"messages": [{"role": "user", "tool_calls": [{}]}]}, 400, "the chat template refuses"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 5000}]}, 400, "of a context of 4096"),
        ("generate", {"token_ids": [], "sampling_params": {}}, 400, "at least one"),
        ("generate", {"token_ids": [5, 9999]}, 400, "the prompt must be ids from 0 to"),
        ("generate", {"token_ids": "abc"}, 400, "give token_ids, a list"),
        ("generate", {"token_ids": [1], "features": {}}, 400, "features is unknown"),
        ("generate", {"token_ids": [1], "priority": 3}, 400, "requests are served in line"),
        ("generate", {"token_ids": [1], "sampling_params": {"logprobs": 5}}, 400, "the sampled token alone"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(running, path, body, status, said):
    route = "/inference/v1/generate" if path == "generate" else f"/v1/{path}"
    code, found = running.post(route, body)
    assert code == status and said in found["error"]["message"] and "\n" not in found["error"]["message"]
    assert chat(running, max_tokens=2).usage.completion_tokens > 0, "it goes on"


def test_a_route_that_is_not_there_says_so(running):
    assert running.post("/v1/embeddings", {})[0] == 404


class StandIn:
    """A queue whose engine says what it is told to, or is busy."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids, self.is_full, self.asked = token_ids, False, list[Waiting]()

    def submit(self, request) -> Waiting:
        if self.is_full:
            raise QueueFull
        waiting = Waiting(request)
        self.asked.append(waiting)
        if self.token_ids:
            waiting.completions.set_result([finished(0, 0, self.token_ids, 0.0)])
        return waiting

    def close(self) -> None:
        pass


@pytest.fixture
def stand_in(running):
    served = running.server._served
    queue = StandIn(served.tokenizer.encode(f"I add.\n{HERMES}<|im_end|>"))
    kept = served.tokenizer.chat_template
    served.tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    found, stop = start(Server(served, queue))
    yield found, queue
    stop()
    served.tokenizer.chat_template = kept


def test_tool_calls_are_read_in_the_templates_form_and_sent_back(stand_in):
    running, queue = stand_in
    choice = chat(running, tools=[ADD]).choices[0]
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", "I add.", "add")
    assert json.loads(call.function.arguments) == {"a": 2, "b": 0.5}
    talk = [*ASKED, choice.message.model_dump(exclude_none=True)]
    talk.append({"role": "tool", "tool_call_id": call.id, "content": "2.5"})
    running.client().chat.completions.create(model="tiny", messages=talk, tools=[ADD])
    tokenizer = running.server._served.tokenizer
    assert HERMES.replace("\n<", "\n<") in tokenizer.decode(queue.asked[-1].request.prompt_ids)
    queue.token_ids = tokenizer.encode("<tool_call>add</tool_call>")
    choice = chat(running, tools=[ADD]).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content == "<tool_call>add</tool_call>", "what is no call is told as it is"
    queue.token_ids = tokenizer.encode(HERMES)
    bare = {"type": "function", "function": {"name": "add", "parameters": None}}
    assert chat(running, tools=[bare]).choices[0].message.content == HERMES


def test_a_full_line_is_429_and_a_client_that_goes_away_is_not_waited_for(stand_in):
    running, queue = stand_in
    queue.is_full = True
    with pytest.raises(openai.RateLimitError, match="as many requests wait as may"):
        chat(running)
    queue.is_full, queue.token_ids = False, []
    with pytest.raises(openai.APITimeoutError):
        running.client().with_options(timeout=0.5).chat.completions.create(model="tiny", messages=ASKED)
    wait_until(lambda: queue.asked[-1].is_abandoned)


def test_settings_that_cannot_be_end_with_status_2(tiny_qwen3, refused):
    assert "give a checkpoint first" in refused(main, "port=1")
    assert "port=70000: must be <= 65535" in refused(main, str(tiny_qwen3), "port=70000")
    assert "there is no such folder" in refused(main, "/no/such/folder", "port=0")


def test_a_checkpoint_of_a_run_in_an_environment_is_served_with_its_runs_sampling(tiny_qwen3, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "step_000001").symlink_to(tiny_qwen3)
    settings = ["+experiment=guess_tiny", "rollout.top_p=0.9", "objective.turn_credit=turn"]
    (run / "config.yaml").write_text(yaml.safe_dump(asdict(load_config(settings))))
    server = build(str(run / "checkpoints" / "step_000001"), OPTIONS, [], KEY)
    assert server._served.config.rollout.top_p == 0.9
    server._queue.close()

"""Programs that call the policy themselves: its place is taken by the test."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from infsample_rl.reward.environment_forms import Acted, Program
from infsample_rl.reward.policy_conversation import Asked, is_tool
from infsample_rl.reward.policy_endpoint import OVER

WHO = [{"role": "user", "content": "Who 3?"}]
MORE = {"role": "user", "content": "And?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}


def post(base_url, api_key, messages, **others):
    """The answer's text, or all of it; RuntimeError with what a refusal says."""
    timeout, retries, whole = others.pop("timeout", 20), others.pop("retries", "0"), others.pop("whole", False)
    body = others.pop("body", None) or json.dumps({"model": "policy", "messages": messages} | others).encode()
    message = posted(base_url + "/chat/completions", api_key, body, timeout, retries)["choices"][0]["message"]
    return message if whole else message["content"]


def posted(url, api_key, body, timeout=20, retries="0"):
    headers = {"Authorization": f"Bearer {api_key}", "x-stainless-retry-count": retries}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=timeout) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code}: {json.load(error)['error']['message']}") from None


def opened(made):
    """The program of such an environment, once it asks the policy."""
    program = Program(made)
    program.open(0, {})
    return program


class Dialogue:
    def rollout(self, base_url, api_key, question, seed):
        messages = [{"role": "user", "content": f"{question} {seed}?"}]
        for _ in range(2):
            answer = post(base_url, api_key, messages)
            messages += [{"role": "assistant", "content": answer.strip()}]
            messages += [{"role": "user", "content": f"You said {answer}."}]
        return len(answer) / 4


class AsyncDialogue(Dialogue):
    async def rollout(self, **given):
        given = {name: given[name] for name in ("base_url", "api_key", "question", "seed")}
        return await asyncio.to_thread(super().rollout, **given)


@pytest.mark.parametrize("kind", [Dialogue, AsyncDialogue])
def test_requests_are_turns_and_the_end_has_the_reward(kind):
    program = Program(kind())
    assert program.open(3, {"question": "Who", "other": 1}) == Asked(WHO)
    assert program.act(" me ") == Acted("You said  me .", 0.0, False)
    assert program.act("they") == Acted("", 1.0, True)


def test_openais_client_plays():
    openai = pytest.importorskip("openai")

    class Client:
        async def rollout(self, base_url, api_key):
            client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
            messages = list(WHO)
            for _ in range(2):
                found = await client.chat.completions.create(model="policy", messages=messages)
                messages += [found.choices[0].message, MORE]
            return 1.0

    program = Program(Client())
    assert program.open(0, {}) == Asked(WHO)
    assert program.act("me") == Acted("And?", 0.0, False) and program.act("you") == Acted("", 1.0, True)


def called(arguments):
    """A turn that calls a tool."""
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": arguments}}]}


class Tries:
    """A first request, a second of the test's, and what that is answered."""

    def __init__(self, second):
        self.second = second

    def rollout(self, base_url, api_key):
        answer = post(base_url, api_key, WHO)
        try:
            self.said = self.second(base_url, api_key, [*WHO, {"role": "assistant", "content": answer}])
        except RuntimeError as error:
            self.said = str(error)
        return 0.25


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (lambda url, key, said: post(url, "another", said), "401: the key is missing or another"),
        (lambda url, key, said: post(url + "/v2", key, said), "404: there is no /v1/v2/chat/completions: "),
        (lambda url, key, said: post(url, key, None, body=b"{"), "400: the body must be JSON"),
        (lambda url, key, said: post(url, key, []), "400: give messages, a list of objects"),
        (lambda url, key, said: post(url, key, [*said, MORE], temperature=0.2), "400: temperature=0.2: how is sampled"),
        (lambda url, key, said: post(url, key, [*said, MORE], n=2), "400: n=2: how is sampled"),
        (lambda url, key, said: post(url, key, [*said, MORE], tools=[{}]), "400: tools must be a list of"),
        (lambda url, key, said: post(url, key, [*said, MORE], tools=[ADD]), "400: tools are not what they were"),
        (lambda url, key, said: post(url, key, [*said, MORE], tool_choice="none"), '400: tool_choice="none": how'),
        (lambda url, key, said: post(url, key, said), "400: messages must have one message of the user more"),
        (lambda url, key, said: post(url, key, [*said, MORE, MORE]), "400: messages must have one message of the user"),
        (lambda url, key, said: post(url, key, [MORE, *said[1:], MORE]), "400: messages[0] is not what it was"),
        (lambda url, key, said: post(url, key, [*WHO, MORE, MORE]), "400: messages[1] is not what it was"),
        (
            lambda url, key, said: post(url, key, [*said, {"role": "tool", "content": "4"}]),
            "400: messages[2] has tool calls in another form",
        ),
        (
            lambda url, key, said: post(url, key, [*said, called("[" * 10_000), MORE]),
            "400: the arguments in messages[2] must be JSON: it has more than 100 levels",
        ),
        (
            lambda url, key, said: post(url, key, [*said, {"role": "tool", "content": "4", "tool_call_id": "a"}]),
            "400: messages must have one message of the user more",
        ),
        (
            lambda url, key, said: post(url, key, [*said, {"role": "user", "content": [{"type": "image_url"}]}]),
            "400: messages[2].content must be text",
        ),
    ],
)
def test_a_request_that_cannot_be_a_turn_is_refused_and_the_program_goes_on(second, said):
    made = Tries(second)
    program = opened(made)
    assert program.act("me") == Acted("", 0.25, True)
    assert made.said.startswith(said)


@pytest.mark.parametrize("answer", ["me", None])
def test_after_the_last_turn_every_request_is_refused(answer):
    made = Tries(lambda url, key, said: post(url, key, [*said, MORE]))
    program = opened(made)
    if answer is None:  # one that waits has no room any more
        program.act("me")
    assert program.act(answer, is_last=True) == Acted("", 0.25, True)
    assert made.said == f"400: {OVER}"


@pytest.mark.parametrize("second", [{"messages": WHO}, {"messages": [MORE], "retries": "1"}], ids=["same", "another"])
def test_one_request_waits_at_a_time(second):
    class Two:
        def rollout(self, base_url, api_key):
            try:
                while not program._endpoint._waits:
                    time.sleep(0.01)
                post(base_url, api_key, **second)
            except RuntimeError as error:
                self.refused = str(error)
            finally:
                told.set()
            return 1.0

    class First:
        def rollout(self, base_url, api_key):
            with ThreadPoolExecutor(2) as threads:
                first = threads.submit(post, base_url, api_key, WHO)
                value = threads.submit(made.rollout, base_url, api_key)
                return value.result() * (first.result() == "me")

    made, told = Two(), threading.Event()
    program = Program(First())
    program.open(0, {})
    assert told.wait(20)
    assert program.act("me") == Acted("", 1.0, True)
    assert made.refused.startswith("400: another request waits for the policy")


def test_a_client_that_tries_again_is_answered_in_the_place_of_its_first_request():
    class Impatient:
        def rollout(self, base_url, api_key):
            self.was_late = False
            try:
                post(base_url, api_key, WHO, timeout=0.2)
            except TimeoutError:
                self.was_late = True
            return float(post(base_url, api_key, WHO, retries="1") == "me")

    made = Impatient()
    program = opened(made)
    while not made.was_late:
        time.sleep(0.01)
    time.sleep(0.2)
    assert program.act("me") == Acted("", 1.0, True)


def test_what_a_program_raises_is_raised_where_it_is_waited_for():
    class Raises:
        def rollout(self, base_url, api_key):
            post(base_url, api_key, WHO)
            raise LookupError("no such player")

    program = opened(Raises())
    with pytest.raises(LookupError, match="no such player"):
        program.act("me")


def test_a_program_must_ask_the_policy():
    class Silent:
        def rollout(self):
            return 1.0

    with pytest.raises(ValueError, match="rollout ended without a request to the policy"):
        Program(Silent()).open(0, {})


CALLS = [("add", {"a": 1}), ("add", {"a": 2})]


def test_openais_client_calls_tools():
    openai = pytest.importorskip("openai")

    class Client:
        async def rollout(self, base_url, api_key):
            client, messages = openai.AsyncOpenAI(base_url=base_url, api_key=api_key), list(WHO)
            for _ in range(2):
                found = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
                self.reason, message = found.choices[0].finish_reason, found.choices[0].message
                self.tokens = found.usage.total_tokens
                calls = [(call, json.loads(call.function.arguments)) for call in message.tool_calls or []]
                messages += [message]
                messages += [{"role": "tool", "tool_call_id": call.id, "content": str(a["a"])} for call, a in calls]
            return float(message.content == "3")

    made = Client()
    program = Program(made)
    assert program.open(0, {}) == Asked(WHO, [ADD])
    assert program.act("Let me see.", calls=CALLS) == Acted(["1", "2"], 0.0, False) and made.reason == "tool_calls"
    assert program.act("3", True, [], ([], [], "length", 9, 2)) == Acted("", 1.0, True)
    assert (made.reason, made.tokens) == ("length", 11)


@pytest.mark.parametrize(
    ("parameters", "is_one"),
    [
        (None, True),
        ({}, True),
        ({"properties": None, "required": None}, True),
        ({"properties": {"a": {}}, "required": ["a"]}, True),
        ("a", False),
        ({"properties": ["a"]}, False),
        ({"properties": {"a": "integer"}}, False),
        ({"required": "a"}, False),
        ({"required": [["a"]]}, False),
    ],
)
def test_a_tool_has_parameters_that_calls_can_be_checked_by(parameters, is_one):
    assert is_tool({"type": "function", "function": {"name": "add", "parameters": parameters}}) == is_one


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda calls, tools: (calls, tools[:1]), "messages must have one of role tool for each of the 2 calls"),
        (lambda calls, tools: (calls, tools[::-1]), "messages must have one of role tool for each of the 2 calls"),
        (lambda calls, tools: (calls, [*tools, MORE]), "messages must have one of role tool for each of the 2 calls"),
        (lambda calls, tools: (calls[:1], tools), "messages[1] is not what it was"),
        (lambda calls, tools: ([{"id": "a"}], tools), "messages[1] has tool calls in another form than OpenAI's"),
    ],
)
def test_every_call_must_be_answered(change, said):
    class Tries:
        def rollout(self, base_url, api_key):
            answer = post(base_url, api_key, WHO, tools=[ADD], whole=True)
            tools = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in answer["tool_calls"]]
            calls, tools = change(answer["tool_calls"], tools)
            try:
                post(base_url, api_key, [*WHO, answer | {"tool_calls": calls}, *tools], tools=[ADD])
            except RuntimeError as error:
                self.said = str(error)
            return 0.5

    made = Tries()
    program = opened(made)
    assert program.act("", calls=CALLS) == Acted("", 0.5, True)
    assert made.said.startswith(f"400: {said}")


def test_a_trajectory_begins_without_tool_calls():
    class Begins:
        def rollout(self, base_url, api_key):
            with pytest.raises(RuntimeError, match=r"messages\[1\]: a trajectory begins without tool calls"):
                post(base_url, api_key, [*WHO, {"role": "tool", "content": "4", "tool_call_id": "a"}])
            return float(post(base_url, api_key, WHO) == "me")

    program = Program(Begins())
    assert program.open(0, {}) == Asked(WHO)
    assert program.act("me") == Acted("", 1.0, True)


IDS = [5, 6, 7]
SAID = ([8, 9], [-0.5, -0.25], "stop")  # ids, log-probabilities, finish_reason


def generate(base_url, api_key, token_ids, sampling=None, **others):
    """The answer's choice, or RuntimeError with what a refusal says."""
    body = json.dumps({"model": "policy", "token_ids": token_ids, "sampling_params": sampling} | others).encode()
    [choice] = posted(base_url.removesuffix("/v1") + "/inference/v1/generate", api_key, body)["choices"]
    return choice


def test_token_ids_go_on_from_what_was_sampled():
    class ByIds:
        def rollout(self, base_url, api_key, start):
            first = generate(base_url, api_key, start, {"stop_token_ids": [9], "logprobs": 1}, cache_salt="a")
            second = generate(base_url, api_key, [*start, *first["token_ids"], 3, 4])
            self.third = generate(base_url, api_key, [*start, *first["token_ids"], 3, 4, *second["token_ids"], 2])
            return first["logprobs"]["content"][1]["logprob"]

    made = ByIds()
    program = Program(made)
    assert program.open(0, {"start": IDS}) == Asked([], [], IDS, [9])
    assert program.act("me", False, [], SAID) == Acted("", 0.0, False, [3, 4])
    assert program.act("we", False, [], SAID) == Acted("", 0.0, False, [2])
    assert program.act("you", True, [], ([1], [-2.0], "length")) == Acted("", -0.25, True)
    assert made.third["token_ids"] == [1] and made.third["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (lambda url, key: generate(url, key, [*IDS, 8, 9]), "token_ids must begin with the 5 so far"),
        (lambda url, key: generate(url, key, [*IDS, 8]), "token_ids must begin with the 5 so far"),
        (lambda url, key: generate(url, key, [*IDS, 8, 0, 3]), "token_ids must begin with the 5 so far"),
        (lambda url, key: generate(url, key, []), "give token_ids, a list of token ids"),
        (lambda url, key: generate(url, key, [*IDS, 8, 9, -1]), "give token_ids, a list of token ids"),
        (lambda url, key: generate(url, key, [*IDS, 8, 9, True]), "give token_ids, a list of token ids"),
        (lambda url, key: generate(url, key, [*IDS, 8, 9, 3], [1]), "sampling_params must be an object"),
        (
            lambda url, key: generate(url, key, [*IDS, 8, 9, 3], {"max_tokens": 4}),
            "sampling_params.max_tokens=4: how is sampled the run's settings say; leave it out",
        ),
        (
            lambda url, key: generate(url, key, [*IDS, 8, 9, 3], {"logprobs": 5}),
            "sampling_params.logprobs=5: how is sampled the run's settings say; leave it out",
        ),
        (
            lambda url, key: generate(url, key, [*IDS, 8, 9, 3], {"stop_token_ids": ["."]}),
            "sampling_params.stop_token_ids must be a list of token ids",
        ),
        (lambda url, key: generate(url, key, [*IDS, 8, 9, 3], priority=2), "priority=2: how is sampled"),
        (lambda url, key: post(url, key, WHO), "the trajectory began by /inference/v1/generate, and goes on by it"),
    ],
)
def test_token_ids_that_cannot_be_a_turn_are_refused(second, said):
    class ByIds:
        def rollout(self, base_url, api_key):
            generate(base_url, api_key, IDS)
            with pytest.raises(RuntimeError) as refused:
                second(base_url, api_key)
            self.said = str(refused.value)
            return float(generate(base_url, api_key, [*IDS, 8, 9, 3])["token_ids"] == [8, 9])

    made = ByIds()
    program = opened(made)
    assert program.act("me", False, [], SAID) == Acted("", 0.0, False, [3])
    assert program.act("me", False, [], SAID) == Acted("", 1.0, True)
    assert made.said.startswith(f"400: {said}")


def test_a_stop_token_of_the_program_that_is_none_of_the_runs_is_said():
    class ByIds:
        def rollout(self, base_url, api_key):
            with pytest.raises(RuntimeError, match=r"stop_token_ids has 8, behind .* rollout.stop_token_ids=\[8\]"):
                generate(base_url, api_key, IDS, {"stop_token_ids": [8, 9]})
            with pytest.raises(RuntimeError, match="token_ids must begin with the 5 so far"):
                generate(base_url, api_key, [*IDS, 3])  # as if nothing had been sampled
            return 0.5

    program = opened(ByIds())
    assert program.act("me", False, [], SAID) == Acted("", 0.5, True)


@pytest.mark.peers
def test_the_client_of_renderers_plays_by_token_ids():
    """verifiers' training client samples by it."""
    import openai
    from renderers import base, client

    from tests.data.test_turn_oracle import config_of, tokenizer_with

    base._populate_registry()
    tokenizer = tokenizer_with("qwen3")
    renderer = base.RENDERER_REGISTRY["qwen3"](tokenizer, config_of("qwen3", True))
    said, end = tokenizer("me", add_special_tokens=False)["input_ids"], "<|im_end|>"
    ids = [*said, tokenizer.convert_tokens_to_ids(end)]

    class Client:
        async def rollout(self, base_url, api_key):
            given = {"client": openai.AsyncOpenAI(base_url=base_url, api_key=api_key), "renderer": renderer}
            first = await client.generate(messages=WHO, model="policy", **given)
            before = [*first["prompt_ids"], *first["completion_ids"]]
            bridged = renderer.bridge_to_next_turn(first["prompt_ids"], first["completion_ids"], [MORE])
            second = await client.generate(messages=[], model="policy", prompt_ids=bridged.token_ids, **given)
            assert bridged.token_ids[: len(before)] == before and second["finish_reason"] == "length"
            return first["completion_logprobs"][0] if (first["content"], second["content"]) == ("me", "me") else 0.0

    program = Program(Client())
    asked = program.open(0, {})
    begins = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(asked.token_ids) == f"<|im_start|>user\nWho 3?{end}\n{begins}"
    behind = program.act("me", False, [], (ids, [-0.5] * len(ids), "stop"))
    assert tokenizer.decode(behind.token_ids) == f"\n<|im_start|>user\nAnd?{end}\n{begins}"
    assert program.act("me", True, [], (ids, [-0.5] * len(ids), "length")) == Acted("", -0.5, True)

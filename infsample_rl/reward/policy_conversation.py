"""What a program and its policy say to each other, one request after another, by one of two routes: messages, as
OpenAI's API has them, or token ids, as vLLM's has them. Standard library only.

The first request is a trajectory's prompt. Each one after it must be the one before, its answer, and something more, so
that what was sampled stands as it is, token by token.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from infsample_rl.data.fields import ROLES
from infsample_rl.reward.policy_requests import CHAT, GENERATE, Refused, logprob_entries, parse_json, usage

Message = dict[str, Any]
Tool = dict[str, Any]
TOOLS = (
    'a list of {"type": "function", "function": {"name": ..., "parameters": {"type": "object", "properties": {...}, '
    '"required": [...]}}}'
)
# What changes nothing, with the value that it may have. All else would say how to sample, which the run's settings do.
OF_CHAT: dict[str, Any] = {
    **{"messages": None, "tools": None, "model": None, "user": None, "metadata": None, "store": None, "n": 1},
    **{"stream": False, "tool_choice": "auto", "parallel_tool_calls": True},
}
OF_TOKENS: dict[str, Any] = {
    **{"token_ids": None, "sampling_params": None, "model": None, "request_id": None, "cache_salt": None},
    **{"priority": 0, "stream": False},
}
OF_SAMPLING = {"stop_token_ids": None, "logprobs": 1, "skip_special_tokens": None, "detokenize": None, "n": 1}


class Asked(NamedTuple):
    """A request."""

    messages: list[Message]
    tools: list[Tool] = []  # as chat templates take them
    token_ids: list[int] | None = None  # in the place of messages
    stops: Sequence[int] = ()  # ids behind which an answer is not to go on


class PolicyTurn(NamedTuple):
    """What the policy says."""

    text: str
    calls: Sequence[tuple[str, dict[str, Any]]] = ()  # of the tools that were offered, with their arguments
    token_ids: Sequence[int] = ()  # for a program that asks by token ids, as what follows
    logprobs: Sequence[float] = ()
    finish_reason: str = "stop"
    prompt_tokens: int = 0  # for a program that asks by messages, as what follows
    completion_tokens: int = 0


class Chat:
    """One trajectory's conversation by OpenAI's chat completions."""

    def __init__(self) -> None:
        self._messages: list[Message] = []  # of the last request, with its answer once there is one
        self._tools: list[Tool] = []

    def read(self, request: Mapping[str, Any]) -> Asked:
        """A request's JSON. Refused for what cannot be, or would be passed over."""
        _nothing_else(request, OF_CHAT)
        messages = request.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused("give messages, a list of objects")
        tools = request.get("tools") or []
        if not isinstance(tools, list) or not all(map(is_tool, tools)):
            raise Refused(f"tools must be {TOOLS}")
        return Asked([_read_message(place, message) for place, message in enumerate(messages)], tools)

    def check(self, asked: Asked) -> None:
        """Refused where the trajectory cannot go on with it."""
        before, now = self._messages, asked.messages
        if not before:
            called = [place for place, message in enumerate(now) if message["role"] == "tool" or "calls" in message]
            if called:
                raise Refused(f"messages[{called[0]}]: a trajectory begins without tool calls")
            return
        if asked.tools != self._tools:
            raise Refused("tools are not what they were: a trajectory offers the same in every turn")
        changed = next((place for place, pair in enumerate(zip(before, now, strict=False)) if not _same(*pair)), None)
        if changed is not None:
            raise Refused(
                f"messages[{changed}] is not what it was: a request must be the one before, its answer, and one "
                "message of the user"
            )
        calls, new = before[-1].get("calls", []), now[len(before) :]
        if calls and [message.get("call") for message in new] != [call["id"] for call in calls]:
            raise Refused(
                f"messages must have one of role tool for each of the {len(calls)} calls more than the {len(before)} "
                "so far, in their order, and no other"
            )
        if not calls and [message["role"] for message in new] != ["user"]:
            raise Refused(f"messages must have one message of the user more than the {len(before)} so far and no other")

    def ask(self, asked: Asked) -> Asked:
        """It goes on with it."""
        self._messages, self._tools = list(asked.messages), asked.tools
        return asked

    def answer(self, turn: PolicyTurn) -> dict[str, Any]:
        """It goes on with the policy's turn; the JSON that the program gets."""
        calls = [
            {"id": f"call_{secrets.token_hex(12)}", "name": name, "arguments": given} for name, given in turn.calls
        ]
        message = {"role": "assistant", "content": turn.text} | ({"calls": calls} if calls else {})
        self._messages.append(message)
        reason = "tool_calls" if calls else turn.finish_reason
        choice = {"index": 0, "message": _as_openai(message), "finish_reason": reason, "logprobs": None}
        head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion", "created": int(time.time())}
        counts = usage(turn.prompt_tokens, turn.completion_tokens)
        return head | {"model": "policy", "choices": [choice], "usage": counts}


class Tokens:
    """As Chat, by vLLM's /inference/v1/generate: nothing is rendered here."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []  # of the last request, with its answer once there is one
        self._stops: Sequence[int] = ()  # of the last request

    def read(self, request: Mapping[str, Any]) -> Asked:
        """As Chat.read."""
        _nothing_else(request, OF_TOKENS)
        given = request.get("sampling_params") or {}
        if not isinstance(given, dict):
            raise Refused("sampling_params must be an object")
        _nothing_else(given, OF_SAMPLING, "sampling_params.")
        stops, token_ids = given.get("stop_token_ids") or [], request.get("token_ids")
        if not are_ids(stops):
            raise Refused("sampling_params.stop_token_ids must be a list of token ids")
        if not token_ids or not are_ids(token_ids):
            raise Refused("give token_ids, a list of token ids")
        return Asked([], [], token_ids, stops)

    def check(self, asked: Asked) -> None:
        """As Chat.check."""
        before, now = self._token_ids, asked.token_ids or []
        if now[: len(before)] != before or len(now) == len(before):
            raise Refused(
                f"token_ids must begin with the {len(before)} so far, those of the request before and its answer, and "
                "go on"
            )

    def ask(self, asked: Asked) -> Asked:
        """As Chat.ask; only the ids that are new."""
        new = (asked.token_ids or [])[len(self._token_ids) :]
        self._token_ids, self._stops = [*self._token_ids, *new], asked.stops
        return asked._replace(token_ids=new)

    def answer(self, turn: PolicyTurn) -> dict[str, Any]:
        """As Chat.answer. Refused where it is not what was asked for."""
        prompt = len(self._token_ids)
        self._token_ids += turn.token_ids  # also where it is refused: it was sampled
        passed = next((each for each in turn.token_ids[:-1] if each in self._stops), None)
        if passed is not None:
            raise Refused(
                f"sampling_params.stop_token_ids has {passed}, behind which the policy went on: "
                f"rollout.stop_token_ids=[{passed}] makes it a stop token of the run"
            )
        logprobs = logprob_entries(turn.token_ids, turn.logprobs)
        choice = {"index": 0, "token_ids": list(turn.token_ids), "logprobs": {"content": logprobs}}
        found = {"request_id": secrets.token_hex(16), "choices": [choice | {"finish_reason": turn.finish_reason}]}
        return found | {"prompt_logprobs": None, "usage": usage(prompt, len(turn.token_ids))}


Conversation = Chat | Tokens
ROUTES: dict[str, type[Conversation]] = {CHAT: Chat, GENERATE: Tokens}


def is_tool(value: Any) -> bool:
    """Whether it offers a function, as OpenAI's API has it; one without arguments may leave its parameters out."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    schema = function.get("parameters") or {}
    if not isinstance(schema, dict):
        return False
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, dict) or not all(isinstance(each, dict) for each in properties.values()):
        return False
    return isinstance(required, list) and all(isinstance(each, str) for each in required)


def are_ids(value: Any) -> bool:
    """Whether it is a list of what may be token ids."""
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _nothing_else(given: Mapping[str, Any], known: Mapping[str, Any], where: str = "") -> None:
    for name, value in given.items():
        if value is not None and (name not in known or known[name] not in (None, value)):
            raise Refused(
                f"{where}{name}={json.dumps(value)[:60]}: how is sampled the run's settings say; leave it out"
            )


def _read_message(place: int, message: Any) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise Refused(f"messages[{place}].role must be one of {', '.join(ROLES)}, got {role!r}")
    content, calls = message.get("content"), message.get("tool_calls") or []
    if content is None and calls:
        content = ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise Refused(f"messages[{place}].content must be text")
    read, what = {"role": role, "content": content}, f"the arguments in messages[{place}]"
    try:
        if calls and role == "assistant":
            functions = [(call["id"], call["function"]) for call in calls]
            read["calls"] = [
                {"id": number, "name": function["name"], "arguments": parse_json(function["arguments"], what)}
                for number, function in functions
            ]
        if role == "tool":
            read["call"] = str(message["tool_call_id"])
    except (TypeError, KeyError):
        raise Refused(f"messages[{place}] has tool calls in another form than OpenAI's") from None
    return read


def _as_openai(answer: Message) -> Message:
    """A turn of the policy as a message of OpenAI's API."""
    if "calls" not in answer:
        return answer
    calls = []
    for call in answer["calls"]:
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        calls.append({"id": call["id"], "type": "function", "function": function})
    return {"role": "assistant", "content": answer["content"] or None, "tool_calls": calls}


def _same(before: Message, now: Message) -> bool:
    """Programs may take white space off an answer's ends; the sampled tokens stand."""
    if before["role"] == "assistant":
        same = now["content"].strip() == before["content"].strip() and now.get("calls") == before.get("calls")
        return now["role"] == "assistant" and same
    return now == before

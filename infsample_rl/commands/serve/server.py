"""The routes of `python -m infsample_rl serve`: vLLM's for token ids, OpenAI's for messages. Whoever has the key may
call them."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
from aiohttp import web

from infsample_rl.commands.serve.parameters import SampleRequest, read_parameters
from infsample_rl.commands.serve.request_queue import QueueClosed, QueueFull, RequestQueue
from infsample_rl.config import Config
from infsample_rl.data.rows import one_line
from infsample_rl.data.turns import TurnTemplate, assistant_message
from infsample_rl.model.tokenizer import response_text
from infsample_rl.reward.policy_conversation import TOOLS, is_tool
from infsample_rl.reward.policy_requests import (
    CHAT,
    GENERATE,
    MODELS,
    Refused,
    body_size,
    list_models,
    logprob_entries,
    parse_json,
    read_json,
    reason_phrase,
    refusal,
    usage,
)
from infsample_rl.types import Completion

LARGEST_BODY = 64 << 20
RETRY_AFTER_S = 1
END_LIMIT_S = 5.0  # for answers that say that it ends
OF_GENERATE = {"model", "request_id", "token_ids", "sampling_params", "cache_salt", "priority", "stream"}
OF_CHAT = {"model", "messages", "tools", "tool_choice", "chat_template_kwargs", "return_token_ids", "user", "stream"}
Body = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served, and for whom."""

    name: str  # of the model
    key: str
    config: Config
    tokenizer: Any  # PreTrainedTokenizerBase, whose decode and apply_chat_template have types of every use together
    vocab_size: int
    context: int | None  # most tokens of a prompt and its response
    stop_token_ids: set[int]


class Server:
    """Answers requests out of a queue's completions."""

    def __init__(self, served: Served, queue: RequestQueue) -> None:
        self._served, self._queue, self.name = served, queue, served.name
        self.app = web.Application(middlewares=[self._guard], client_max_size=LARGEST_BODY)
        self.app.on_shutdown.append(self._end)
        self.app.router.add_get(MODELS, self._models)
        self.app.router.add_post(GENERATE, self._generate)
        self.app.router.add_post(CHAT, self._chat)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Who has not the key gets 401; what is wrong with a request is told as OpenAI tells it."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            if not hmac.compare_digest(given.encode(), self._served.key.encode()):
                raise Refused("the key is missing or another: give Authorization: Bearer KEY", status=401)
            return await handler(request)
        except Refused as error:
            return refused(str(error), error.status, error.parameter)
        except QueueFull:
            return refused("as many requests wait as may: try again", 429, headers={"Retry-After": str(RETRY_AFTER_S)})
        except web.RequestPayloadError as error:
            return refused(f"the body cannot be read: {one_line(error)}", 400)
        except web.HTTPException as error:
            return refused(error.reason, error.status)
        except ValueError as error:
            return refused(one_line(error), 400)
        except QueueClosed:
            return refused("the server ends", 503)
        except Exception as error:
            return refused(f"it failed: {type(error).__name__}: {one_line(error)}", 500)

    async def _end(self, _: web.Application) -> None:
        self._queue.close()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(list_models(self._served.name, self._served.context))

    async def _generate(self, request: web.Request) -> web.Response:
        """Token ids in, token ids and log-probabilities out, as vLLM's route of this name."""
        body = await self._body(request, OF_GENERATE)
        if body.get("priority") not in (None, 0):
            raise Refused(f"priority={body['priority']}, but requests are served in line", parameter="priority")
        ids, given = body.get("token_ids"), body.get("sampling_params") or {}
        if not isinstance(ids, list) or not isinstance(given, dict):
            raise Refused("give token_ids, a list, and sampling_params, an object", parameter="token_ids")
        completions = await self._sampled(self._read(given, ids))
        choices = [
            {
                "index": index,
                "token_ids": completion.token_ids.tolist(),
                "logprobs": {"content": logprob_entries(completion.token_ids, completion.logprobs)},
                "finish_reason": completion.finish_reason,
            }
            for index, completion in enumerate(completions)
        ]
        found = {"request_id": body.get("request_id") or uuid.uuid4().hex, "choices": choices, "prompt_logprobs": None}
        return web.json_response(found | {"usage": _usage(ids, completions)})

    async def _chat(self, request: web.Request) -> web.Response:
        """Messages in, messages out, as OpenAI's chat completions; tool calls in the chat template's own form."""
        body = await self._body(request, OF_CHAT, others=True)
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise Refused(f"tool_choice={body['tool_choice']}: no call can be forced", parameter="tool_choice")
        tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
        if not isinstance(tools, list) or not all(map(is_tool, tools)):
            raise Refused(f"tools must be {TOOLS}", parameter="tools")
        own = body.get("chat_template_kwargs") or {}
        if not isinstance(own, dict):
            raise Refused(
                f"chat_template_kwargs={str(own)[:60]}, which must be an object", parameter="chat_template_kwargs"
            )
        kwargs = {**self._served.config.data.chat_template_kwargs, **own}
        prompt_ids = self._render(body.get("messages"), tools, kwargs)
        template = TurnTemplate(self._served.tokenizer, kwargs, tools, self._served.stop_token_ids)
        if tools:
            template.parse("")  # ValueError for calls that could not be read
        given = {name: value for name, value in body.items() if name not in OF_CHAT and value is not None}
        if "max_completion_tokens" in given:
            given.setdefault("max_tokens", given.pop("max_completion_tokens"))
        wants_logprobs = bool(given.get("logprobs"))
        if given.pop("top_logprobs", 0) not in (0, 1):
            raise Refused("of each place the sampled token alone has a log-probability", parameter="top_logprobs")
        asked = self._read(given, prompt_ids)
        completions = await self._sampled(asked)
        choices = [
            self._choice(index, completion, asked.config.stop_strings, template if tools else None, wants_logprobs)
            | ({"token_ids": completion.token_ids.tolist()} if body.get("return_token_ids") else {})
            for index, completion in enumerate(completions)
        ]
        found = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time())}
        found |= {"model": self._served.name, "choices": choices, "usage": _usage(prompt_ids, completions)}
        return web.json_response(found | ({"prompt_token_ids": prompt_ids} if body.get("return_token_ids") else {}))

    def _choice(
        self,
        index: int,
        completion: Completion,
        stops: list[str],
        template: TurnTemplate | None,
        wants_logprobs: bool,
    ) -> Body:
        served, ids = self._served, completion.token_ids.tolist()
        text = response_text(served.tokenizer, ids, stops)
        turn = None if template is None else template.parse(served.tokenizer.decode(ids))
        message: Body = assistant_message(text, [] if turn is None else turn.calls)
        reason = completion.finish_reason
        if "tool_calls" in message:
            reason = "tool_calls" if reason == "stop" else reason
            message["content"] = message["content"] or None
            for call in message["tool_calls"]:
                call["id"] = f"call_{uuid.uuid4().hex[:24]}"
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        tokens = [served.tokenizer.decode([each]) for each in ids] if wants_logprobs else []
        logprobs = {"content": logprob_entries(tokens, completion.logprobs)} if wants_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _render(self, messages: Any, tools: list[Any], kwargs: Mapping[str, Any]) -> list[int]:
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise Refused("give messages, a list of objects", parameter="messages")
        offered = {"tools": tools} if tools else {}
        try:
            text = self._served.tokenizer.apply_chat_template(
                [_as_template_takes(each) for each in messages],
                tokenize=False,
                add_generation_prompt=True,
                **offered,
                **kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise Refused(f"the chat template refuses messages: {one_line(error)}", parameter="messages") from None
        ids: list[int] = self._served.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    async def _body(self, request: web.Request, known: set[str], *, others: bool = False) -> Body:
        """The request's JSON. Refused for what is none, for another model, and for what nobody would read."""
        if "Transfer-Encoding" not in request.headers:  # else it comes in chunks that have their sizes
            body_size(request.headers.get("Content-Length"), LARGEST_BODY)
        body = read_json(await request.read())
        if body.get("model") not in (None, self._served.name):
            raise Refused(f"model={body['model']} is not served: {self._served.name} is", status=404, parameter="model")
        if body.get("stream"):
            raise Refused("stream=true, but answers come whole", parameter="stream")
        unknown = [name for name, value in body.items() if name not in known and value is not None]
        if unknown and not others:
            raise Refused(f"{unknown[0]} is unknown; known are {', '.join(sorted(known))}", parameter=unknown[0])
        return body

    def _read(self, given: Mapping[str, Any], prompt_ids: list[int]) -> SampleRequest:
        served = self._served
        return read_parameters(
            given, prompt_ids, served.config.rollout, vocab_size=served.vocab_size, context=served.context
        )

    async def _sampled(self, request: SampleRequest) -> list[Completion]:
        waiting = self._queue.submit(request)
        try:
            return await asyncio.wrap_future(waiting.completions)
        finally:  # also where the client has gone
            waiting.is_abandoned = True


async def serve(app: web.Application, listening: socket.socket, *, handle_signals: bool = False) -> None:
    """Answer at a socket until the task is cancelled or, with `handle_signals`, SIGINT or SIGTERM raises GracefulExit.
    Of requests that are no HTTP the client hears, not the console."""
    quiet = logging.Logger("serve", logging.CRITICAL + 1)
    options: dict[str, Any] = {"handler_cancellation": True, "shutdown_timeout": END_LIMIT_S, "logger": quiet}
    runner = web.AppRunner(app, handle_signals=handle_signals, **options)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def refused(
    message: str, status: int, parameter: str | None = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    """The answer to a request that is refused."""
    found = refusal(message, status, parameter)
    return web.json_response(found, status=status, reason=reason_phrase(message), headers=headers)


def _as_template_takes(message: Body) -> Body:
    """OpenAI's form of a message as templates take it: texts for parts, objects for arguments."""
    found = dict(message)
    if isinstance(found.get("content"), list):
        parts = found["content"]
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            raise Refused("a message's parts must be texts", parameter="messages")
        found["content"] = "".join(part.get("text", "") for part in parts)
    if found.get("content") is None:
        found["content"] = ""
    if found.get("tool_calls"):
        calls = [dict(call, function=dict(call["function"])) for call in found["tool_calls"]]
        for call in calls:
            if isinstance(call["function"].get("arguments"), str):
                call["function"]["arguments"] = parse_json(call["function"]["arguments"] or "{}", "a call's arguments")
        found["tool_calls"] = calls
    return found


def _usage(prompt_ids: list[int], completions: list[Completion]) -> dict[str, int]:
    return usage(len(prompt_ids), sum(len(completion.token_ids) for completion in completions))

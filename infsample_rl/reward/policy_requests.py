"""What requests for a policy have in common, whoever answers them: the endpoint of a run's program, or `serve`.
Standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from infsample_rl.data.bounded_json import load_json

CHAT, GENERATE, MODELS = "/v1/chat/completions", "/inference/v1/generate", "/v1/models"
LONGEST_PHRASE = 200
LONGEST_SIZE = 18  # digits


class Refused(Exception):
    """What is wrong with a request, its HTTP status, and the parameter that it is about."""

    def __init__(self, message: str, status: int = 400, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.parameter = status, parameter


def body_size(given: str | None, most: int) -> int:
    """The bytes of a body, by its header Content-Length. Refused for what is no size, and for more than `most`."""
    if given is None:
        raise Refused("Content-Length is missing: give the body's size in bytes", 411)
    if not (given.isascii() and given.isdigit()):
        raise Refused(f"Content-Length={given[:60]} must be the body's size in bytes")
    if len(given) > LONGEST_SIZE or int(given) > most:
        raise Refused(f"Content-Length={given[:60]} must be at most {most}", 413)
    return int(given)


def read_json(body: bytes) -> dict[str, Any]:
    """A body's JSON object. Refused as parse_json."""
    try:
        text = body.decode()
    except ValueError as error:
        raise Refused(f"the body must be JSON: {error}") from None
    request = parse_json(text, "the body")
    if not isinstance(request, dict):
        raise Refused("the body must be a JSON object")
    return request


def parse_json(text: str, what: str) -> Any:
    """The value of a JSON text. Refused for what is none, and for what templates and tokenizers would fail at."""
    try:
        found = load_json(text)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("ascii", "backslashreplace").decode()
        raise Refused(f"{what} has {half}, half of a surrogate pair, which is no character") from None
    except ValueError as error:
        raise Refused(f"{what} must be JSON: {' '.join(str(error).split())}") from None
    return found


def refusal(message: str, status: int, parameter: str | None = None) -> dict[str, Any]:
    """The JSON of an error, as OpenAI's API has it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": parameter, "code": status}}


def reason_phrase(message: str) -> str:
    """A message as it may stand in HTTP's status line, which is all that urllib's exceptions show of an answer."""
    line = " ".join(message.split()).encode("ascii", "backslashreplace").decode()
    printable = "".join(filter(str.isprintable, line))
    return printable if len(printable) <= LONGEST_PHRASE else f"{printable[: LONGEST_PHRASE - 4]} ..."


def list_models(name: str, context: int | None) -> dict[str, Any]:
    """The JSON of GET /v1/models for a server of one. `context`: most tokens of a prompt and its response."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "infsample_rl", "max_model_len": context}
    return {"object": "list", "data": [model]}


def usage(prompt: int, sampled: int) -> dict[str, int]:
    """Tokens of an answer, as OpenAI's API counts them."""
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def logprob_entries(tokens: Iterable[str | int], logprobs: Iterable[float]) -> list[dict[str, Any]]:
    """OpenAI's JSON of sampled tokens, texts or ids, with their log-probabilities under softmax(logits / temperature)
    over the whole vocabulary."""
    names = [token if isinstance(token, str) else f"token_id:{token}" for token in tokens]  # as vLLM names ids
    return [
        {"token": name, "logprob": float(value), "bytes": list(name.encode()), "top_logprobs": []}
        for name, value in zip(names, logprobs, strict=True)
    ]

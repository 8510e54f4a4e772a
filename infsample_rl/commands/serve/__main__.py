"""Serve a checkpoint: python -m infsample_rl serve CHECKPOINT [port=8000] [rows=8] [waiting=256] [max_new_tokens=512]
[name=NAME] [section.key=value ...]

CHECKPOINT is RUN/checkpoints/step_N, whose run's sampling and chat template are taken, or any Hugging Face folder or
hub name. The training engine answers on 127.0.0.1:

  POST /inference/v1/generate   token ids in, token ids and log-probabilities out, as vLLM's
  POST /v1/chat/completions     messages in, messages and tool calls out, as OpenAI's
  GET  /v1/models

Clients give the key as Authorization: Bearer KEY: that of the variable INFSAMPLE_RL_SERVE_KEY, else one that is made
and shown. Requests with equal sampling parameters that wait decode together; above waiting= they get 429. One with a
seed gets the same answer in any company. Ctrl-C ends it. Exit codes: 0 done; 1 it failed; 2 an input is wrong.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import web

from infsample_rl.commands.chat import answering_engine
from infsample_rl.commands.run_settings import answering_config, leading
from infsample_rl.commands.serve.request_queue import RequestQueue
from infsample_rl.commands.serve.server import Served, Server, serve
from infsample_rl.config.command_line import option, parse_with_settings, run_command

KEY = "INFSAMPLE_RL_SERVE_KEY"
ADDRESS = "127.0.0.1"


@dataclass(kw_only=True)
class ServeOptions:
    """What is no setting of a run."""

    port: int = option(8000, "of 127.0.0.1; 0: any that is free", low=0, high=65535)
    rows: int = option(8, "full responses that the KV pool holds", low=1)
    waiting: int = option(256, "most requests in line", low=1)
    max_new_tokens: int = option(512, "longest response in tokens", low=1)
    name: str | None = option(None, "of the model, as clients give it; none: CHECKPOINT")


def build(checkpoint: str, options: ServeOptions, overrides: list[str], key: str) -> Server:
    """The server of a checkpoint. ValueError in one line."""
    config = answering_config(checkpoint, overrides, rows=options.rows, max_new_tokens=options.max_new_tokens)
    engine = answering_engine(config)
    queue = RequestQueue(engine, config.run.seed, most_waiting=options.waiting)
    served = Served(
        name=options.name or checkpoint,
        key=key,
        config=config,
        tokenizer=engine.tokenizer,
        vocab_size=len(engine.tokenizer),
        context=engine.context,
        stop_token_ids=engine.stop_token_ids,
    )
    return Server(served, queue)


def _run(arguments: list[str]) -> int:
    (checkpoint,) = leading(arguments, "a checkpoint", "serve RUN/checkpoints/step_N")
    options, overrides = parse_with_settings(arguments[1:], ServeOptions)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((ADDRESS, options.port))
    except OSError as error:
        raise ValueError(f"port={options.port}: {error.strerror}") from None
    own = os.environ.get(KEY)
    key = own or secrets.token_urlsafe(24)
    server = build(checkpoint, options, overrides, key)
    shown = f"the key of {KEY}" if own else f"key {key}"
    listening.listen()  # whoever reads the line may call
    print(f"serving {server.name} on http://{ADDRESS}:{listening.getsockname()[1]}, {shown}", flush=True)
    with suppress(web.GracefulExit, KeyboardInterrupt):
        asyncio.run(serve(server.app, listening, handle_signals=True))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command(_run, arguments, usage=__doc__)


if __name__ == "__main__":
    sys.exit(main())

"""HTTP below the routes of `python -m infsample_rl serve`: connections, and requests that are none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from infsample_rl.reward.policy_requests import reason_phrase, refusal

END_LIMIT_S = 5.0  # for answers that say that it ends
LONGEST_MESSAGE = 200  # aiohttp's show the header, whatever its length


async def serve(app: web.Application, listening: socket.socket, *, handle_signals: bool = False) -> None:
    """Answer at a socket until the task is cancelled or, with `handle_signals`, SIGINT or SIGTERM raises GracefulExit.

    As aiohttp's run_app, which takes no connection of one's own."""
    runner = web.AppRunner(app, handle_signals=handle_signals, handler_cancellation=True, shutdown_timeout=END_LIMIT_S)
    await runner.setup()
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(_Connection, runner.server, loop=loop), sock=listening)
    try:
        await asyncio.Event().wait()
    finally:
        server.close()
        await runner.cleanup()


def refused(
    message: str, status: int, parameter: str | None = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    """The answer to a request that is refused."""
    found = refusal(message, status, parameter)
    return web.json_response(found, status=status, reason=reason_phrase(message), headers=headers)


class _Connection(web.RequestHandler):
    """Tells the client what is wrong with its HTTP, and not the console."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no request. As aiohttp's for this side's errors."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        said = " ".join((message or str(exc)).split()).removesuffix(" ^")  # which points at a place of the line above
        answer = refused(f"the request cannot be read: {said[:LONGEST_MESSAGE]}", status)
        answer.force_close()
        return answer

    def log_exception(self, *args: Any, **options: Any) -> None:
        """As aiohttp's, but for a body that is not in the encoding its header says: it has been refused."""
        if not isinstance(options.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **options)

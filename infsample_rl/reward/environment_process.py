"""A user's environment, held to reward.isolation: a process that has imported its file, and a fork of it for every
trajectory, so that whatever one does is its own.

It is forked by `keeper` for `environment_host.EnvironmentHost`. What comes in is pickled, what goes out is a line of
JSON, so that the host unpickles nothing a user's code could have made.

    host                                    this process
    EnvironmentConfig               ->
                                    <-      {"pid": ..., "form": "tools", "tools": [schema, ...]} or {"error": "..."}
    a socket                        ->      a fork, which talks through it:
    ("reset", seed, columns, the prompt's messages where they are what another said, else None)
                                    ->
                                    <-      {}, then {"said": "..."}, what the episode opens with, or {"said": "",
                                            "messages": [...]}, what takes the place of the prompt
    ("call", [(name, arguments)])   ->
                                    <-      {"said": ["...", ...], "failed": 0}, an answer to every call
    ("act", text, whether no turn follows)
                                    ->
                                    <-      {"said": "...", "reward": 0.0, "ended": false}, of a form of actions
    ("reward",)                     ->
                                    <-      {"reward": 1.0}, null where the environment has none
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from infsample_rl.config.environment import EnvironmentConfig
from infsample_rl.reward.environment_forms import Acted, Acting, Asked, accepted, acting, acts, begins, plays
from infsample_rl.reward.function_process import own_pipes, reply
from infsample_rl.reward.functions import as_reward
from infsample_rl.reward.hidden_values import without_values
from infsample_rl.reward.isolation import Isolation, isolate
from infsample_rl.reward.linux_sandbox import NAME, prctl
from infsample_rl.reward.policy_endpoint import Message, check_network
from infsample_rl.reward.user_function import describe_error, import_name

MOST_SAID = 1 << 20  # characters of one observation; max_observation_tokens cuts it further
TOOLS, ACTIONS, PROGRAM = "tools", "actions", "program"


def main(isolation: Isolation) -> None:
    """Serve the host at the other end of stdin, stdout and the socket it names until it closes them."""
    requests, replies = own_pipes()
    try:
        isolate(isolation)
        config, control = pickle.loads(requests.recv_bytes())
        maker = Maker(config)
    except (ValueError, EOFError) as error:
        reply(replies, {"error": without_values(str(error))})
        os._exit(1)
    reply(replies, {"pid": os.getpid(), "form": maker.form, "tools": maker.schemas})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    _be_called(b"environments")
    with socket.socket(fileno=control) as host:
        while True:
            _, handed, _, _ = socket.recv_fds(host, 1, 1)
            if not handed:
                os._exit(0)
            if os.fork() == 0:
                host.close()
                requests.close()
                os.close(replies)
                serve(socket.socket(fileno=handed[0]), maker)
            os.close(handed[0])


class HostGone(Exception):
    """The other end of the line is closed."""


class Maker:
    """Makes environments of a user's class, or gives plain functions as the tools of one without a state."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """Imports the files. ValueError in one line for what is not there, or is in neither form."""
        self.path = (config.factory or config.tools[0]).rpartition(":")[0]
        self.factory = None if config.factory is None else import_name(*_parts(config.factory), "environment.factory")
        self.functions = [import_name(*_parts(tool), "environment.tools") for tool in config.tools]
        made: Any = self.factory
        if self.factory is not None and not inspect.isclass(self.factory):
            made = self._first(self.factory)
        self.form = PROGRAM if plays(made) else ACTIONS if acts(made) else TOOLS
        if made is not None and not begins(made):
            raise ValueError(f"environment.factory={config.factory} has no method reset")
        if self.form == PROGRAM:
            if len(accepted(made.rollout, {"base_url": "", "api_key": ""})) < 2:
                raise ValueError(f"environment.factory={config.factory}: rollout must take base_url and api_key")
            check_network()
        if self.form != TOOLS and self.functions:
            raise ValueError(f"environment.tools cannot be beside environment.factory={config.factory}: it has turns")
        methods = [] if made is None or self.form != TOOLS else _tools_of(made)
        self.schemas = [_schema(function) for function in (*methods, *self.functions)]
        if self.form == TOOLS and not self.schemas:
            raise ValueError(f"environment.factory={config.factory} has no public method as a tool, step or rollout")

    def _first(self, factory: Callable[..., Any]) -> Any:
        """The class of what a function makes, or what its annotation says where it takes a row's columns. ValueError in
        one line for one that raises."""
        try:
            signature = inspect.signature(factory, eval_str=True)
            if not signature.parameters:
                return type(factory())
        except Exception as error:
            raise ValueError(f"environment.factory: {describe_error(error, os.path.abspath(self.path))}") from None
        made = signature.return_annotation
        if not inspect.isclass(made) or made is inspect.Signature.empty:
            name = factory.__name__
            raise ValueError(
                f"environment.factory: {name} takes columns: its annotation must say what class it returns"
            )
        return made

    def make(self, columns: dict[str, Any]) -> Any:
        """A new environment, of a row where its function asks for columns; None where there are functions alone."""
        if self.factory is None:
            return None
        return self.factory() if inspect.isclass(self.factory) else self.factory(**accepted(self.factory, columns))

    def tools(self, made: Any) -> dict[str, Callable[..., Any]]:
        """By their names."""
        own = [] if made is None or self.form != TOOLS else _tools_of(type(made))
        methods = {each.__name__: getattr(made, each.__name__) for each in own}
        return methods | {function.__name__: function for function in self.functions}


def serve(host: socket.socket, maker: Maker) -> None:
    """Be the environment of one trajectory until the host is gone."""
    os.setsid()  # so that it is ended with all it starts
    _be_called(b"environment")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    made: Any = None
    actor: Any = None
    runner, tools = asyncio.Runner(), dict[str, Callable[..., Any]]()

    def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        found = function(*arguments, **named)
        return runner.run(_awaited(found)) if inspect.isawaitable(found) else found

    try:
        while True:
            what, *given = pickle.loads(_read(host, struct.unpack("!Q", _read(host, 8))[0]))
            if what == "reset":
                reply(host.fileno(), {})  # so that the system tells the host whom it talks with
                made = maker.make(given[1])
                tools, actor = maker.tools(made), acting(made, call) if maker.form != TOOLS else None
                reply(host.fileno(), _opening(call, made, actor, *given))
            elif what == "call":
                reply(host.fileno(), _answers(call, tools, maker.path, *given))
            elif what == "act":
                reply(host.fileno(), _acted(actor.act(*given)))
            else:
                reward = call(made.get_reward) if callable(getattr(made, "get_reward", None)) else None
                reply(host.fileno(), {"reward": None if reward is None else _number(reward)})
    except HostGone:
        pass
    except BaseException as error:  # this process is the sandbox: sys.exit() in it ends no more than its trajectory
        with contextlib.suppress(OSError):
            reply(host.fileno(), {"failed": without_values(describe_error(error, os.path.abspath(maker.path)))})
    sys.stdout.flush()
    os._exit(0)


def _be_called(name: bytes) -> None:
    """As `top` shows it, and chaos finds it; a worker has the name of its phase there."""
    if sys.platform.startswith("linux"):
        prctl(NAME, name)


def _read(host: socket.socket, size: int) -> bytes:
    """So many bytes. HostGone where nobody wants an answer any more."""
    read = b""
    while len(read) < size:
        try:
            part = host.recv(min(1 << 20, size - len(read)))
        except OSError:
            part = b""
        if not part:
            raise HostGone
        read += part
    return read


def _opening(
    call: Callable[..., Any],
    made: Any,
    actor: Acting | None,
    seed: int,
    columns: dict[str, Any],
    messages: list[Message] | None,
) -> dict[str, Any]:
    if actor is not None:
        said = actor.open(seed, columns)
    elif made is not None:
        said = call(made.reset, **accepted(made.reset, {"seed": seed} | columns))
    else:
        said = None
    if isinstance(said, Asked):
        found = [each | {"content": _text(each["content"])} for each in said.messages]
        if messages not in (None, found):
            raise ValueError("rollout's first request must follow from its seed and row: it is not its group's prompt")
        return {"said": "", "messages": found}
    return {"said": "" if said is None else _text(said)}


def _answers(
    call: Callable[..., Any], tools: dict[str, Callable[..., Any]], path: str, calls: list[tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    """What the tools say, one after another; one that raises says so to the model."""
    said, failed = [], 0
    for name, arguments in calls:
        try:
            said.append(_text(call(tools[name], **arguments)))
        except Exception as error:
            failed += 1
            said.append(f"error: {without_values(describe_error(error, os.path.abspath(path)))}")
    return {"said": said, "failed": failed}


def _acted(acted: Acted) -> dict[str, Any]:
    return {"said": _text(acted.said), "reward": _number(acted.reward), "ended": acted.ended}


def _number(value: Any) -> float:
    number, problem = as_reward(value)
    if number is None:
        raise ValueError(f"the reward {problem}")
    return number


def _text(value: Any) -> str:
    """What an environment says, as text that can be sent; of what is far too long its two ends."""
    text = value if isinstance(value, str) else str(value)
    if len(text) > MOST_SAID:
        text = text[: MOST_SAID // 2] + text[-MOST_SAID // 2 :]
    return without_values(text).encode(errors="replace").decode()


async def _awaited(found: Any) -> Any:
    return await found


def _tools_of(made: Any) -> list[Callable[..., Any]]:
    """The public methods of a class but reset and get_reward, in the order in which they are written."""
    names = [name for each in reversed(made.__mro__[:-1]) for name in vars(each)]
    return [
        getattr(made, name)
        for name in dict.fromkeys(names)
        if not name.startswith("_") and name not in ("reset", "get_reward", "close") and callable(getattr(made, name))
    ]


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    """As chat templates take it. ValueError in one line where its docstring or its types do not say enough."""
    from transformers.utils.chat_template_utils import get_json_schema  # here: it takes a second

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(f"{name} cannot be a tool: {' '.join(str(error).split())}") from None
    return json.loads(json.dumps(schema))


def _parts(name: str) -> tuple[str, str]:
    path, _, function = name.rpartition(":")
    return path, function

"""A user's environment, held to reward.isolation: a process that has imported its file, and a fork of it for every
trajectory, so that whatever one does is its own.

It is forked by `keeper` for `environment_host.EnvironmentHost`. What comes in is pickled, what goes out is a line of
JSON, so that the host unpickles nothing a user's code could have made.

    host                                    this process
    EnvironmentConfig, functions    ->      those of reward.functions that may take environments, by name
                                    <-      {"pid": ..., "form": "tools", "tools": {NAME: [schema, ...]}, "rewards":
                                            true, "columns": {NAME: ["answer", ...]}}, whether any gives rewards itself
                                            and what a row must have, or {"error": "..."}
    a socket                        ->      a fork, which talks through it:
    ("reset", seed, columns)        ->
                                    <-      {}, then {"said": "..."}, what the episode opens with, or {"said": "",
                                            "messages": [...], "tools": [...], "token_ids": [...] or null}, what takes
                                            the place of the prompt
    ("call", [(name, arguments)])   ->
                                    <-      {"said": ["...", ...], "failed": 0}, an answer to every call; with
                                            {"lists": {"0": [...]}}, those that were lists, as such
    ("act", text, whether no turn follows), for a program with [(name, arguments)] of tools that it offers, (ids,
    log-probabilities, finish_reason) or, where it asks by messages, ([], [], finish_reason, tokens before, tokens)
                                    ->
                                    <-      {"said": "...", "reward": 0.0, "ended": false}, of a form of actions; with
                                            calls {"answers": ["...", ...]}; by token ids {"token_ids": [...]}
    ("reward", messages)            ->      all that was said after the prompt
                                    <-      {"reward": 1.0, "functions": {NAME: 1.0}, "reported": {"NAME/KEY": 1.0}},
                                            null where the environment has none, or a function leaves it out
    ("close",)                      ->
                                    <-      {}
                                    <-      DIED, "exit code 3", no end of a line: of a fork that has ended by itself;
                                            REFUSED, why: there is none
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import random
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

from infsample_rl.reward.environment_forms import Acted, Acting, TextArena, acting, awaited
from infsample_rl.reward.environment_maker import TOOLS, Maker
from infsample_rl.reward.function_process import own_pipes, reply
from infsample_rl.reward.functions import LoadedFunction, as_reward, call_function
from infsample_rl.reward.hidden_values import without_values
from infsample_rl.reward.isolation import Isolation, isolate
from infsample_rl.reward.keeper import ENVIRONMENT, how_ended
from infsample_rl.reward.linux_sandbox import NAME, SUBREAPER, prctl
from infsample_rl.reward.peer_forms import accepted
from infsample_rl.reward.policy_conversation import Asked, Message
from infsample_rl.reward.user_function import describe_error

DIED, REFUSED = b"\0", b"\1"  # in no line of JSON
MOST_SAID = 1 << 20  # characters of one observation; max_observation_tokens cuts it further


def main(isolation: Isolation) -> None:
    """Serve the host at the other end of stdin, stdout and the socket it names until it closes them."""
    requests, replies = own_pipes()
    try:
        isolate(isolation)
        config, functions, control = pickle.loads(requests.recv_bytes())
        prctl(SUBREAPER, 1)  # a service that the file starts in the background outlives a trajectory
        with contextlib.suppress(ImportError):
            import numpy  # noqa: F401  # so that forks can seed it, also for a reset that imports it
        maker = Maker(config, functions)
        prctl(SUBREAPER, 0)
    except (ValueError, EOFError) as error:
        reply(replies, {"error": without_values(str(error))})
        os._exit(1)
    told = {"form": maker.form, "tools": maker.schemas, "rewards": maker.rewards, "columns": maker.columns}
    reply(replies, {"pid": os.getpid()} | told)
    prctl(NAME, b"environments")  # as `top` shows it, and chaos finds it
    lines = dict[int, int]()  # of every fork, to the host
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up is what counts
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    with socket.socket(fileno=control) as host:
        while True:
            events = dict(poll.poll())
            if woken in events:
                os.read(woken, 1 << 12)
                _bury(lines, isolation)
            if control not in events:
                continue
            _, handed, _, _ = socket.recv_fds(host, 1, 1)
            if not handed:
                os._exit(0)
            try:
                pid = os.fork()
            except OSError as error:  # it costs this trajectory, not those that have a process
                limit = "raise the limit of processes (ulimit -u, or the container's)"
                _say(handed[0], REFUSED + f"no further process: {error.strerror}; {limit}".encode())
                continue
            if pid == 0:
                signal.set_wakeup_fd(-1)
                host.close()
                requests.close()
                for descriptor in (woken, wake, replies, *lines.values()):
                    os.close(descriptor)
                serve(socket.socket(fileno=handed[0]), maker)
            lines[pid] = handed[0]


def _bury(lines: dict[int, int], isolation: Isolation) -> None:
    """Whatever has ended; the host is told how."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            line = lines.pop(ended[0], None)
            if line is not None:
                how = how_ended(os.waitstatus_to_exitcode(ended[1]))
                if how == "killed by SIGKILL" and isolation.level != "none":
                    how += f"; a worker's environments share reward.memory_limit={isolation.memory_limit}"
                _say(line, DIED + how.encode())


def _say(line: int, word: bytes) -> None:
    """The last word on a line, which is closed."""
    with contextlib.suppress(OSError), socket.socket(fileno=line) as host:  # it may have closed its end
        host.send(word, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class HostGone(Exception):
    """The other end of the line is closed."""


def serve(host: socket.socket, maker: Maker) -> None:
    """Be the environment of one trajectory until the host is gone."""
    os.setsid()  # so that it is ended with all it starts
    prctl(SUBREAPER, 1)  # those that the keeper has to adopt are of one that has ended
    prctl(NAME, ENVIRONMENT)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    made: Any = None
    actor: Any = None
    columns: dict[str, Any] = {}
    runner, tools = asyncio.Runner(), dict[str, Callable[..., Any]]()

    def call(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        found = function(*arguments, **named)
        return runner.run(awaited(found)) if inspect.isawaitable(found) else found

    try:
        while True:
            what, *given = pickle.loads(_read(host, struct.unpack("!Q", _read(host, 8))[0]))
            if what == "reset":
                reply(host.fileno(), {})  # so that the system tells the host whom it talks with
                seed, columns = given
                _seed_globally(seed)
                made = maker.make(columns)
                tools, actor = maker.tools(made), acting(made, call) if maker.form != TOOLS else None
                reply(host.fileno(), _opening(call, made, actor, seed, maker.given(columns)))
            elif what == "call":
                reply(host.fileno(), _answers(call, tools, maker.path, *given))
            elif what == "act":
                reply(host.fileno(), _acted(actor.act(*given)))
            elif what == "close":
                if callable(getattr(made, "close", None)) and not isinstance(actor, TextArena):  # which closes itself
                    call(made.close)
                reply(host.fileno(), {})
            else:
                reply(host.fileno(), _rewards(call, made, maker.scoring, columns, *given))
    except HostGone:
        pass
    except BaseException as error:  # this process is the sandbox: sys.exit() in it ends no more than its trajectory
        with contextlib.suppress(OSError):
            reply(host.fileno(), {"failed": without_values(describe_error(error, os.path.abspath(maker.path)))})
    sys.stdout.flush()
    os._exit(0)


def _seed_globally(seed: int) -> None:
    """For environments that draw from the process's own generators: forks of one server would all draw the same."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


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
    call: Callable[..., Any], made: Any, actor: Acting | None, seed: int, columns: dict[str, Any]
) -> dict[str, Any]:
    if actor is not None:
        said = actor.open(seed, columns)
    elif made is not None:
        own = {"seed": seed} if "seed" in inspect.signature(made.reset).parameters else {}
        said = _joined(call(made.reset, **accepted(made.reset, own | columns)))
    else:
        said = None
    if isinstance(said, Asked):
        found = [each | {"content": _text(each["content"])} for each in said.messages]
        return {"said": "", "messages": found, "tools": said.tools, "token_ids": said.token_ids}
    return {"said": "" if said is None else _text(said)}


def _joined(said: Any) -> Any:
    """What TRL's reset says, of content parts their texts. ValueError for parts that are none, and a tuple, which
    gymnasium's form returns."""
    if isinstance(said, tuple):
        raise ValueError("reset must return a text or None, got a tuple")
    if not isinstance(said, list):
        return said
    for part in said:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError(f"reset may return parts of type text alone, got {repr(part)[:100]}")
    return "".join(str(part["text"]) for part in said)


def _answers(
    call: Callable[..., Any], tools: dict[str, Callable[..., Any]], path: str, calls: list[tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    """What the tools say, one after another; one that raises says so to the model. TRL's reward functions see a list
    as it is."""
    said, lists, failed = [], dict[int, Any](), 0
    for number, (name, arguments) in enumerate(calls):
        try:
            answer = call(tools[name], **arguments)
            said.append(_text(answer))
            if isinstance(answer, list) and len(said[-1]) < MOST_SAID:
                with contextlib.suppress(ValueError, TypeError):  # text is all there is of it
                    lists[number] = json.loads(without_values(json.dumps(answer, allow_nan=False)))
        except Exception as error:
            failed += 1
            said.append(f"error: {without_values(describe_error(error, os.path.abspath(path)))}")
    return {"said": said, "failed": failed} | ({"lists": lists} if lists else {})


def _acted(acted: Acted) -> dict[str, Any]:
    found: dict[str, Any] = {"said": "", "reward": _number(acted.reward), "ended": acted.ended}
    if acted.token_ids is not None:
        return found | {"token_ids": acted.token_ids}
    if isinstance(acted.said, list):
        return found | {"answers": list(map(_text, acted.said))}
    return found | {"said": _text(acted.said)}


def _rewards(
    call: Callable[..., Any],
    made: Any,
    scoring: Mapping[str, LoadedFunction],
    columns: dict[str, Any],
    messages: list[Message],
) -> dict[str, Any]:
    """What an environment gives at its end, and what functions give of it."""
    reward = call(made.get_reward) if callable(getattr(made, "get_reward", None)) else None
    values, reported = dict[str, float | None](), dict[str, float | None]()
    prompt = {"columns": columns, "messages": columns.get("prompt", []), "text": ""}
    sample = {"environment": made, "messages": messages, "text": "", "token_ids": []}
    for name, function in scoring.items():
        [value], beside = call_function(function, prompt, [sample])
        values[name] = None if value is None else _number(value)
        reported |= {without_values(f"{name}/{key}"): as_reward(column[0])[0] for key, column in beside.items()}
    return {"reward": None if reward is None else _number(reward), "functions": values, "reported": reported}


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

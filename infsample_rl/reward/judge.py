"""Reward `judge`: a model behind OpenAI's protocol reads what was asked and answered, and says how good it is.

What gives no verdict (verdicts.py), for whatever reason, is no reward of 0 but a failed one. Verdicts are kept by the
content of the request, so that a run that goes on, or another over the same texts, gets the same ones and pays for none
of them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from infsample_rl.config.loading import cache_folder
from infsample_rl.config.reward import JudgeConfig
from infsample_rl.data.fields import as_given
from infsample_rl.reward.hidden_values import without_values
from infsample_rl.reward.process_pool import CallValues
from infsample_rl.reward.verdict_store import VerdictStore
from infsample_rl.reward.verdicts import (
    PAIRWISE_END,
    RUBRIC_END,
    SCORE_END,
    NoVerdict,
    on_scale,
    share_met,
    share_of_first,
    start_of,
)
from infsample_rl.types import Prompt

logger = logging.getLogger(__name__)

CHECK_S = 20.0  # that a server has to answer a first request, before a run starts
FEWEST_LATE = 4  # requests that time out in a row before the judge is taken as stalled
PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
OWN_NAMES = {"score": ("question", "response"), "rubric": ("question", "response", "criteria")}
OWN_NAMES["pairwise"] = ("question", "first", "second")


class Reply(NamedTuple):
    """What the judge said, and what it took."""

    text: str
    read: int  # tokens
    written: int
    is_new: bool  # not from the store
    is_cut: bool = False  # at max_tokens: what it says last is not its verdict


def open_client(judge: JudgeConfig, timeout_s: float) -> Any:
    """openai.AsyncOpenAI for this judge, with its key; ValueError where the package or the key is missing."""
    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise ValueError(
            "reward.functions: judge needs the package openai: pip install 'infsample_rl[judge]'"
        ) from None
    if judge.key is not None and not os.environ.get(judge.key):
        raise ValueError(f"reward.functions: judge: key names {judge.key}, which is not set")
    key = "none" if judge.key is None else os.environ[judge.key]
    return AsyncOpenAI(api_key=key, base_url=judge.url, timeout=timeout_s, max_retries=judge.retries)


def read_prompt(judge: JudgeConfig) -> str:
    """The text of its prompt file; ValueError where it cannot be read or does not show the judge what it judges."""
    where = f"reward.functions: judge: prompt={judge.prompt}"
    try:
        text = Path(judge.prompt).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    named = PLACEHOLDER.findall(text)
    for name in OWN_NAMES[judge.form]:
        if name not in named and name != "question":
            raise ValueError(f"{where} must show {{{name}}}, which form={judge.form} judges by")
    return text


def check_judge(judge: JudgeConfig) -> list[list[str]]:
    """What it reads of a row, as columns.Needs. ValueError in one line where its prompt, its key or the package is
    missing, a first short request is not answered or no quota is left; a server that is busy, which a warning says, or
    slow though it has the model, passes.
    """
    named = [name for name in PLACEHOLDER.findall(read_prompt(judge)) if name not in OWN_NAMES[judge.form]]
    asyncio.run(_try(judge))
    needs = list(dict.fromkeys([*named, *filter(None, (judge.against, criteria_column(judge)))]))
    return [needs] if needs else []


async def _try(judge: JudgeConfig) -> None:
    from openai import APITimeoutError, InternalServerError, RateLimitError

    where = f"reward.functions: judge: {judge.url}"
    async with open_client(judge, CHECK_S).with_options(max_retries=0) as client:
        try:
            async with asyncio.timeout(CHECK_S):
                _reply_of(await client.chat.completions.create(**_request(judge, "Reply with one word.")))
            return
        except (RateLimitError, InternalServerError) as error:
            if "insufficient_quota" in (error.code, error.type):
                raise ValueError(f"{where} says insufficient_quota: add to it, or give another key") from None
            again = f"the run sends every request again up to retries={judge.retries} times"
            logger.warning("%s does not answer yet (%s); %s", where, _one_line(error), again)
            return
        except Exception as error:  # whatever a server that is none makes of it
            failure = error
        names = await _listed(client)
    is_late = isinstance(failure, TimeoutError | APITimeoutError)
    if is_late and judge.model in names:
        return
    if names and judge.model not in names:
        raise ValueError(f"{where} has no model {judge.model}; it has {', '.join(names[:8])}")
    said = f"nothing within {CHECK_S:.0f} s" if is_late else _one_line(failure)
    raise ValueError(f"{where} does not answer a chat completion ({said})")


async def _listed(client: Any) -> list[str]:
    """The models that a server says it has; none where it keeps no list."""
    try:
        async with asyncio.timeout(CHECK_S):
            return [model.id for model in (await client.models.list()).data]
    except Exception:  # as in _try; the first failure is the one to tell
        return []


def _request(judge: JudgeConfig, text: str) -> dict[str, Any]:
    options = {"temperature": 0, "max_tokens": 1024} | judge.options
    given = {name: value for name, value in options.items() if value is not None}
    return {"model": judge.model, "messages": [{"role": "user", "content": text}], "extra_body": given}


def _reply_of(answer: Any) -> Reply:
    """A chat completion's text; NoVerdict where it is none. What is no number of tokens counts as none."""
    try:
        choice, usage = answer.choices[0], answer.usage
        text, is_cut = choice.message.content, choice.finish_reason == "length"
    except (AttributeError, IndexError, TypeError):
        raise NoVerdict(f"gave no verdict: {start_of(answer)} is no chat completion") from None
    said = [getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
    read, written = (max(0, count) if isinstance(count, int) else 0 for count in said)
    return Reply(text if isinstance(text, str) else "", read, written, is_new=True, is_cut=is_cut)


class Judge:
    """Asks the judge about responses, many at a time, in a thread of its own."""

    def __init__(self, judge: JudgeConfig, timeout_s: float) -> None:
        """`timeout_s`: that a verdict may take, retries included. ValueError as read_prompt and open_client."""
        self.num_replies = 0  # grows with every one
        self._judge, self._timeout_s, self._prompt = judge, timeout_s, read_prompt(judge)
        self._client = open_client(judge, timeout_s)
        self._store = VerdictStore(cache_folder() / "verdicts.sqlite" if judge.keep else None)
        self._under_way: dict[str, asyncio.Task[Reply]] = {}
        self._places = asyncio.Semaphore(judge.at_once)
        self._num_late = 0  # requests that timed out since one was answered
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()

    def submit(self, prompt: Prompt, responses: list[str]) -> Future[list[CallValues]]:
        """One CallValues of the responses to one prompt: rewards from 0 to 1, and cost and tokens beside them."""
        return asyncio.run_coroutine_threadsafe(self._judge_all(prompt, responses), self._loop)

    def close(self) -> None:
        """End connections and thread."""
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _judge_all(self, prompt: Prompt, responses: list[str]) -> list[CallValues]:
        found = await asyncio.gather(*(self._judge_one(prompt, response) for response in responses))
        values, problems, replies = map(list, zip(*found, strict=True)) if found else ([], [], [])
        new = [[reply for reply in each if reply.is_new] for each in replies]
        tokens = [float(sum(reply.read + reply.written for reply in each)) for each in new]
        reported: dict[str, list[float | None]] = {"tokens": list(tokens)}
        if any(self._judge.price):
            of_read, of_written = self._judge.price
            costs = [sum(reply.read * of_read + reply.written * of_written for reply in each) for each in new]
            reported["cost"] = [cost / 1e6 for cost in costs]
        return [CallValues(values=values, problems=problems, reported=reported)]

    async def _judge_one(self, prompt: Prompt, response: str) -> tuple[float | None, str, list[Reply]]:
        asked: list[Reply] = []
        try:
            return await self._verdict(prompt, response, asked), "", asked
        except NoVerdict as error:
            return None, str(error), asked
        except Exception as error:  # of the client, the server or the way between them
            return None, f"gave no verdict: {_one_line(error)}", asked

    async def _verdict(self, prompt: Prompt, response: str, asked: list[Reply]) -> float:
        judge = self._judge
        shown = {name: _text(value) for name, value in prompt.columns.items()}
        shown["question"] = prompt.messages[-1]["content"]
        if judge.form == "pairwise":
            other = _text(as_given(prompt.columns)[str(judge.against)])  # a worked solution whole
            ways = [{"first": response, "second": other}, {"first": other, "second": response}]
            found = await asyncio.gather(
                *(self._ask(shown | way, PAIRWISE_END, share_of_first, asked) for way in ways), return_exceptions=True
            )  # what one cost counts though the other fails
            first, second = map(_or_raise, found)
            return (first + 1 - second) / 2
        if judge.form == "score":
            low, high = judge.scale
            end = SCORE_END.format(low=low, high=high)
            return await self._ask(shown | {"response": response}, end, lambda text: on_scale(text, low, high), asked)
        column = criteria_column(judge)
        criteria = judge.criteria if column is None else prompt.columns[column]  # a list: checks.py
        numbered = "\n".join(f"{number}. {_text(each)}" for number, each in enumerate(criteria, 1))
        shown |= {"response": response, "criteria": numbered}
        return await self._ask(shown, RUBRIC_END, lambda text: share_met(text, len(criteria)), asked)

    async def _ask(self, shown: Mapping[str, str], end: str, read: Callable[[str], float], asked: list[Reply]) -> float:
        """What `read` finds in the reply; kept only where it finds something."""
        text = PLACEHOLDER.sub(lambda match: shown.get(match[1], match[0]), self._prompt)
        request = _request(self._judge, f"{text.rstrip()}\n\n{end}")
        content = json.dumps([self._judge.url, request], sort_keys=True)
        place = hashlib.sha256(content.encode()).hexdigest()
        kept = self._store.get(place)
        if kept is not None:
            with contextlib.suppress(NoVerdict):
                found = read(kept)
                asked.append(Reply(kept, 0, 0, is_new=False))
                return found
            self._store.remove(place, kept)  # an earlier version read it otherwise: ask again
        if place not in self._under_way:  # samples of a group may be alike
            if not self._under_way:
                self._num_late = 0  # none that waited is left: find out whether it answers again
            task = self._under_way[place] = asyncio.ensure_future(self._send(request))
            task.add_done_callback(lambda _: self._under_way.pop(place, None))
            reply = await task
        else:
            reply = (await self._under_way[place])._replace(is_new=False)
        asked.append(reply)
        if reply.is_cut:
            raise NoVerdict("gave no verdict: it was cut at max_tokens, of which options may give more")
        read(reply.text)
        return read(self._store.put(place, reply.text))

    async def _send(self, request: dict[str, Any]) -> Reply:
        """The answer, once there is a place. After as many timeouts in a row as there are places nothing is sent: what
        waits would only wait longer."""
        most_late = max(self._judge.at_once, FEWEST_LATE)
        async with self._places:
            if self._num_late >= most_late:
                raise NoVerdict(f"was not asked: the {most_late} requests before it timed out")
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await self._client.chat.completions.create(**request)
            except TimeoutError:
                self._num_late += 1
                raise NoVerdict(f"timed out after {self._timeout_s:g} s") from None
            finally:
                self.num_replies += 1
        self._num_late = 0
        return _reply_of(answer)


def _or_raise(found: float | BaseException) -> float:
    if isinstance(found, BaseException):
        raise found
    return found


def criteria_column(judge: JudgeConfig) -> str | None:
    """The column that holds the criteria, where `criteria` names one."""
    named = PLACEHOLDER.fullmatch(judge.criteria[0]) if len(judge.criteria) == 1 else None
    return None if named is None else named[1]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(without_values(str(error)).split())}"[:200]

"""Problems into rendered, tokenised prompts: the chat template, its keywords, and prompts that are too long."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from infsample_rl.config import DataConfig
from infsample_rl.config.environment import NAMELESS, of_row
from infsample_rl.config.fields import did_you_mean
from infsample_rl.data.fields import BadRow, Problem
from infsample_rl.data.plain_text import marked, special_tokens, token_ids, unmarked
from infsample_rl.data.rows import first_rows, one_line, report_bad_rows
from infsample_rl.types import Prompt

logger = logging.getLogger(__name__)
Schemas = Sequence[dict[str, Any]]  # of tools, as a chat template takes them
Tools = Mapping[str, Schemas]  # by the names of environments
NO_TOOLS: Tools = {NAMELESS: ()}


def render(problem: Problem, tokenizer: Any, data: DataConfig, tools: Tools = NO_TOOLS) -> Prompt:
    """One problem as a prompt, whatever its length. BadRow when the template refuses it or nothing is left of it."""
    messages = chat_messages(problem, data)
    try:
        offered = of_row(tools, problem.columns)
    except ValueError as error:
        raise BadRow(str(error)) from None
    text, ids = _rendered(messages, tokenizer, data, offered)
    if not ids:
        raise BadRow("renders to no token")
    return Prompt(
        prompt_index=0,
        row=problem.row,
        messages=messages,
        text=text,
        token_ids=np.asarray(ids, dtype=np.int32),
        columns=problem.columns,
    )


def with_opening(
    prompt: Prompt,
    opening: str | list[dict[str, Any]],
    tokenizer: Any,
    data: DataConfig,
    tools: Tools,
    separator: str,
) -> Prompt:
    """A prompt whose last user message goes on, behind `separator`, with what its environment says at the beginning, or
    that is the messages it says. ValueError where it is above data.max_prompt_tokens then, or the template refuses
    it."""
    tokens = special_tokens(tokenizer)
    if isinstance(opening, str):
        messages = [dict(message) for message in prompt.messages]
        last = messages[_last_user(messages)]
        said = marked(opening, tokens)
        last["content"] = f"{last['content']}{separator}{said}" if last["content"] else said
    else:
        messages = [message | {"content": marked(message["content"], tokens)} for message in opening]
    try:
        text, ids = _rendered(messages, tokenizer, data, of_row(tools, prompt.columns))
    except BadRow as error:
        raise ValueError(f"row {prompt.row} with what its environment says {error}") from None
    messages = [message | {"content": unmarked(message["content"], tokenizer)} for message in messages]
    return _replaced(prompt, messages, unmarked(text, tokenizer), ids, data)


def of_token_ids(prompt: Prompt, ids: list[int], tokenizer: Any, data: DataConfig) -> Prompt:
    """A prompt that is the ids its environment says. ValueError for more than data.max_prompt_tokens, and for ids that
    the tokenizer does not have."""
    if not all(0 <= each < len(tokenizer) for each in ids):
        known = f"from 0 to {len(tokenizer) - 1}"
        raise ValueError(f"row {prompt.row}: its environment's token_ids must be {known}, got {max(ids)}")
    return _replaced(prompt, prompt.messages, tokenizer.decode(ids), ids, data)


def _replaced(prompt: Prompt, messages: list[dict[str, Any]], text: str, ids: list[int], data: DataConfig) -> Prompt:
    if len(ids) > data.max_prompt_tokens:
        raise ValueError(
            f"row {prompt.row} has {len(ids)} tokens with what its environment says, data.max_prompt_tokens must "
            f"be >= {len(ids)}, got {data.max_prompt_tokens}"
        )
    return dataclasses.replace(prompt, messages=messages, text=text, token_ids=np.asarray(ids, dtype=np.int32))


def _rendered(
    messages: list[dict[str, Any]], tokenizer: Any, data: DataConfig, tools: Schemas
) -> tuple[str, list[int]]:
    """Messages as text and its tokens. BadRow when the template refuses them."""
    if is_plain(tokenizer, data):
        text = "\n\n".join(message["content"] for message in messages)
        return text, _token_ids(text, tokenizer, data)
    offered = {"tools": list(tools)} if tools else {}
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **offered, **data.chat_template_kwargs
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise BadRow(f"cannot be used: the chat template refuses it ({one_line(error)})") from error
    return text, _token_ids(text, tokenizer, data)


def render_all(problems: list[Problem], tokenizer: Any, data: DataConfig, tools: Tools = NO_TOOLS) -> list[Prompt]:
    """All problems as prompts, prompt_index counting up; those above data.max_prompt_tokens raise, go, or lose the
    start of their question. ValueError for a misspelt keyword of the template, and for bad rows as data.bad_rows says.
    """
    check_template_kwargs(tokenizer, data)
    prompts, faults = [], []
    for problem in problems:
        try:
            prompts.append(render(problem, tokenizer, data, tools))
        except BadRow as error:
            faults.append((problem.row, str(error)))
    report_bad_rows(faults, len(problems), problems[0].origin, data.bad_rows)
    fitting = _fit(prompts, problems, tokenizer, data, tools)
    return [dataclasses.replace(prompt, prompt_index=index) for index, prompt in enumerate(fitting)]


def is_plain(tokenizer: Any, data: DataConfig) -> bool:
    """Whether prompts are plain text: no chat template is there, or data.apply_chat_template is off."""
    return tokenizer.chat_template is None or not data.apply_chat_template


def chat_messages(problem: Problem, data: DataConfig) -> list[dict[str, Any]]:
    """The problem's messages with data.system_prompt (in place of the row's own) and data.instruction after a blank
    line."""
    messages = [dict(message) for message in problem.messages]
    if data.system_prompt is not None:
        rest = messages[1:] if messages[0]["role"] in ("system", "developer") else messages
        messages = [{"role": "system", "content": data.system_prompt}, *rest]
    if data.instruction:
        last = messages[_last_user(messages)]
        last["content"] = f"{last['content']}\n\n{data.instruction}"
    return messages


def check_template_kwargs(tokenizer: Any, data: DataConfig) -> None:
    """Say which keywords the chat template never mentions, as jinja passes them over in silence; ValueError for a
    misspelt one."""
    words = set() if is_plain(tokenizer, data) else set(re.findall(r"\w+", tokenizer.get_chat_template()))
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in data.chat_template_kwargs:
        if name in own:
            raise ValueError(
                f"data.chat_template_kwargs.{name} is not a keyword of the chat template, and is set here; leave it out"
            )
        if name not in words:
            unknown = f"data.chat_template_kwargs.{name}: no chat template used here knows such a keyword"
            if near := did_you_mean(name, words, 0.75):
                raise ValueError(unknown + near)
            logger.warning("%s; it has no effect", unknown)


def _last_user(messages: list[dict[str, Any]]) -> int:
    return max(index for index, message in enumerate(messages) if message["role"] == "user")


def _token_ids(text: str, tokenizer: Any, data: DataConfig) -> list[int]:
    """Tokens of a rendered prompt. A chat template writes its own BOS, so none is added (as transformers does); to
    plain text the tokenizer's BOS is added where it adds one, never its EOS."""
    ids = token_ids(text, tokenizer)
    bos = tokenizer.bos_token_id
    if is_plain(tokenizer, data) and bos is not None and ids[:1] != [bos] and tokenizer("a")["input_ids"][:1] == [bos]:
        ids = [bos, *ids]
    return ids


def _fit(
    prompts: list[Prompt], problems: list[Problem], tokenizer: Any, data: DataConfig, tools: Tools
) -> list[Prompt]:
    """Do to prompts above data.max_prompt_tokens what data.long_prompts says, and say so."""
    limit, origin = data.max_prompt_tokens, problems[0].origin
    long = {prompt.row: len(prompt.token_ids) for prompt in prompts if len(prompt.token_ids) > limit}
    if not long:
        return prompts
    counted = (
        f"{len(long)} of {len(prompts)} prompts are longer than data.max_prompt_tokens = {limit} (the longest has "
        f"{max(long.values())})"
    )
    if data.long_prompts == "error":
        row, tokens = next(iter(long.items()))
        raise ValueError(
            f"{origin}, row {row}: the prompt has {tokens} tokens, data.max_prompt_tokens must be >= {tokens}, got "
            f"{limit}; {counted}; set it, or data.long_prompts to drop or truncate"
        )
    logger.warning("%s: %s, as %s: rows %s", origin, data.long_prompts, counted, first_rows(list(long)))
    if data.long_prompts == "truncate":
        by_row = {problem.row: problem for problem in problems}
        return [_truncated(by_row[p.row], tokenizer, data, tools) if p.row in long else p for p in prompts]
    kept = [prompt for prompt in prompts if prompt.row not in long]
    if not kept:
        raise ValueError(f"{origin}: {counted}, so data.long_prompts=drop leaves none")
    return kept


def _truncated(problem: Problem, tokenizer: Any, data: DataConfig, tools: Tools) -> Prompt:
    """The prompt with the longest end of its question that fits; template, system prompt and instruction stay whole."""
    index = _last_user(problem.messages)
    question = problem.messages[index]["content"]

    def cut(start: int) -> Prompt:
        messages = [dict(message) for message in problem.messages]
        messages[index]["content"] = question[start:]
        return render(dataclasses.replace(problem, messages=messages), tokenizer, data, tools)

    # bisected, as tokens of a part are not a part of the tokens
    starts, limit = range(len(question)), data.max_prompt_tokens
    start = bisect_left(starts, -limit, key=lambda start: -len(cut(start).token_ids))
    if start == len(question):
        raise ValueError(
            f"{problem.origin}, row {problem.row}: the prompt cannot be truncated to data.max_prompt_tokens = {limit}: "
            f"with one character of its question it has {len(cut(start - 1).token_ids)} tokens"
        )
    return cut(start)

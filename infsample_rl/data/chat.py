"""Problems into rendered, tokenised prompts: the chat template, its keywords, and prompts that are too long."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
import re
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np

from infsample_rl.config import DataConfig
from infsample_rl.data.fields import Problem
from infsample_rl.data.rows import NAMED_IN_MESSAGES, one_line, report_bad_rows
from infsample_rl.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """All prompts of a source, none above data.max_prompt_tokens, and what was done to get there."""

    prompts: list[Prompt]  # prompt_index counts up from 0
    dropped: int
    truncated: int


def render(problem: Problem, tokenizer: Any, data: DataConfig) -> Prompt:
    """One problem as a prompt, whatever its length. ValueError when the template refuses it or does not know a
    keyword."""
    check_template_kwargs(tokenizer, data)
    messages = chat_messages(problem, data)
    try:
        text = _texts([messages], tokenizer, data)[0]
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(
            f"{problem.origin}, row {problem.row}: the chat template refuses it: {one_line(error)}"
        ) from error
    return _prompt(problem, messages, text, _token_ids([text], tokenizer, data)[0])


def render_all(problems: list[Problem], tokenizer: Any, data: DataConfig) -> Rendered:
    """All problems as prompts, in batches; those above data.max_prompt_tokens raise, go, or lose the start of their
    question.

    Rows the template refuses are bad rows (data.bad_rows).
    """
    check_template_kwargs(tokenizer, data)
    origin, bad_rows = problems[0].origin, data.bad_rows
    chats = [chat_messages(problem, data) for problem in problems]
    try:
        texts = _texts(chats, tokenizer, data)
    except (jinja2.TemplateError, TypeError):  # some row is refused: find out which
        texts, faults = _texts_one_by_one(problems, chats, tokenizer, data)
        report_bad_rows(faults, len(problems), origin, bad_rows)
        refused = {row for row, _ in faults}
        kept = [index for index, problem in enumerate(problems) if problem.row not in refused]
        problems, chats = [problems[i] for i in kept], [chats[i] for i in kept]
    prompts = [
        _prompt(*parts) for parts in zip(problems, chats, texts, _token_ids(texts, tokenizer, data), strict=True)
    ]
    report_bad_rows(
        [(p.row, "renders to no token") for p in prompts if len(p.token_ids) == 0], len(prompts), origin, bad_rows
    )
    return _fit([p for p in prompts if len(p.token_ids)], problems, tokenizer, data)


def is_plain(tokenizer: Any, data: DataConfig) -> bool:
    """Whether prompts are plain text: no chat template is there, or data.apply_chat_template is off."""
    return tokenizer.chat_template is None or not data.apply_chat_template


def chat_messages(problem: Problem, data: DataConfig) -> list[dict[str, str]]:
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
    if not data.chat_template_kwargs:
        return
    if is_plain(tokenizer, data):
        why = (
            "data.apply_chat_template is false"
            if not data.apply_chat_template
            else f"the tokenizer {tokenizer.name_or_path} has no chat template"
        )
        logger.warning("data.chat_template_kwargs=%s has no effect: %s", data.chat_template_kwargs, why)
        return
    words = set(re.findall(r"\w+", tokenizer.get_chat_template()))
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in data.chat_template_kwargs:
        if name in own:
            raise ValueError(
                f"data.chat_template_kwargs.{name} is not a keyword of the chat template, and is set here; leave it out"
            )
        if name not in words:
            near = difflib.get_close_matches(name, words, n=1, cutoff=0.75)
            unknown = (
                f"data.chat_template_kwargs.{name}: the chat template of {tokenizer.name_or_path} knows no such keyword"
            )
            if near:
                raise ValueError(f"{unknown}; did you mean {near[0]}?")
            logger.warning("%s; it has no effect", unknown)


def _last_user(messages: list[dict[str, str]]) -> int:
    return max(index for index, message in enumerate(messages) if message["role"] == "user")


def _texts(chats: list[list[dict[str, str]]], tokenizer: Any, data: DataConfig) -> list[str]:
    """The chats as the model reads them, with the opening of its answer; plain text without a chat template."""
    if is_plain(tokenizer, data):
        return ["\n\n".join(message["content"] for message in messages) for messages in chats]
    return tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True, **data.chat_template_kwargs)


def _texts_one_by_one(
    problems: list[Problem], chats: list[list[dict[str, str]]], tokenizer: Any, data: DataConfig
) -> tuple[list[str], list[tuple[int, str]]]:
    """The texts of the chats the template takes, and the rows of the others with its complaint."""
    texts, faults = [], []
    for problem, messages in zip(problems, chats, strict=True):
        try:
            texts += _texts([messages], tokenizer, data)
        except (jinja2.TemplateError, TypeError) as error:
            faults.append((problem.row, f"cannot be used: the chat template refuses it ({one_line(error)})"))
    return texts, faults


def _token_ids(texts: list[str], tokenizer: Any, data: DataConfig) -> list[np.ndarray]:
    """Tokens of rendered prompts. A chat template writes its own BOS, so none is added (as transformers does); to plain
    text the tokenizer's BOS is added where it adds one, never its EOS.
    """
    ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    if is_plain(tokenizer, data) and bos is not None and tokenizer("a")["input_ids"][:1] == [bos]:
        ids = [row if row[:1] == [bos] else [bos, *row] for row in ids]
    return [np.asarray(row, dtype=np.int32) for row in ids]


def _prompt(problem: Problem, messages: list[dict[str, str]], text: str, token_ids: np.ndarray) -> Prompt:
    return Prompt(
        prompt_index=0, row=problem.row, messages=messages, text=text, token_ids=token_ids, columns=problem.columns
    )


# ------------------------------------------------------------------------------------------------------- long prompts


def _fit(prompts: list[Prompt], problems: list[Problem], tokenizer: Any, data: DataConfig) -> Rendered:
    """Do to prompts above data.max_prompt_tokens what data.long_prompts says, and say so."""
    limit, origin = data.max_prompt_tokens, problems[0].origin
    long = {prompt.row: len(prompt.token_ids) for prompt in prompts if len(prompt.token_ids) > limit}
    if not long:
        return Rendered(prompts=_numbered(prompts), dropped=0, truncated=0)
    longest = max(long.values())
    counted = (
        f"{len(long)} of {len(prompts)} prompts are longer than data.max_prompt_tokens = {limit} (the longest "
        f"has {longest})"
    )
    named = ", ".join(f"row {row}" for row in list(long)[:NAMED_IN_MESSAGES]) + (
        ", ..." if len(long) > NAMED_IN_MESSAGES else ""
    )
    if data.long_prompts == "error":
        row, tokens = next(iter(long.items()))
        raise ValueError(
            f"{origin}, row {row}: the prompt has {tokens} tokens, data.max_prompt_tokens must be >= {tokens}, got "
            f"{limit}; {counted}: "
            f"the nearest that works for all is {longest}, or set data.long_prompts to drop or truncate"
        )
    if data.long_prompts == "drop":
        kept = [prompt for prompt in prompts if prompt.row not in long]
        if not kept:
            raise ValueError(
                f"{origin}: {counted}, so data.long_prompts=drop leaves none; the nearest that keeps one is "
                f"{min(long.values())}"
            )
        logger.warning("%s: dropped, as %s: %s", origin, counted, named)
        return Rendered(prompts=_numbered(kept), dropped=len(long), truncated=0)
    by_row = {problem.row: problem for problem in problems}
    fitted = [_truncated(by_row[prompt.row], tokenizer, data) if prompt.row in long else prompt for prompt in prompts]
    logger.warning("%s: questions truncated from the left, as %s: %s", origin, counted, named)
    return Rendered(prompts=_numbered(fitted), dropped=0, truncated=len(long))


def _numbered(prompts: list[Prompt]) -> list[Prompt]:
    return [dataclasses.replace(prompt, prompt_index=index) for index, prompt in enumerate(prompts)]


def _truncated(problem: Problem, tokenizer: Any, data: DataConfig) -> Prompt:
    """The prompt with the longest end of its question that fits; template, system prompt and instruction stay whole."""
    index = _last_user(problem.messages)
    question = problem.messages[index]["content"]

    def cut(start: int) -> Prompt:
        messages = [dict(message) for message in problem.messages]
        messages[index]["content"] = question[start:]
        shorter = dataclasses.replace(problem, messages=messages)
        messages = chat_messages(shorter, data)
        text = _texts([messages], tokenizer, data)[0]
        return _prompt(problem, messages, text, _token_ids([text], tokenizer, data)[0])

    # first characters kept: bisected, as tokens of a part are not a part of the tokens
    too_long, fits = 0, len(question) - 1
    best = cut(fits)
    if len(best.token_ids) > data.max_prompt_tokens:
        raise ValueError(
            f"{problem.origin}, row {problem.row}: the prompt cannot be truncated to data.max_prompt_tokens = "
            f"{data.max_prompt_tokens}: "
            f"all but its question takes {len(best.token_ids) - 1} tokens; the nearest that works is "
            f"{len(best.token_ids)}"
        )
    while fits - too_long > 1:
        middle = (too_long + fits) // 2
        prompt = cut(middle)
        if len(prompt.token_ids) <= data.max_prompt_tokens:
            fits, best = middle, prompt
        else:
            too_long = middle
    return best

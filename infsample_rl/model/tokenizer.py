"""The policy's tokenizer, and the text of a response. Apart from the models, whose import is half of a reward worker's
start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from infsample_rl.config import Config, ModelConfig
from infsample_rl.model.hub import cached_only, not_found
from infsample_rl.types import Completion


class Response(NamedTuple):
    """A completion's text."""

    text: str
    observed: list[tuple[int, int]]  # characters [from, to) that an environment gave


def load_tokenizer(model: ModelConfig, setting: str = "model.path") -> PreTrainedTokenizerBase:
    """The policy's tokenizer; ValueError in one line, which names the `setting` of its path, when it cannot be had."""
    path = model.tokenizer_path or model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=model.trust_remote_code, local_files_only=cached_only(path)
        )
        # what transformers makes of a folder without a tokenizer's files
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise ValueError("it has no tokens but special ones")
    except Exception as error:  # that of a damaged tokenizer.json is a bare one
        raise ValueError(
            not_found("model.tokenizer_path" if model.tokenizer_path else setting, path, "tokenizer", error)
        ) from None
    if model.chat_template is not None:
        _replace_template(tokenizer, model.chat_template)
    return tokenizer


def _replace_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """ValueError in one line for a file that is not there or is no template."""
    try:
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        tokenizer.apply_chat_template([{"role": "user", "content": "A question."}], tokenize=False)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"model.chat_template={path} cannot be read: {getattr(error, 'strerror', error)}") from None
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"model.chat_template={path}, line {error.lineno}, is no Jinja: {error.message}") from None
    except (jinja2.TemplateError, TypeError, ValueError):  # it refuses this chat: the run's prompts will tell
        pass


def check_reference(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """ValueError where reference.path has another tokenizer than the policy, since token ids are all that it is given,
    or is asked as a teacher for more ids than there are."""
    ids, top_k = len(tokenizer) - len(config.rollout.bad_token_ids), config.objective.teacher_top_k
    if top_k > ids:
        raise ValueError(f"objective.distill_top_k must be <= {ids:,}, the ids that may be drawn, got {top_k:,}")
    if not config.objective.needs_reference or config.reference.path in (None, config.model.path):
        return
    own = config.model.tokenizer_path or config.model.path
    path = str(config.reference.path)
    theirs = load_tokenizer(replace(config.model, path=path, tokenizer_path=None), "reference.path").get_vocab()
    differing = sorted(token for token, number in tokenizer.get_vocab().items() if theirs.get(token) != number)
    if differing:
        token = differing[0]
        raise ValueError(
            f"reference.path={path} must have the tokenizer of {own}, since ids are all it is given: "
            f"{len(differing):,} tokens are not its or have another id, as {token!r}, here "
            f"{tokenizer.get_vocab()[token]}, there {theirs.get(token, 'none')}"
        )


def response_text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], stop_strings: Sequence[str] = ()) -> str:
    """A response as text, without special tokens, up to the first place where a stop string begins."""
    text: Any = tokenizer.decode(token_ids, skip_special_tokens=True)  # a str, for one list of ids
    return text[: min((place for place in map(text.find, stop_strings) if place >= 0), default=len(text))]


def read_response(tokenizer: PreTrainedTokenizerBase, completion: Completion, stop_strings: Sequence[str]) -> Response:
    """The text that rewards see, and where an environment speaks in it."""
    text = response_text(tokenizer, completion.token_ids.tolist(), stop_strings)
    observed, end = [], 0
    if completion.episode is not None:
        turns = np.flatnonzero(np.diff(completion.sampled)) + 1
        for ids, is_sampled in zip(
            np.split(completion.token_ids, turns), np.split(completion.sampled, turns), strict=True
        ):
            start, end = end, end + len(response_text(tokenizer, ids.tolist()))
            if not is_sampled[0]:
                observed.append((start, end))
    return Response(text, observed)

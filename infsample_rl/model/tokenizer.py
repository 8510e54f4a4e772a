"""The policy's tokenizer, and the text of a response. Apart from the models, whose import is half of a reward worker's
start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from infsample_rl.config import ModelConfig
from infsample_rl.model.hub import cached_only, not_found


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The policy's tokenizer; ValueError in one line when it cannot be had."""
    path = model.tokenizer_path or model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=model.trust_remote_code, local_files_only=cached_only(path)
        )
        # what transformers makes of a folder without a tokenizer's files
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise ValueError("it has no tokens but special ones")
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            not_found("model.tokenizer_path" if model.tokenizer_path else "model.path", path, "tokenizer", error)
        ) from None
    return tokenizer


def response_text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], stop_strings: Sequence[str] = ()) -> str:
    """A response as text, without special tokens, up to the first place where a stop string begins."""
    text: Any = tokenizer.decode(token_ids, skip_special_tokens=True)  # a str, for one list of ids
    return text[: min((place for place in map(text.find, stop_strings) if place >= 0), default=len(text))]

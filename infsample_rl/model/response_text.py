"""The text of a response: what rewards are given, what is shown, and what stop strings are looked for in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase


def response_text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], stop_strings: Sequence[str] = ()) -> str:
    """A response as text, without special tokens, cut before the first stop string."""
    text: Any = tokenizer.decode(token_ids, skip_special_tokens=True)  # a str, for one list of ids
    return cut_at_stop(text, stop_strings)


def cut_at_stop(text: str, stop_strings: Sequence[str]) -> str:
    """`text` up to the first place where a stop string begins; all of it when there is none."""
    found = [position for position in map(text.find, stop_strings) if position >= 0]
    return text[: min(found)] if found else text

"""Text of others inside a rendered chat: what looks like a special token in it stays text, so that no observation can
end its own turn or begin another."""

from __future__ import annotations

import re
from typing import Any

_MARK = "infsample-rl-stands-for-special-token-{}-here"
_MARKS = re.compile(_MARK.format(r"(\d+)"))


def special_tokens(tokenizer: Any) -> list[str]:
    """The longest first, so that none hides another."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added | set(tokenizer.all_special_tokens), key=lambda token: (-len(token), token))


def marked(text: str, tokens: list[str]) -> str:
    """The text with a mark in the place of every one of the special_tokens() that is written in it, to be rendered."""
    for number, token in enumerate(tokens):
        text = text.replace(token, _MARK.format(number))
    return text


def unmarked(text: str, tokenizer: Any) -> str:
    """A rendered text as it was before marked()."""
    tokens = special_tokens(tokenizer) if _MARKS.search(text) else []
    return _MARKS.sub(lambda mark: tokens[int(mark[1])], text)


def token_ids(text: str, tokenizer: Any) -> list[int]:
    """Of a rendered text: special tokens of the template are such, marked ones are encoded as any other text."""
    ids: list[int] = []
    for place, part in enumerate(_MARKS.split(text)):
        is_mark = place % 2 == 1
        said = special_tokens(tokenizer)[int(part)] if is_mark else part
        ids += tokenizer(
            said,
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
            **({"split_special_tokens": True} if is_mark else {}),
        )["input_ids"]
    return ids

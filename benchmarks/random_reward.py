"""A reward without meaning, for runs of random weights: it differs between samples, so that there is a gradient."""

from __future__ import annotations

import zlib


def of_tokens(completions: list[str], **_: object) -> list[float]:
    """A number of 0 to 1 made of each text."""
    return [zlib.crc32(text.encode()) % 1000 / 1000 for text in completions]

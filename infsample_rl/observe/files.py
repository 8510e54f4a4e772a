"""Files that are written in one move, and folders that are not there yet."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest one above it that is there."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def write_atomically(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Put `content` in place of the file: killed halfway, the old one stands. Text is written as UTF-8; a lone
    surrogate, which a model may sample, becomes \\udxxx, which is how JSON writes it. OSError where it cannot be
    written."""
    aside = path.with_name(f".{path.name}.tmp")
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")
    try:
        with aside.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine may leave an empty file under the name
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)

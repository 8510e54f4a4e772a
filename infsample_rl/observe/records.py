"""JSON lines files of a run: one record a line, appended and flushed, cut back to a checkpoint's step on resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from itertools import count
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from infsample_rl.observe.files import write_atomically


class RecordFile:
    """A file that is appended to. For a new run, `start_step` 0, it is empty: an older one is set aside."""

    def __init__(self, path: Path, start_step: int) -> None:
        if start_step == 0:
            set_aside(path)
        self._path = path
        self._file = path.open("ab+")
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read() != b"\n":
                self._file.write(b"\n")  # behind the part of a line that a killed process has left

    def append(self, records: list[dict[str, Any]]) -> None:
        """Write records, each with its step, and hand them to the operating system, so that a killed process loses
        none."""
        self._file.write(b"".join(map(_line, records)))
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Drop records of steps after `step` (-1: all) and torn lines."""
        self._rewrite(lambda record, line: line if record["step"] <= step else b"")

    def amend(self, step: int, values: dict[str, Any]) -> None:
        """Add values to the record of a step."""
        self._rewrite(lambda record, line: _line(record | values) if record["step"] == step else line)

    def close(self) -> None:
        """Write no more."""
        self._file.close()

    def _rewrite(self, change: Callable[[dict[str, Any], bytes], bytes]) -> None:
        """Write for every record and its line what `change` makes of them; torn lines go."""
        self._file.close()
        with self._path.open("rb") as old:
            records = ((parse_record(line), line.rstrip(b"\n") + b"\n") for line in old)
            # the bytes as they are: numbers keep every digit
            write_atomically(self._path, (change(record, line) for record, line in records if record is not None))
        self._file = self._path.open("ab+")


def _line(record: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    # NaN, or a number of numpy's: seldom, and walking through every record takes ten times as long
    except (ValueError, TypeError):
        text = json.dumps(json_value(record), ensure_ascii=False, allow_nan=False)
    # a lone surrogate (from a data file) becomes \udxxx, which is also how JSON writes it
    return text.encode(errors="backslashreplace") + b"\n"


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file in order, without a torn line (written while the process was killed)."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                record = parse_record(line)
                if record is not None:
                    yield record


def set_aside(path: Path) -> None:
    """Rename a non-empty file to NAME.1.jsonl (or the next free number): a new run never mixes with or deletes an older
    log."""
    if not path.exists() or path.stat().st_size == 0:
        return
    free = next(name for number in count(1) if not (name := path.with_suffix(f".{number}{path.suffix}")).exists())
    path.rename(free)


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The record of a line, None if it is not a JSON object with a whole step."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # the latter: brackets without end
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def json_value(value: Any) -> Any:
    """`value` with NaN and infinity as None and numpy numbers as Python's, inside lists and dicts too.

    Example: json_value({"a": float("nan"), "b": [np.float32(0.5)]}) == {"a": None, "b": [0.5]}
    """
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"a log record holds numbers, text, lists and dicts, got {type(value).__name__}: {value!r}")

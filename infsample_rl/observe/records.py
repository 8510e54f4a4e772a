"""JSON lines files of a run: one record a line, appended and flushed, cut back to a checkpoint's step on resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from itertools import count
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TextIO

from infsample_rl.observe.files import write_atomically


def open_records(path: Path, start_step: int) -> TextIO:
    """Open a JSONL file for appending. For a new run, `start_step` 0, it is empty: an older file is set aside."""
    if start_step == 0:
        set_aside(path)
    file = _append_to(path)
    if file.tell():
        with path.open("rb") as written:
            written.seek(-1, os.SEEK_END)
            if written.read() != b"\n":
                file.write("\n")  # behind the part of a line that a killed process has left
    return file


def rewind_records(file: TextIO, path: Path, step: int) -> TextIO:
    """Cut an open file of this run back to `step` (-1: empty it) and go on with it."""
    file.close()
    cut_back(path, step)
    return _append_to(path)


def amend_record(file: TextIO, path: Path, step: int, values: dict[str, Any]) -> TextIO:
    """Add values to the record that an open file has of a step, and go on with it."""
    file.close()

    def amended(record: dict[str, Any], line: bytes) -> bytes:
        return _line(record | values).encode(errors="backslashreplace") if record["step"] == step else line

    _rewrite(path, amended)
    return _append_to(path)


def _append_to(path: Path) -> TextIO:
    # A lone surrogate (from a data file) becomes \udxxx, which is also how JSON writes it.
    return path.open("a", encoding="utf-8", errors="backslashreplace")


def append_records(file: TextIO, records: list[dict[str, Any]]) -> None:
    """Write records and hand them to the operating system, so that a killed process loses none. Numbers as json_value()
    gives them."""
    file.write("".join(_line(record) for record in records))
    file.flush()


def _line(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    # NaN, or a number of numpy's: seldom, and walking through every record takes ten times as long
    except (ValueError, TypeError):
        return json.dumps(json_value(record), ensure_ascii=False, allow_nan=False) + "\n"


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file in order, without a torn line (written while the process was killed)."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                record = parse_record(line)
                if record is not None:
                    yield record


def cut_back(path: Path, step: int) -> None:
    """Drop records of steps after `step` and torn lines."""
    if path.exists():
        _rewrite(path, lambda record, line: line if record["step"] <= step else b"")


def _rewrite(path: Path, change: Callable[[dict[str, Any], bytes], bytes]) -> None:
    """Write for every record and its line what `change` makes of them; torn lines go."""
    with path.open("rb") as old:
        records = ((parse_record(line), line.rstrip(b"\n") + b"\n") for line in old)
        # the bytes as they are: numbers keep every digit
        write_atomically(path, (change(record, line) for record, line in records if record is not None))


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

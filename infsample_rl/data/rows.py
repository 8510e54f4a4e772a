"""Files into rows, and what happens to a row that cannot be used. Standard library, and pyarrow for Parquet."""

from __future__ import annotations

import difflib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
JSON_TYPES = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a source: its fields, or the fault that makes it unusable.

    Example: Row(number=3, fields={"question": "1 + 1 = ?", "answer": "2"})
    """

    number: int  # from 1; in JSON Lines the line, blank lines counted
    fields: dict[str, Any] | None
    fault: str = ""


def one_line(error: BaseException) -> str:
    """The text of an error on one line."""
    return " ".join(str(error).split())


def json_type(value: Any) -> str:
    """What JSON calls the type of a value: json_type([1]) == "a list"."""
    return JSON_TYPES.get(type(value), "null" if value is None else f"a {type(value).__name__}")


def check_is_there(path: Path, label: str) -> None:
    """ValueError, with the nearest there is, for a file that is not."""
    if not path.exists():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=1)
        raise ValueError(f"{label}: there is no such file{f'; did you mean {path.parent / near[0]}?' if near else ''}")


def read_rows(path: Path, label: str) -> list[Row]:
    """All rows of a .jsonl, .ndjson, .json or .parquet file; `label` ("data.source=FILE") opens every message.

    Raises ValueError when the file is missing, empty, of another kind or cannot be read at all.
    """
    check_is_there(path, label)
    suffix = path.suffix.lower()
    if suffix not in FILE_SUFFIXES:
        raise ValueError(
            f"{label}: a data file must end in one of {', '.join(FILE_SUFFIXES)}, got {path.suffix or 'no suffix'}"
        )
    try:
        if suffix == ".parquet":
            import pyarrow.parquet  # slow to import, and only Parquet needs it

            rows = [_as_row(*numbered) for numbered in enumerate(pyarrow.parquet.read_table(path).to_pylist(), start=1)]
        else:
            rows = _json_rows(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{label}: the file cannot be read: {one_line(error)}") from error
    if not rows:
        raise ValueError(f"{label}: the file is empty; it needs at least one row")
    return rows


def _json_rows(raw: bytes) -> list[Row]:
    """JSON Lines, or one list of objects."""
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    if raw.lstrip()[:1] == b"[":
        try:
            return [_as_row(number, item) for number, item in enumerate(json.loads(raw), start=1)]
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":
                raise
    # not splitlines: it would also cut at \x0b, \x85 and their like
    return [_json_line(number, line) for number, line in enumerate(raw.split(b"\n"), start=1) if line.strip()]


def _json_line(number: int, line: bytes) -> Row:
    try:
        return _as_row(number, json.loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return Row(number=number, fields=None, fault=f"is not UTF-8 ({one_line(error)})")
    except ValueError as error:
        return Row(number=number, fields=None, fault=f"is not valid JSON ({one_line(error)})")


def _as_row(number: int, item: Any) -> Row:
    if not isinstance(item, dict):
        return Row(number=number, fields=None, fault=f"is {json_type(item)}, not an object with fields")
    return Row(number=number, fields=item)


def first_rows(numbers: list[int]) -> str:
    """The first five of them, for a message: "3, 4, 5, 6, 7, ..."."""
    return ", ".join([*map(str, numbers[:5]), *(["..."] if len(numbers) > 5 else [])])


def report_bad_rows(faults: list[tuple[int, str]], total: int, label: str, policy: str) -> None:
    """Raise ValueError on the first of `faults` (row number, what is wrong), or with policy "skip" warn once of all.

    Example: report_bad_rows([(3, "is not valid JSON")], 10, "data.source=a.jsonl", "error") raises
    "data.source=a.jsonl, row 3 is not valid JSON; 1 of 10 rows cannot be used (3); mend the data or set
    data.bad_rows=skip"
    """
    if not faults:
        return
    number, fault = faults[0]
    count = f"{len(faults)} of {total} rows cannot be used ({first_rows([number for number, _ in faults])})"
    if policy == "error" or len(faults) == total:
        skip = " or set data.bad_rows=skip" if len(faults) < total else ""
        raise ValueError(f"{label}, row {number} {fault}; {count}; mend the data{skip}")
    logger.warning("%s: skipped, as %s: row %s %s", label, count, number, fault)

"""Recorded response lengths, read from JSON lines. Standard library only.

A line is one prompt with all its samples, in sample order:

{"dataset": "gsm8k", "model": "SmolLM2-135M-Instruct", "prompt_id": "gsm8k/train/0", "lengths": [134, 512],
 "prompt": "<|im_start|>user...", "prompt_tokens": 93, "max_new_tokens": 512, "truncated": [false, true],
 "scores": [0.0, null], "first_tokens": [[504, 253], [42, 7]]}

The first four fields are needed, the others are None where a file lacks them; fields beyond these are passed over. A
line may also have "predictions": {"probe": [140.2, 480.0]}, total tokens that a predictor of that name gave;
`bench.predictor` writes them.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".jsonl.gz")
OF_A_RUN = "lengths.jsonl"  # in its folder
MOST_TOKENS = 2**31  # of a response or a prompt
AT_MOST = f"at most {MOST_TOKENS} tokens"
NAMED = ("dataset", "model", "prompt_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One prompt and what is known of its samples; lists have an entry for every sample.

    Example: Recording(dataset="gsm8k", model="SmolLM2-135M-Instruct", prompt_id="gsm8k/train/0", lengths=[134, 512],
    truncated=[False, True])
    """

    dataset: str
    model: str
    prompt_id: str
    lengths: list[int]  # response tokens
    prompt: str | None = None  # as the model read it, chat template applied
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    truncated: list[bool] | None = None  # cut at max_new_tokens, so the length is censored
    scores: list[float | None] | None = None
    first_tokens: list[list[int]] | None = None  # the first tokens of every response, as far as recorded
    predictions: dict[str, list[float]] | None = None  # by a predictor's name; tokens

    @property
    def key(self) -> str:
        """The prompt's name in all files: what training and held-out prompts are split by."""
        return f"{self.dataset}|{self.prompt_id}"

    @property
    def censored(self) -> list[bool]:
        """Which lengths are lower bounds: `truncated`; where the file has none, those at the cap; without a cap
        none."""
        if self.truncated is not None:
            return self.truncated
        return [self.max_new_tokens is not None and length >= self.max_new_tokens for length in self.lengths]


def read_recordings(path: str | Path) -> list[Recording]:
    """All recordings of a .jsonl or .jsonl.gz file, or of a run folder. ValueError naming file, line and field for what
    cannot be used.

    A run may be writing, or have been killed at it: the part that there may be of its last line is passed over.
    """
    run_dir = Path(path) if Path(path).is_dir() else None
    path = path if run_dir is None else run_dir / OF_A_RUN
    found = [_recording(fields, place) for place, fields in read_lines(path, grows=run_dir is not None)]
    if not found:
        raise ValueError(
            f"{path} is empty; it needs a line for every prompt with dataset, model, prompt_id and lengths"
        )
    return found


def read_lines(path: str | Path, *, grows: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """("FILE, line N", object) of every line that is not blank. ValueError for a missing file and for a line that is no
    object.

    `grows`: only lines that have been written to their end.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; give one that ends in {' or '.join(SUFFIXES)}")
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path} must end in {' or '.join(SUFFIXES)}")
    try:
        raw = path.read_bytes()
        raw = raw[: raw.rfind(b"\n") + 1] if grows else raw
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    # not splitlines: it would also cut at U+2028 and its like
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", _object(line, f"{path}, line {number}")


def check_field(ok: bool, place: str, name: str, what: str, value: Any) -> None:
    """ValueError with file, line, field, what it must be and what it is, unless `ok`."""
    if not ok:
        raise ValueError(f"{place}: {name} must be {what}, got {_short(value)}")


def is_count(value: Any) -> bool:
    """Whether `value` is a whole number >= 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{place} is not valid JSON ({error}); half a line is left where a recording was stopped"
        ) from None
    except RecursionError:
        raise ValueError(f"{place} is not valid JSON of a recording: it is nested too deeply") from None
    check_field(isinstance(fields, dict), place, "a line", "an object", fields)
    return fields


def _recording(fields: dict[str, Any], place: str) -> Recording:
    for name in (*NAMED, "lengths"):
        if name not in fields:
            raise ValueError(f"{place} has no field {name}; dataset, model, prompt_id and lengths are needed")
    if is_count(fields["prompt_id"]) or fields["prompt_id"] == 0:  # a row of the source
        fields["prompt_id"] = str(fields["prompt_id"])
    for name in NAMED:
        check_field(isinstance(fields[name], str), place, name, "a text", fields[name])
    lengths = fields["lengths"]
    check_field(isinstance(lengths, list) and lengths != [], place, "lengths", "a list of at least one", lengths)
    for length in lengths:
        check_field(is_count(length), place, "lengths", "whole numbers >= 1", length)
        check_field(length <= MOST_TOKENS, place, "lengths", AT_MOST, length)
    for name, kind in (("prompt", str), ("prompt_tokens", int), ("max_new_tokens", int)):
        value = fields.get(name)
        fits = value is None or (is_count(value) if kind is int else isinstance(value, str))
        check_field(fits, place, name, "a whole number >= 1" if kind is int else "a text", value)
        check_field(value is None or kind is str or value <= MOST_TOKENS, place, name, AT_MOST, value)
    for name, is_right, what in LISTS:
        value = fields.get(name)
        if value is not None:
            check_field(
                isinstance(value, list) and len(value) == len(lengths),
                place,
                name,
                f"a list of {len(lengths)} like lengths",
                value,
            )
            for item in value:
                check_field(is_right(item), place, name, what, item)
    _check_predictions(fields.get("predictions"), len(lengths), place)
    known = {field.name for field in dataclasses.fields(Recording)}
    return Recording(**{name: value for name, value in fields.items() if name in known})


def _check_predictions(value: Any, count: int, place: str) -> None:
    if value is None:
        return
    check_field(isinstance(value, dict), place, "predictions", "an object of lists", value)
    for name, lengths in value.items():
        fits = isinstance(lengths, list) and len(lengths) == count
        check_field(fits, place, f"predictions.{name}", f"a list of {count} like lengths", lengths)
        for length in lengths:
            number = isinstance(length, (int, float)) and not isinstance(length, bool) and 0 < length < math.inf
            check_field(number, place, f"predictions.{name}", "finite numbers above 0", length)
            check_field(length <= MOST_TOKENS, place, f"predictions.{name}", AT_MOST, length)


def _is_score(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


LISTS = (
    ("truncated", lambda value: isinstance(value, bool), "true or false"),
    ("scores", _is_score, "numbers or null"),
    ("first_tokens", _are_ids, "lists of token ids"),
)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "something nested too deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."

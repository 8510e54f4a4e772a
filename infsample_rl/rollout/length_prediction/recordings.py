"""Recorded response lengths, read from JSON lines. Standard library only.

A line is one prompt with all its samples, in sample order:

{"dataset": "gsm8k", "model": "SmolLM2-135M-Instruct", "prompt_id": "gsm8k/train/0", "lengths": [134, 512],
 "prompt": "<|im_start|>user...", "prompt_tokens": 93, "max_new_tokens": 512, "truncated": [false, true],
 "scores": [0.0, null], "first_tokens": [[504, 253], [42, 7]]}

The first four fields are needed, the others are None where a file lacks them; fields beyond these are passed over. A
line may also have "predictions": {"probe": [140.2, 480.0]}, total tokens that a predictor of that name gave;
`benchmarks.predictor` writes them.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".jsonl.gz")
OF_A_RUN = "lengths.jsonl"  # in its folder
MOST_TOKENS = 2**31  # of a response or a prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One prompt and what is known of its samples; lists have an entry for every sample."""

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
    prompt_token_ids: list[int] | None = None
    token_ids: list[list[int]] | None = None  # every response in full
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
        raise ValueError(f"{path} is empty; it needs a line for every prompt")
    return found


def read_lines(path: str | Path, *, grows: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """("FILE, line N", object) of every line that is not blank; `grows`: only of lines that have been written to their
    end. ValueError for a missing file and for a line that is no object."""
    path = Path(path)
    if not (path.is_file() and path.name.endswith(SUFFIXES)):
        raise ValueError(f"{path}: there is no such file; give one that ends in {' or '.join(SUFFIXES)}")
    try:
        raw = path.read_bytes()
        raw = raw[: raw.rfind(b"\n") + 1] if grows else raw
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    # not splitlines: it would also cut at U+2028 and its like
    for number, line in enumerate(text.split("\n"), start=1):
        place = f"{path}, line {number}"
        if line.strip():
            try:
                fields = json.loads(line)
            except ValueError as error:
                hint = "half a line is left where a recording was stopped"
                raise ValueError(f"{place} is not valid JSON ({error}); {hint}") from None
            if not isinstance(fields, dict):
                raise ValueError(f"{place}: a line must be an object")
            yield place, fields


Kinds = tuple[tuple[type, ...], str]  # types that fit, and in words
TEXT: Kinds = ((str,), "a text")
COUNT: Kinds = ((int,), f"a whole number from 1 to {MOST_TOKENS}")
OF_A_PROMPT: dict[str, Kinds] = dict.fromkeys(("dataset", "model", "prompt_id", "prompt"), TEXT)
OF_A_PROMPT |= {"prompt_token_ids": ((list,), "a list of token ids")}
OF_A_PROMPT |= dict.fromkeys(("prompt_tokens", "max_new_tokens"), COUNT) | {"predictions": ((dict,), "an object")}
OF_EVERY_SAMPLE: dict[str, Kinds] = {
    "lengths": COUNT,
    "truncated": ((bool,), "true or false"),
    "scores": ((int, float, type(None)), "a number or null"),
    "first_tokens": ((list,), "a list of token ids"),
    "token_ids": ((list,), "a list of token ids"),
}
PREDICTION: Kinds = ((int, float), "a number of tokens")


def _recording(line: dict[str, Any], place: str) -> Recording:
    for name in ("dataset", "model", "prompt_id", "lengths"):
        if line.get(name) is None:
            raise ValueError(f"{place} has no field {name}; dataset, model, prompt_id and lengths are needed")
    if type(line["prompt_id"]) is int:  # a row of the source
        line["prompt_id"] = str(line["prompt_id"])
    known = {name: line[name] for name in (*OF_A_PROMPT, *OF_EVERY_SAMPLE) if line.get(name) is not None}
    for name in OF_A_PROMPT.keys() & known.keys():
        _check(known[name], *OF_A_PROMPT[name], f"{place}: {name}")
    lists = {name: (known[name], OF_EVERY_SAMPLE[name]) for name in OF_EVERY_SAMPLE if name in known}
    lists |= {f"predictions.{name}": (each, PREDICTION) for name, each in known.get("predictions", {}).items()}
    for name, (values, (kinds, what)) in lists.items():
        if not isinstance(values, list) or len(values) != len(line["lengths"]) or not values:
            raise ValueError(f"{place}: {name} must be a list with an entry for every sample, got {repr(values)[:60]}")
        for value in values:
            _check(value, kinds, what, f"{place}: {name}")
    for response, length in zip(known.get("token_ids", ()), known["lengths"], strict=False):
        if len(response) != length:
            raise ValueError(
                f"{place}: token_ids must have as many ids as lengths says, got {len(response)} for {length}"
            )
    return Recording(**known)


def _check(value: Any, kinds: tuple[type, ...], what: str, name: str) -> None:
    """ValueError unless `value` is of one of these types, a count within its bounds, and a list one of token ids."""
    is_one = type(value) in kinds and (kinds != (int,) or 1 <= value <= MOST_TOKENS)
    if not is_one or (kinds == (list,) and not all(type(each) is int and 0 <= each < MOST_TOKENS for each in value)):
        raise ValueError(f"{name} must be {what}, got {repr(value)[:60]}")

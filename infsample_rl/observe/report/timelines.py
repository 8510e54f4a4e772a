"""Who decoded when: the prompts of samples.jsonl that are on the page, spread over the whole run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from infsample_rl.observe.records import parse_record
from infsample_rl.observe.report.run_folder import SAMPLES, Record, number

PAGE_BYTES = 4_000_000  # of samples.jsonl that are on the page


def choose_timelines(run_dir: Path, notes: list[str]) -> dict[str, Any] | None:
    """{"groups": [records of samples.jsonl, checked], "recorded": lines in the file}; None where there are none.

    The first, the last and as many between as the page's share of bytes holds, evenly; only those are parsed.
    """
    path = run_dir / SAMPLES
    try:
        lines = _places(path)
    except FileNotFoundError:
        notes.append(f"{SAMPLES} is missing: no timelines")
        return None
    except OSError as error:
        notes.append(f"{SAMPLES} cannot be read ({error.strerror})")
        return None
    groups = []
    with path.open("rb") as file:
        for place in spread(lines, PAGE_BYTES):
            file.seek(place)
            group = _checked(parse_record(file.readline()))
            if group is not None:
                groups.append(group)
            elif place == lines[-1][0]:
                notes.append(f"{SAMPLES}: the last line is half-written")
            else:
                notes.append(f"{SAMPLES}: the line at byte {place:,} could not be read")
    return {"groups": groups, "recorded": len(lines)} if groups else None


def spread(lines: list[tuple[int, int]], most_bytes: int) -> list[int]:
    """Places of (place, size) lines that together have about `most_bytes`, from the first to the last."""
    if not lines:
        return []
    size = sum(size for _, size in lines) / len(lines)
    count = max(2, min(len(lines), math.floor(most_bytes / size)))
    if count >= len(lines):
        return [place for place, _ in lines]
    return [lines[round(index * (len(lines) - 1) / (count - 1))][0] for index in range(count)]


def _places(path: Path) -> list[tuple[int, int]]:
    """Place and size of every line, in bytes."""
    places, at = [], 0
    with path.open("rb") as file:
        for line in file:
            places.append((at, len(line)))
            at += len(line)
    return places


def _checked(record: Record | None) -> Record | None:
    """A record with what the page draws, None if it lacks some of it."""
    if record is None:
        return None
    try:
        samples = [_checked_sample(sample) for sample in record["samples"]]
        return {
            "step": record["step"],
            "prompt_index": int(record["prompt_index"]),
            "prompt": str(record.get("prompt", "")),
            "samples": [sample for sample in samples if sample["stays"]],
        }
    except (TypeError, KeyError, ValueError):
        return None


def _checked_sample(sample: Record) -> Record:
    forecast = sample.get("forecast")
    return {
        "index": int(sample["sample_index"]),
        "length": int(sample["length"]),
        "finish": str(sample["finish_reason"]),
        "reward": number(sample.get("reward")),
        "worker": int(sample.get("worker", 0)),
        "forecast": [int(forecast[0]), float(forecast[1])] if forecast else None,
        "text": None if sample.get("text") is None else str(sample["text"]),
        "stays": [_checked_stay(stay) for stay in sample["stays"]],
    }


def _checked_stay(stay: list[float]) -> list[float]:
    row, start, end, started, ended, tokens = map(float, stay)
    if not all(math.isfinite(value) for value in (row, start, end, started, ended, tokens)):
        raise ValueError(f"a stay holds numbers, got {stay}")
    return [int(row), int(start), int(end), started, ended, int(tokens)]

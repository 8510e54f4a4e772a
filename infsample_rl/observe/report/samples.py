"""What samples said and when they decoded: those of completions.jsonl and samples.jsonl that are on the page."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from infsample_rl.observe.report.run_folder import Record, read_lines

TEXT_CHARACTERS = 6_000_000  # of all completions on the page
LONGEST_TEXT = 20_000  # characters of one text; the middle of a longer one is left out
SAMPLES_BYTES = 4_000_000  # of samples.jsonl that are on the page
FIELDS = ("step", "prompt_index", "sample_index", "reward", "advantage", "length", "finish_reason", "components")
BARS = ("sample_index", "length", "finish_reason", "reward", "worker", "forecast", "text", "stays")


def choose_completions(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """{"rows": [FIELDS, "kinds", "prompt" (its place in prompts), "response", "observed", "turn_rewards"], "prompts":
    without repetition, "recorded": all in the file}; None where nothing was recorded.

    As many as fit into TEXT_CHARACTERS: every step's best (kind b) and worst (w), up to half of it, and a random choice
    (r) that is blind to both.
    """
    recorded = [_outline(place, record) for place, record in read_lines(path, notes)]
    _mark_best_and_worst(recorded)
    rows: list[Record] = []
    prompts: dict[str, int] = {}
    with path.open("rb") as file:
        for completion in _that_fit(recorded):
            file.seek(completion["place"])
            record = json.loads(file.readline())
            texts = {
                "prompt": prompts.setdefault(shortened(record["prompt"]), len(prompts)),
                "response": shortened(record["response"]),
                "observed": shown_places(record.get("observed", ()), len(record["response"])),
                "turn_rewards": record.get("turn_rewards", []),
            }
            rows.append({name: record[name] for name in FIELDS} | {"kinds": completion["kinds"]} | texts)
    return {"rows": rows, "prompts": list(prompts), "recorded": len(recorded)} if rows else None


def _outline(place: int, record: Record) -> Record:
    """A completion without its texts."""
    characters = sum(min(len(record[name]), LONGEST_TEXT) for name in ("prompt", "response"))
    kept = {name: record[name] for name in ("step", "reward", "advantage")}
    return kept | {"place": place, "characters": characters, "kinds": ""}


def _mark_best_and_worst(recorded: list[Record]) -> None:
    """Of each step whose rewards differ, by reward; of equal ones that whose advantage is further from 0: the rare
    success, the rare failure."""
    by_step: dict[int, list[Record]] = {}
    for completion in recorded:
        if completion["reward"] is not None:
            by_step.setdefault(completion["step"], []).append(completion)
    for completions in by_step.values():
        completions.sort(key=lambda completion: (completion["reward"], completion["advantage"] or 0.0))
        if completions[-1]["reward"] > completions[0]["reward"]:
            completions[-1]["kinds"] += "b"
            completions[0]["kinds"] += "w"


def _that_fit(recorded: list[Record]) -> list[Record]:
    """Those whose texts fit, in the file's order; the random ones among them are marked."""
    order = random.Random(0).sample(recorded, len(recorded))
    chosen: dict[int, Record] = {}
    left = TEXT_CHARACTERS
    for completion in order:  # steps at random too, so that a long run keeps best and worst of all its parts
        if completion["kinds"] and left - completion["characters"] > TEXT_CHARACTERS / 2:
            chosen[completion["place"]] = completion
            left -= completion["characters"]
    for completion in order:
        cost = 0 if completion["place"] in chosen else completion["characters"]
        if left < cost:
            break
        chosen[completion["place"]] = completion
        completion["kinds"] += "r"
        left -= cost
    return [chosen[place] for place in sorted(chosen)]


def shortened(text: str) -> str:
    """A text of at most LONGEST_TEXT characters, and what is left out said."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are left out here ...]\n{text[-half:]}"


def shown_places(places: Iterable[Iterable[int]], characters: int) -> list[list[int]]:
    """Places [from, to) of a text of so many characters in what shortened() leaves of it."""
    if characters <= LONGEST_TEXT:
        return [list(place) for place in places]
    half = LONGEST_TEXT // 2
    rest, left_out = characters - half, characters - len(shortened("." * characters))
    begins = ([start, min(end, half)] for start, end in places if start < half)
    ends = ([max(start, rest) - left_out, end - left_out] for start, end in places if end > rest)
    return [*begins, *ends]


def choose_timelines(path: Path) -> dict[str, Any] | None:
    """Who decoded when, {"groups": [records of samples.jsonl], "recorded": lines in the file}; None where there are
    none: the first, the last and as many between as SAMPLES_BYTES hold, evenly; only those are parsed."""
    with path.open("rb") as file:
        sizes = [len(line) for line in file if line.endswith(b"\n")]  # not one that is half-written
        count = min(len(sizes), max(2, SAMPLES_BYTES * len(sizes) // max(1, sum(sizes))))
        shown = {round(index * (len(sizes) - 1) / max(1, count - 1)) for index in range(count)}
        file.seek(0)
        groups = [_group(json.loads(line)) for index, line in enumerate(file) if index in shown]
    return {"groups": groups, "recorded": len(sizes)} if groups else None


def _group(record: Record) -> Record:
    samples = [{name: sample[name] for name in BARS} for sample in record["samples"] if sample["stays"]]
    return {name: record[name] for name in ("step", "prompt_index", "prompt")} | {"samples": samples}

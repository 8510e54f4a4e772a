"""Which of a run's recorded completions are on the page, and which of those with their texts.

Every step's best and worst, and a random choice that is blind to both, as far as the page's share of characters goes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infsample_rl.observe.records import parse_record
from infsample_rl.observe.report.run_folder import COMPLETIONS, Record, number, read_lines

TEXT_CHARACTERS = 6_000_000  # of all responses and prompts on the page
BEST_AND_WORST_SHARE = 0.5  # of them at most, so that random ones find a place in a long run too
MOST_LISTED = 30_000
LONGEST_TEXT = 20_000  # characters of one text; the middle of a longer one is left out
SEED = 0
FIELDS = ("step", "prompt_index", "sample_index", "reward", "advantage", "length", "finish_reason")


@dataclass(slots=True)
class Listed:
    """A recorded completion, without its texts."""

    offset: int  # byte of its line in the file
    values: list[Any]  # FIELDS
    components: Record
    characters: int
    kinds: set[str] = field(default_factory=set)  # best, worst, random

    @property
    def step(self) -> int:
        return self.values[0]


def choose_completions(run_dir: Path, notes: list[str]) -> dict[str, Any] | None:
    """What the page lists and shows; None where nothing was recorded.

    {"fields": FIELDS, "rows": [[*FIELDS, components, kinds, place in texts or -1]], "texts": [[place in prompts,
    response]], "prompts": [...], "recorded": all in the file, "random_complete": whether the random choice took all}
    """
    listed = [_listed(place, record) for place, record in read_lines(run_dir / COMPLETIONS, notes)]
    if not listed:
        return None
    recorded = len(listed)
    _mark_best_and_worst(listed)
    chosen = _choose_texts(listed)
    kept = listed
    if recorded > MOST_LISTED:
        with_text = {completion.offset for completion in chosen}
        others = [completion for completion in listed if completion.offset not in with_text]
        kept = sorted(
            [*chosen, *random.Random(SEED).sample(others, max(0, MOST_LISTED - len(chosen)))],
            key=lambda completion: completion.offset,
        )
    prompts, texts, places = _read_texts(run_dir / COMPLETIONS, chosen)
    rows = [
        [*item.values, item.components, "".join(sorted(kind[0] for kind in item.kinds)), places.get(item.offset, -1)]
        for item in kept
    ]
    return {
        "fields": [*FIELDS, "components", "kinds", "text"],
        "rows": rows,
        "texts": texts,
        "prompts": prompts,
        "recorded": recorded,
        "random_complete": all("random" in completion.kinds for completion in listed),
    }


def _listed(place: int, record: Record) -> Listed:
    values = [
        record["step"],
        *(number(record.get(name)) for name in FIELDS[1:-1]),
        str(record.get("finish_reason", "")),
    ]
    components = record.get("components")
    parts = {str(name): number(value) for name, value in components.items()} if isinstance(components, dict) else {}
    texts = [len(str(record.get(name, ""))) for name in ("prompt", "response")]
    return Listed(place, values, parts, sum(min(length, LONGEST_TEXT) for length in texts))


def _mark_best_and_worst(listed: list[Listed]) -> None:
    """Of each step whose rewards differ, by reward; of equal ones that whose advantage is furthest from 0: the rare
    success, the rare failure."""
    by_step: dict[int, list[Listed]] = {}
    for completion in listed:
        if completion.values[3] is not None:
            by_step.setdefault(completion.step, []).append(completion)
    for completions in by_step.values():
        best, worst = max(completions, key=_merit), min(completions, key=_merit)
        if best.values[3] > worst.values[3]:
            best.kinds.add("best")
            worst.kinds.add("worst")


def _merit(completion: Listed) -> tuple[float, float]:
    return completion.values[3], completion.values[4] or 0.0


def _choose_texts(listed: list[Listed]) -> list[Listed]:
    """Those whose texts are on the page, in the file's order; the random ones among them are marked."""
    order = list(range(len(listed)))
    random.Random(SEED).shuffle(order)
    chosen: set[int] = set()
    left = TEXT_CHARACTERS
    for place in order:  # steps at random too, so that a long run keeps best and worst of all its parts
        if listed[place].kinds and left - listed[place].characters > TEXT_CHARACTERS * (1 - BEST_AND_WORST_SHARE):
            chosen.add(place)
            left -= listed[place].characters
    for place in order:
        cost = 0 if place in chosen else listed[place].characters
        if left < cost:
            break
        chosen.add(place)
        listed[place].kinds.add("random")
        left -= cost
    return [listed[place] for place in sorted(chosen)]


def _read_texts(path: Path, chosen: Iterable[Listed]) -> tuple[list[str], list[list[Any]], dict[int, int]]:
    """Prompts without repetition, [place of the prompt, response], and by offset the place of the latter."""
    prompts: dict[str, int] = {}
    texts: list[list[Any]] = []
    places: dict[int, int] = {}
    with path.open("rb") as file:
        for completion in chosen:
            file.seek(completion.offset)
            record = parse_record(file.readline())
            if record is not None:
                places[completion.offset] = len(texts)
                prompt = prompts.setdefault(shortened(str(record.get("prompt", ""))), len(prompts))
                texts.append([prompt, shortened(str(record.get("response", "")))])
    return list(prompts), texts, places


def shortened(text: str) -> str:
    """A text of at most LONGEST_TEXT characters, and what is left out said."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are left out here ...]\n{text[-half:]}"

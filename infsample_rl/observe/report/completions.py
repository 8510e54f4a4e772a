"""Which of a run's recorded completions are on the page: every step's best and worst, and a random choice that is blind
to both, as far as the page's share of characters goes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infsample_rl.observe.records import parse_record
from infsample_rl.observe.report.run_folder import COMPLETIONS, Record, number, read_lines

TEXT_CHARACTERS = 6_000_000  # of all responses and prompts on the page
BEST_AND_WORST_SHARE = 0.5  # of them at most, so that random ones find a place in a long run too
LONGEST_TEXT = 20_000  # characters of one text; the middle of a longer one is left out
SEED = 0
FIELDS = ("step", "prompt_index", "sample_index", "reward", "advantage", "length")


@dataclass(slots=True)
class Recorded:
    """A recorded completion, without its texts."""

    offset: int  # byte of its line in the file
    values: list[Any]  # FIELDS
    characters: int
    kinds: set[str] = field(default_factory=set)  # b: best of its step, w: worst, r: random

    @property
    def merit(self) -> tuple[float, float]:
        """By reward; of equal ones that whose advantage is further from 0: the rare success, the rare failure."""
        return self.values[3], self.values[4] or 0.0


def choose_completions(run_dir: Path, notes: list[str]) -> dict[str, Any] | None:
    """What the page shows; None where nothing was recorded.

    {"fields": names of a row's values, "rows": [[*FIELDS, finish_reason, components, kinds, place in prompts,
    response]], "prompts": without repetition, "recorded": all in the file}
    """
    recorded = [_recorded(place, record) for place, record in read_lines(run_dir / COMPLETIONS, notes)]
    if not recorded:
        return None
    _mark_best_and_worst(recorded)
    rows: list[list[Any]] = []
    prompts: dict[str, int] = {}
    with (run_dir / COMPLETIONS).open("rb") as file:
        for completion in _choose(recorded):
            file.seek(completion.offset)
            record = parse_record(file.readline())
            if record is not None:
                prompt = prompts.setdefault(shortened(str(record.get("prompt", ""))), len(prompts))
                finish, response = str(record.get("finish_reason", "")), shortened(str(record.get("response", "")))
                kinds = "".join(sorted(completion.kinds))
                rows.append([*completion.values, finish, _components(record), kinds, prompt, response])
    return {
        "fields": [*FIELDS, "finish_reason", "components", "kinds", "prompt", "response"],
        "rows": rows,
        "prompts": list(prompts),
        "recorded": len(recorded),
    }


def _recorded(place: int, record: Record) -> Recorded:
    lengths = [len(str(record.get(name, ""))) for name in ("prompt", "response")]
    values = [number(record.get(name)) for name in FIELDS]
    return Recorded(place, values, sum(min(length, LONGEST_TEXT) for length in lengths))


def _components(record: Record) -> Record:
    found = record.get("components")
    return {str(name): number(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _mark_best_and_worst(recorded: list[Recorded]) -> None:
    """Of each step whose rewards differ."""
    by_step: dict[int, list[Recorded]] = {}
    for completion in recorded:
        if completion.values[3] is not None:
            by_step.setdefault(completion.values[0], []).append(completion)
    for completions in by_step.values():
        best, worst = (pick(completions, key=lambda completion: completion.merit) for pick in (max, min))
        if best.values[3] > worst.values[3]:
            best.kinds.add("b")
            worst.kinds.add("w")


def _choose(recorded: list[Recorded]) -> list[Recorded]:
    """Those whose texts fit, in the file's order; the random ones among them are marked."""
    order = random.Random(SEED).sample(range(len(recorded)), len(recorded))
    chosen: set[int] = set()
    left = TEXT_CHARACTERS
    for place in order:  # steps at random too, so that a long run keeps best and worst of all its parts
        cost = recorded[place].characters
        if recorded[place].kinds and left - cost > TEXT_CHARACTERS * (1 - BEST_AND_WORST_SHARE):
            chosen.add(place)
            left -= cost
    for place in order:
        cost = 0 if place in chosen else recorded[place].characters
        if left < cost:
            break
        chosen.add(place)
        recorded[place].kinds.add("r")
        left -= cost
    return [recorded[place] for place in sorted(chosen)]


def shortened(text: str) -> str:
    """A text of at most LONGEST_TEXT characters, and what is left out said."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are left out here ...]\n{text[-half:]}"

"""Knights-and-knaves puzzles: generation, solving, canonical forms and worked reasoning. Standard library only.

Every inhabitant is a knight (always tells the truth) or a knave (always lies) and makes one statement. A puzzle here
always has exactly one solution. Three styles of worked reasoning are rendered:

    hasty    guesses an assignment and answers at once
    half     checks some statements of some guesses, then settles for one
    careful  checks every statement of a guess, takes the next guess at the first clash, answers when all fit

The first guess is uniformly random, and puzzles are drawn so that every assignment is the solution equally often:
guessing better than chance needs real insight into the statements, while checking always pays.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

NAMES = (
    "Ava", "Ben", "Cal", "Dora", "Eli", "Finn", "Gwen", "Hugo", "Iris", "Jack", "Kate", "Leo",
    "Mia", "Noah", "Olga", "Paul", "Quinn", "Rosa", "Sam", "Tess", "Uma", "Vera", "Will", "Zoe",
)  # fmt: skip
OPERATORS = ("is", "and", "or", "if", "iff")
OPERATOR_WEIGHTS = (6, 2, 2, 2, 1)
SHARE_OF_TWO = 0.65  # the share of puzzles with two inhabitants; the others have three
STYLES = ("hasty", "half", "careful")
ROLE = {True: "knight", False: "knave"}
TRUTH = {True: "true", False: "false"}
INTRO = "Knights always tell the truth and knaves always lie."


@dataclass(frozen=True)
class Literal:
    """A claim that person p is a knight (or a knave): Literal(person=0, knight=True)."""

    person: int
    knight: bool


@dataclass(frozen=True)
class Statement:
    """One claim: Statement("if", (Literal(0, True), Literal(1, False))); "is" has one part, the others two."""

    operator: str
    parts: tuple[Literal, ...]


@dataclass(frozen=True)
class Puzzle:
    """Inhabitant i says statements[i]; solution[i] is True for a knight."""

    statements: tuple[Statement, ...]
    solution: tuple[bool, ...]


@dataclass(frozen=True)
class Haste:
    """How readily reasoning stops early: at a fresh guess (first, later ones) or after a statement that fits."""

    at_first_guess: float
    at_later_guess: float
    after_fit: float


HASTE = {"hasty": Haste(1.0, 1.0, 1.0), "half": Haste(0.0, 0.25, 0.5), "careful": Haste(0.0, 0.0, 0.0)}


# ---------------------------------------------------------------------------------------------------------- logic


def part_values(statement: Statement, assignment: Sequence[bool]) -> list[bool]:
    """The truth of each part of a statement under an assignment."""
    return [assignment[part.person] == part.knight for part in statement.parts]


def holds(statement: Statement, assignment: Sequence[bool]) -> bool:
    """Whether a statement is true under an assignment."""
    values = part_values(statement, assignment)
    match statement.operator:
        case "is":
            return values[0]
        case "and":
            return values[0] and values[1]
        case "or":
            return values[0] or values[1]
        case "if":
            return not values[0] or values[1]
        case "iff":
            return values[0] == values[1]
    raise ValueError(f"unknown operator {statement.operator!r}; known: {', '.join(OPERATORS)}")


def consistent(statements: Sequence[Statement], assignment: Sequence[bool]) -> bool:
    """Whether every knight's statement is true and every knave's is false."""
    return all(holds(statement, assignment) == role for statement, role in zip(statements, assignment, strict=True))


def solve(statements: Sequence[Statement]) -> list[tuple[bool, ...]]:
    """Every assignment consistent with the statements, by brute force."""
    return [a for a in itertools.product((True, False), repeat=len(statements)) if consistent(statements, a)]


def canonical_form(statements: Sequence[Statement]) -> str:
    """A string equal for puzzles that differ only in names, in the inhabitants' order or in the order round and/or/iff.

    Two inhabitants, each calling the other a knave: "2: 0 says 1-; 1 says 0-".
    """
    count = len(statements)
    forms = []
    for order in itertools.permutations(range(count)):
        renamed = sorted((order[i], _statement_form(s, order)) for i, s in enumerate(statements))
        forms.append("; ".join(f"{speaker} says {text}" for speaker, text in renamed))
    return f"{count}: {min(forms)}"


def _statement_form(statement: Statement, order: Sequence[int]) -> str:
    parts = [f"{order[part.person]}{'+' if part.knight else '-'}" for part in statement.parts]
    if statement.operator in ("and", "or", "iff"):
        parts.sort()
    return parts[0] if statement.operator == "is" else f"{statement.operator}({', '.join(parts)})"


# ----------------------------------------------------------------------------------------------------- generation


def random_statement(rng: random.Random, speaker: int, count: int) -> Statement:
    """A random statement; a bare "X is a ..." is never about the speaker."""
    operator = rng.choices(OPERATORS, OPERATOR_WEIGHTS)[0]
    if operator == "is":
        people = [rng.choice([p for p in range(count) if p != speaker])]
    else:
        people = rng.sample(range(count), 2)
    return Statement(operator, tuple(Literal(person, rng.random() < 0.5) for person in people))


def random_puzzle(rng: random.Random, count: int) -> Puzzle:
    """A puzzle with exactly one solution, that solution uniform over all assignments."""
    target = tuple(rng.random() < 0.5 for _ in range(count))
    while True:
        statements = tuple(random_statement(rng, speaker, count) for speaker in range(count))
        if consistent(statements, target) and solve(statements) == [target]:
            return Puzzle(statements, target)


def random_puzzles(rng: random.Random, without: Iterable[str] = ()) -> Iterator[Puzzle]:
    """Endless puzzles of two and three inhabitants whose canonical form is not in `without`."""
    refused = frozenset(without)
    while True:
        puzzle = random_puzzle(rng, 2 if rng.random() < SHARE_OF_TWO else 3)
        if canonical_form(puzzle.statements) not in refused:
            yield puzzle


def random_names(rng: random.Random, count: int) -> list[str]:
    """Names for the inhabitants in the order in which they are met: each from its own third of NAMES.

    A tiny policy learns "the second inhabitant" far sooner than to match any of 24 names in any place.
    """
    third = len(NAMES) // 3
    return [rng.choice(NAMES[i * third : (i + 1) * third]) for i in range(count)]


# ------------------------------------------------------------------------------------------------------ rendering


def statement_text(statement: Statement, names: Sequence[str]) -> str:
    """A statement in English: "if Ava is a knight then Ben is a knave"."""
    parts = [f"{names[part.person]} is a {ROLE[part.knight]}" for part in statement.parts]
    return _join(statement.operator, parts)


def question_text(statements: Sequence[Statement], names: Sequence[str]) -> str:
    """The puzzle as a reader sees it."""
    people = ", ".join(names[:-1]) + f" and {names[-1]}"
    says = [f"{name} says: {statement_text(s, names)}." for name, s in zip(names, statements, strict=True)]
    return " ".join([INTRO, f"You meet {people}.", *says, "Who is what?"])


def answer_text(names: Sequence[str], assignment: Sequence[bool]) -> str:
    """The assignment as a sentence without its full stop: "Ava is a knight, Ben is a knave"."""
    return ", ".join(f"{name} is a {ROLE[role]}" for name, role in zip(names, assignment, strict=True))


def parse_answer(response: str, names: Sequence[str]) -> list[bool] | None:
    """The roles stated after the last "Answer:", or None unless every inhabitant is given exactly one role."""
    _, found, tail = response.rpartition("Answer:")
    roles: dict[str, bool] = {}
    for name, role in re.findall(r"(\w+) is a (knight|knave)\b", tail if found else ""):
        if roles.setdefault(name, role == "knight") != (role == "knight"):
            return None
    return [roles[name] for name in names] if set(roles) == set(names) else None


def _join(operator: str, parts: Sequence[str]) -> str:
    match operator:
        case "is":
            return parts[0]
        case "if":
            return f"if {parts[0]} then {parts[1]}"
        case "iff":
            return f"{parts[0]} exactly when {parts[1]}"
    return f"{parts[0]} {operator} {parts[1]}"


# ------------------------------------------------------------------------------------------------ worked reasoning


def next_guess(guess: Sequence[bool]) -> tuple[bool, ...]:
    """The guess after this one: count down in binary, the last inhabitant first, then start again from all knights."""
    flipped = list(guess)
    for i in reversed(range(len(flipped))):
        flipped[i] = not flipped[i]
        if not flipped[i]:
            break
    return tuple(flipped)


def guess_line(names: Sequence[str], guess: Sequence[bool]) -> str:
    """A guess: "Try Ava knight, Ben knave."."""
    return "Try " + ", ".join(f"{name} {ROLE[role]}" for name, role in zip(names, guess, strict=True)) + "."


def check_line(speaker: int, statement: Statement, names: Sequence[str], guess: Sequence[bool]) -> str:
    """One check: each part with the role guessed for its person and what that makes of the claim, then the verdict.

    Ben says "Ava is a knave or Cal is a knave", the guess is Ava knight, Ben knight, Cal knave:
    "Ben knight: Ava knight so false or Cal knave so true is true, yes."
    """
    value = holds(statement, guess)
    parts = [
        f"{names[part.person]} {ROLE[guess[part.person]]} so {TRUTH[truth]}"
        for part, truth in zip(statement.parts, part_values(statement, guess), strict=True)
    ]
    whole = "" if statement.operator == "is" else f" is {TRUTH[value]}"
    fits = "yes" if value == guess[speaker] else "no"
    return f"{names[speaker]} {ROLE[guess[speaker]]}: {_join(statement.operator, parts)}{whole}, {fits}."


def reasoning_text(puzzle: Puzzle, names: Sequence[str], style: str, rng: random.Random) -> str:
    """A whole response in one of STYLES, from the first random guess to the answer sentence."""
    haste = HASTE[style]
    guess = tuple(rng.random() < 0.5 for _ in names)
    lines: list[str] = []
    stop = haste.at_first_guess
    while True:
        lines.append(guess_line(names, guess))
        verdict = "Just a guess." if rng.random() < stop else _check(puzzle, names, guess, haste, rng, lines)
        if verdict:
            break
        guess, stop = next_guess(guess), haste.at_later_guess
    return "\n".join([*lines, f"{verdict} Answer: {answer_text(names, guess)}."])


def _check(
    puzzle: Puzzle, names: Sequence[str], guess: Sequence[bool], haste: Haste, rng: random.Random, lines: list[str]
) -> str:
    """Add check lines until a clash (returns ""), until haste wins, or until all statements fit."""
    for speaker, statement in enumerate(puzzle.statements):
        lines.append(check_line(speaker, statement, names, guess))
        if holds(statement, guess) != guess[speaker]:
            return ""
        if speaker + 1 < len(names) and rng.random() < haste.after_fit:
            return "Good enough."
    return "All fit."


def style_of(response: str) -> str:
    """Which style a response ended in, from its closing words; "other" when it has none."""
    closing = response.rpartition("Answer:")[0].rstrip()
    endings = {"Just a guess.": "hasty", "Good enough.": "half", "All fit.": "careful"}
    style = next((style for words, style in endings.items() if closing.endswith(words)), "other")
    return "half" if style == "hasty" and ", no." in closing else style


# --------------------------------------------------------------------------------------------------------- records


def record(puzzle: Puzzle, names: Sequence[str]) -> dict[str, Any]:
    """One row of train.jsonl or test.jsonl."""
    return {
        "question": question_text(puzzle.statements, names),
        "answer": answer_text(names, puzzle.solution),
        "names": list(names),
        "solution": list(puzzle.solution),
        "form": canonical_form(puzzle.statements),
    }


def make_records(count: int, seed: int, without: Iterable[str] = ()) -> list[dict[str, Any]]:
    """`count` rows with different questions whose forms are not in `without`; the same seed gives the same rows."""
    rng = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    for puzzle in random_puzzles(rng, without):
        row = record(puzzle, random_names(rng, len(puzzle.solution)))
        rows.setdefault(row["question"], row)
        if len(rows) == count:
            break
    return list(rows.values())

"""The book of one conversion: what a peer's file gives, what ours becomes of it, and what becomes of the rest.

Every setting of theirs ends in exactly one place: mapped, or listed as without equivalent, as without effect on what is
learnt, or as unknown.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infsample_rl.commands.convert.shell import is_unresolved
from infsample_rl.config.loading import SECTIONS

SECRET = re.compile(r"(wandb\.key|use_wandb|token|api_key|password|secret)$")  # names of settings whose values are keys


AS_HERE = "as it is here in any case, or part of a setting above"


class NotTaken(ValueError):
    """A value that is not of the kind its setting takes."""


class NoEquivalent(ValueError):
    """A value of theirs that no setting here stands for; the message says why, or what to use instead."""


@dataclass(frozen=True, slots=True)
class Given:
    """A setting of theirs as their file has it. Example: Given(value=8, place="line 12")"""

    value: Any
    place: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of ours and where it comes from. Example: Setting(value=8, origin="num_generations=8, line 12")"""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a peer's table: their key, our key, and a function of the value where names or units differ.

    Example: Row("optim", "learner.optimizer", optimizer) with optimizer("adamw_torch") == "adamw"
    """

    theirs: str
    ours: str
    convert: Callable[[Any], Any] = lambda value: value


class Conversion:
    """Takes their settings apart; `defaults` are the peer's own, for whatever the file leaves out or only a shell could
    resolve."""

    def __init__(self, given: Mapping[str, Given], defaults: Mapping[str, Any], version: str) -> None:
        self.unresolved = {name: entry for name, entry in given.items() if is_unresolved(entry.value)}
        self.given = {name: entry for name, entry in given.items() if name not in self.unresolved}
        self.defaults, self.version = defaults, version
        self.settings: dict[str, Setting] = {}
        self.no_equivalent: list[str] = []
        self.differs: list[str] = []
        self.without_effect: list[str] = []
        self.unknown: list[str] = []
        self._read: set[str] = set()
        self._shown: set[str] = set()  # named in the origin of a setting or in a list
        self._last = ""  # read last

    def is_given(self, name: str) -> bool:
        """Whether their file sets it."""
        return name in self.given

    def value(self, name: str) -> Any:
        """Their value, or else their default; it counts as read."""
        self._read.add(name)
        self._last = name
        return self.given[name].value if name in self.given else self.defaults.get(name)

    def set(self, ours: str, value: Any, *theirs: str, why: str = "") -> None:
        """Set one of ours, made of `theirs`. Left out where nothing of theirs is in the file and our default is the
        same."""
        self._read.update(theirs)
        if (
            not any(name in self.given or name in self.unresolved for name in theirs)
            and not why
            and value == default_of(ours)
        ):
            return
        self._shown.update(theirs)
        origin = ", ".join(self._spelled(name) for name in theirs)
        self.settings[ours] = Setting(value, "; ".join(part for part in (origin, why) if part))

    def set_warmup(self, share: float, name: str) -> None:
        """learner.warmup_steps from their share of a run's updates, once run.steps and the updates of a step are set;
        of a run that counts epochs the share is only told."""

        def count(ours: str) -> int:
            return self.settings[ours].value if ours in self.settings else 1

        if "run.steps" in self.settings:
            updates = count("run.steps") * count("objective.epochs") * count("objective.mini_batches")
            self.set("learner.warmup_steps", math.ceil(share * updates), name)
        elif share > 0:
            self.lacks(name, f"set learner.warmup_steps, {share:g} times the updates of the run")

    def lacks(self, name: str, why: str) -> None:
        """Say that a setting of theirs has no equivalent here, and why or what to use instead."""
        self._read.add(name)
        self._shown.add(name)
        self.no_equivalent.append(f"{self._spelled(name)}: {why}")

    def refuse(self, name: str, ordinary: Sequence[Any], why: str) -> None:
        """`lacks`, unless the value is one of `ordinary`, with which theirs does what is done here."""
        if self.value(name) not in ordinary:
            self.lacks(name, why)

    def fill(self, part: Callable[..., None], *arguments: Any) -> None:
        """Call `part` with this book; ValueError in one line that names the setting whose value theirs would not take
        either."""
        try:
            part(self, *arguments)
        except (NotTaken, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError, OverflowError):
            raise ValueError(f"{self._spelled(self._last)} is not a value that {self.version} takes") from None

    def apply(self, rows: Sequence[Row]) -> None:
        """Settings that map one to one."""
        for row in rows:
            value = self.value(row.theirs)
            if value is None:
                continue
            try:
                self.set(row.ours, row.convert(value), row.theirs)
            except NoEquivalent as error:
                self.lacks(row.theirs, str(error))
            except (TypeError, ValueError):
                raise ValueError(f"{self._spelled(row.theirs)} is not a value that {self.version} takes") from None

    def finish(self, ignored: Mapping[str, str]) -> None:
        """Put every setting that is not shown yet into its list; `ignored`: pattern of names -> why they do not change
        what is learnt."""
        for name in self.given:
            if name in self._shown:
                continue
            why = next((why for pattern, why in ignored.items() if fnmatch.fnmatchcase(name, pattern)), None)
            why = AS_HERE if why is None and name in self._read else why
            if why is None:
                self.unknown.append(self._spelled(name))
            else:
                self.without_effect.append(f"{self._spelled(name)}: {why}")
        for name, entry in self.unresolved.items():
            self.unknown.append(
                f"{name}={entry.value}, {entry.place}: only a shell could resolve it; add it behind the file's name"
            )

    def _spelled(self, name: str) -> str:
        if name in self.given:
            value = "(not shown)" if SECRET.search(name) else short(self.given[name].value)
            return f"{name}={value}, {self.given[name].place}"
        default = short(self.defaults.get(name))
        if name in self.unresolved:
            return (
                f"{name} is given, {self.unresolved[name].place}, and could not be resolved; {default} is the "
                f"default of {self.version}"
            )
        return f"{name}={default}, the default of {self.version}"


def default_of(ours: str) -> Any:
    """Our own default of `section.key`."""
    section, _, key = ours.partition(".")
    spec = next(spec for spec in dataclasses.fields(SECTIONS[section]) if spec.name == key)
    return spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()


def short(value: Any) -> str:
    """A value on one line, cut where it is long."""
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def number(value: Any) -> float:
    """A number, also where their file has it as text; NotTaken otherwise."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        raise NotTaken(value) from None
    if not math.isfinite(found):
        raise NotTaken(value)
    return found


def whole(value: Any) -> int:
    """A whole number; NotTaken otherwise."""
    if number(value) != int(number(value)):
        raise NotTaken(value)
    return int(number(value))


def truth(value: Any) -> bool:
    """True or false, also as text; NotTaken otherwise."""
    found = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(str(value).lower())
    if found is None:
        raise NotTaken(value)
    return found


def as_list(value: Any) -> list[Any]:
    """A list, of one where it is a single value."""
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def choose(table: Mapping[Any, Any], otherwise: str) -> Callable[[Any], Any]:
    """A Row's function that looks a value up; NoEquivalent with `otherwise` for all others."""

    def look_up(value: Any) -> Any:
        if value not in table:
            raise NoEquivalent(otherwise)
        return table[value]

    return look_up

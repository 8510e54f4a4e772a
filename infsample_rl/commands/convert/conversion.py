"""The book of one conversion: what a peer's file gives, what ours becomes of it, and what becomes of the rest.

Every setting of theirs ends in exactly one place: mapped, or listed as without equivalent, as without effect on what is
learnt, or as unknown.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infsample_rl.commands.convert.values import NoEquivalent, as_list, is_unresolved, number, positive, truth, whole
from infsample_rl.config.overrides import SECTIONS

# names of settings, and of variables of the environment, whose values are keys
SECRET = re.compile(
    r"(wandb\.key|use_wandb|token|(api|access|private)_key|secret(_key)?|passw(or)?d|passphrase|credentials?|(?-i:_KEY))$",
    re.I,
)
AS_HERE = "as it is here in any case, or part of a setting above"


@dataclass(frozen=True, slots=True)
class Given:
    """A setting of theirs as their file has it. Example: Given(value=8, place="line 12", name="rollout.n")"""

    value: Any
    place: str
    name: str  # as the file spells it


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of ours and where it comes from. Example: Setting(value=8, origin="num_generations=8, line 12")"""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a peer's table: their key, our key, a function of the value where names or units differ, and the
    value their trainer takes where none is given.

    Example: Row("optim", "learner.optimizer", optimizer, "adamw_torch") with optimizer("adamw_torch") == "adamw"
    """

    theirs: str
    ours: str
    convert: Callable[[Any], Any] = lambda value: value
    default: Any = None


@dataclass(frozen=True, slots=True)
class Peer:
    """The tables of one trainer."""

    version: str
    rows: Sequence[Row]
    defaults: Mapping[str, Any]  # of settings that are no row's
    refused: Mapping[str, tuple[Any, str]]  # setting: what does as is done here (one value or several), why no other
    ignored: Mapping[str, str]  # why it does not change what is learnt: patterns of names

    @property
    def all_defaults(self) -> dict[str, Any]:
        """What their trainer takes for settings that are not given."""
        return {row.theirs: row.default for row in self.rows} | dict(self.defaults)


class Conversion:
    """Takes their settings apart. Lists that are printed: no_equivalent, differs, without_effect, unknown."""

    def __init__(self, given: Mapping[str, Given], peer: Peer) -> None:
        self.given = {name: entry for name, entry in given.items() if not is_unresolved(entry.value)}
        self.unresolved = {name: entry for name, entry in given.items() if name not in self.given}
        self.peer = peer
        self._defaults = peer.all_defaults
        self.settings: dict[str, Setting] = {}
        self.no_equivalent: list[str] = []
        self.differs: list[str] = []
        self.without_effect: list[str] = []
        self.unknown: list[str] = []
        self._read: set[str] = set()
        self._shown: set[str] = set()  # named in the origin of a setting or in a list

    @property
    def dropped(self) -> list[str]:
        """What of theirs is in no setting and would change what is learnt, or may."""
        return self.no_equivalent + self.unknown

    def value(self, name: str) -> Any:
        """Their value, or else their default; it counts as read."""
        self._read.add(name)
        return self.given[name].value if name in self.given else self._defaults.get(name)

    def checked(self, name: str, kind: Callable[[Any], Any]) -> Any:
        """kind(value); ValueError in one line that names the setting whose value theirs would not take either."""
        try:
            return kind(self.value(name))
        except NoEquivalent:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
            raise ValueError(f"{self._spelled(name)} is not a value that {self.peer.version} takes") from None

    def number(self, name: str) -> float:
        """A number."""
        return self.checked(name, number)

    def whole(self, name: str) -> int:
        """A whole number."""
        return self.checked(name, whole)

    def count(self, name: str) -> int:
        """A whole number above 0."""
        return self.checked(name, positive)

    def truth(self, name: str) -> bool:
        """True or false; false where it is neither given nor has a default."""
        return self.checked(name, lambda value: truth(value or False))

    def list(self, name: str) -> list[Any]:
        """A list, of one where it is a single value."""
        return as_list(self.value(name))

    def first_given(self, *names: str) -> str:
        """The first name that their file sets; the last of them where it sets none."""
        return next((name for name in names if name in self.given), names[-1])

    def set(self, ours: str, value: Any, theirs: str = "", why: str = "") -> None:
        """Set one of ours, made of `theirs`, names with spaces between. Left out where nothing of theirs is in the file
        and our default is the same."""
        names = theirs.split()
        self._read.update(names)
        is_given = any(name in self.given or name in self.unresolved for name in names)
        if not is_given and not why and value == default_of(ours):
            return
        self._shown.update(names)
        origin = ", ".join(self._spelled(name) for name in names)
        self.settings[ours] = Setting(value, "; ".join(part for part in (origin, why) if part))

    def ours(self, name: str) -> Any:
        """What one of ours was set to; its default otherwise."""
        return self.settings[name].value if name in self.settings else default_of(name)

    def lacks(self, name: str, why: str) -> None:
        """Say that a setting of theirs has no equivalent here, and why or what to use instead."""
        self._read.add(name)
        self._shown.add(name)
        self.no_equivalent.append(f"{self._spelled(name)}: {why}")

    def set_warmup(self, share: float, name: str) -> None:
        """learner.warmup_steps from their share of a run's updates, once run.steps and the updates of a step are set;
        of a run that counts epochs the share is only told."""
        if "run.steps" in self.settings:
            updates = self.ours("run.steps") * self.ours("objective.epochs") * self.ours("objective.mini_batches")
            self.set("learner.warmup_steps", math.ceil(share * updates), name)
        elif share > 0:
            self.lacks(name, f"set learner.warmup_steps, {share:g} times the updates of the run")

    def apply_tables(self) -> None:
        """Settings that map one to one, and those that are refused unless they say what is done here."""
        for row in self.peer.rows:
            if row.ours and self.value(row.theirs) is not None:
                try:
                    self.set(row.ours, self.checked(row.theirs, row.convert), row.theirs)
                except NoEquivalent as error:
                    self.lacks(row.theirs, str(error))
        for name, (ordinary, why) in self.peer.refused.items():
            if name in self.given and self.value(name) not in (None, *as_list(ordinary)):
                self.lacks(name, why)

    def finish(self, needed: Mapping[str, str]) -> None:
        """Put every setting that is not shown yet into its list. ValueError when one of `needed`, our settings that
        have no default and how theirs are given, was not found."""
        for name, entry in self.given.items():
            if name not in self._shown:
                why = self._why_ignored({name, entry.name}) or (AS_HERE if name in self._read else "")
                listed = self.without_effect if why else self.unknown
                listed.append(f"{self._spelled(name)}: {why}" if why else self._spelled(name))
        for entry in self.unresolved.values():
            self.unknown.append(
                f"{entry.name}={_short(entry.value)}, {entry.place}: it could not be resolved; add it behind the "
                "file's name"
            )
        for ours, how in needed.items():
            if ours not in self.settings:
                names = ", ".join(entry.name for entry in self.unresolved.values())
                unclear = f" (could not be resolved: {names})" if names else ""
                raise ValueError(
                    f"nothing in the file says what {ours} is to be{unclear}; add {how} behind the file's name"
                )

    def _why_ignored(self, names: Iterable[str]) -> str:
        """The reason whose pattern says most about one of the names."""
        found = [
            (len(pattern.replace("*", "")), why)
            for why, patterns in self.peer.ignored.items()
            for pattern in patterns.split()
            if any(fnmatch.fnmatchcase(name, pattern) for name in names)
        ]
        return max(found, default=(0, ""))[1]

    def _spelled(self, name: str) -> str:
        if name in self.given:
            entry = self.given[name]
            value = "(not shown)" if SECRET.search(entry.name) or SECRET.search(name) else _short(entry.value)
            return f"{entry.name}={value}, {entry.place}"
        default, version = _short(self._defaults.get(name)), self.peer.version
        if name in self.unresolved:
            entry = self.unresolved[name]
            unclear = f"{entry.name} is given, {entry.place}, and could not be resolved"
            return f"{unclear}; {default} is the default of {version}"
        return f"{name}={default}, the default of {version}"


def default_of(ours: str) -> Any:
    """Our own default of `section.key`."""
    section, _, key = ours.partition(".")
    spec = next(spec for spec in dataclasses.fields(SECTIONS[section]) if spec.name == key)
    return spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()


def _short(value: Any) -> str:
    """A value on one line, cut where it is long."""
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else text[:77] + "..."

"""What goes wrong with a run, noticed from the metrics of its steps: one line each, said once, with what to do. Pure.

The rules and their thresholds are in health_rules.py; docs/warnings.md lists them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from infsample_rl.config import Config
from infsample_rl.observe.health_rules import BASELINE_STEPS, LONGEST_WINDOW, RULES, Steps

WORSE = 1.5  # how many times as bad something must be to be said again
# after which what still holds is said again: a line an hour, not one a step, in a run whose steps take half a minute
REMIND_STEPS = 100
FORGET_STEPS = 10  # without it after which something is new again


class Finding(NamedTuple):
    """Something wrong.

    Example: Finding(rule="all_cut", severity=0.97, text="97% of the last 5 steps' samples ...: set ...")
    """

    rule: str
    severity: float  # grows as it gets worse; every rule has its own scale
    text: str  # one line: what, with numbers, over how many steps, and what to do


class Health:
    """Follows a run's steps. What it finds is said once, again when it is WORSE times as bad, after REMIND_STEPS, or
    when it has come back."""

    def __init__(self, config: Config, history: Iterable[dict[str, Any]] = ()) -> None:
        """`history`: records of metrics.jsonl of the steps before, which count as seen and are not judged again."""
        self._config = config
        self._first: list[dict[str, Any]] = []
        self._recent: deque[dict[str, Any]] = deque(maxlen=LONGEST_WINDOW)
        self._said: dict[str, tuple[int, float]] = {}  # rule -> step, severity
        self._held_at: dict[str, int] = {}  # rule -> the last step at which it held
        self.num_holding = 0  # rules that hold now
        for record in history:
            self._take(record)

    def enter(self, step: int, metrics: dict[str, Any]) -> list[Finding]:
        """A step has ended with these metrics; what is to be said of it. Nothing of step 0, which is an evaluation."""
        if step < 1:
            return []
        self._take({**metrics, "step": step})
        steps = Steps(self._first, list(self._recent))
        verdicts = {rule.__name__: rule(self._config, steps) for rule in RULES}
        found = [Finding(rule, *verdict) for rule, verdict in verdicts.items() if verdict is not None]
        self.num_holding = len(found)
        return [finding for finding in found if self._is_news(step, finding)]

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`, which are done again, and what was said of them."""
        self._first = _until(self._first, step)
        self._recent = deque(_until(self._recent, step), maxlen=LONGEST_WINDOW)
        self._said = {rule: said for rule, said in self._said.items() if said[0] <= step}
        self._held_at = {rule: min(at, step) for rule, at in self._held_at.items()}

    def _take(self, record: dict[str, Any]) -> None:
        if record["step"] < 1:
            return
        if len(self._first) < BASELINE_STEPS:
            self._first.append(record)
        self._recent.append(record)

    def _is_news(self, step: int, finding: Finding) -> bool:
        rule, severity, _ = finding
        said_at, was = self._said.get(rule, (None, 0.0))
        held_at, self._held_at[rule] = self._held_at.get(rule, step), step
        known = step - held_at <= FORGET_STEPS
        if said_at is not None and known and severity < WORSE * was and step - said_at < REMIND_STEPS:
            return False
        self._said[rule] = step, severity
        return True


def _until(records: Sequence[dict[str, Any]] | deque[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    return [record for record in records if record["step"] <= step]

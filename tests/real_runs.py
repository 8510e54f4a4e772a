"""What a run by the real command left, for the tests of tests/runs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

Row = dict[str, float]


class Run(NamedTuple):
    """What a run left."""

    rows: list[Row]  # of metrics.jsonl
    log: str  # run.log
    folder: Path


def same_everywhere(row: Row) -> Row:
    """What no arrangement may change: samples, rewards and the update."""
    return {
        name: value for name, value in row.items() if name.split("/")[0] in ("reward", "response", "learner", "step")
    }

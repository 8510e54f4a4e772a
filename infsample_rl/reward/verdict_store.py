"""Verdicts of judges on disk, by the content of what was asked: one SQLite file that several processes share."""

from __future__ import annotations

import sqlite3
import warnings
from pathlib import Path

WAIT_S = 30.0  # for another process that writes
MAKE = "CREATE TABLE IF NOT EXISTS verdicts (place TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID"


class VerdictStore:
    """Texts by place. Of one thread. Where the file cannot be used, one warning says so and nothing more is kept."""

    def __init__(self, path: Path | None) -> None:
        """`path` None: keep nothing."""
        self._path = path
        self._file: sqlite3.Connection | None = None

    def get(self, place: str) -> str | None:
        """What was kept at a place."""
        found = self._run("SELECT text FROM verdicts WHERE place = ?", place)
        return found[0][0] if found else None

    def put(self, place: str, text: str) -> str:
        """Keep a text, unless another process has kept one meanwhile; the one that is kept."""
        self._run("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", place, text)
        return self.get(place) or text

    def remove(self, place: str, text: str) -> None:
        """Forget a text, unless another process has put another in its place meanwhile."""
        self._run("DELETE FROM verdicts WHERE place = ? AND text = ?", place, text)

    def _run(self, statement: str, *values: str) -> list[tuple[str]]:
        if self._path is None:
            return []
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = sqlite3.connect(self._path, timeout=WAIT_S, isolation_level=None)
                self._file.execute(MAKE)
            return self._file.execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            warnings.warn(f"verdicts are not kept: {self._path} cannot be used ({error})", stacklevel=2)
            self._path = None
            return []

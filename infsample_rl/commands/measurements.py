"""Records of measurements as JSON lines and as a table."""

from __future__ import annotations

import json
from typing import Any


def print_json(record: dict[str, Any]) -> None:
    """One line on stdout, at once."""
    print(json.dumps(record), flush=True)


def print_table(records: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """A plain table on stdout; bytes in MB of 1e6, c0 and c1 in ms, c2 in microseconds, shares in %."""
    rows = [list(columns.values()), *([cell(name, record[name]) for name in columns] for record in records)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(columns))]
    for row in rows:
        cells = [
            text.ljust(width) if index == 0 else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def cell(name: str, value: Any) -> str:
    """A value of a record as the table shows it; '-' for one that was not measured."""
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return f"{value / 1e6:.1f}"
    if name in ("c0", "c1"):
        return f"{value * 1e3:.2f}"
    if name == "c2":
        return f"{value * 1e6:.1f}"
    if name in ("roofline_fraction", "saved_share"):
        return f"{value:.1%}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)

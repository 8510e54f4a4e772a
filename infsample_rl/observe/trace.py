"""trace.json: a run's last steps in Chrome's Trace Event Format, for ui.perfetto.dev and chrome://tracing.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (JSON array format).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from pathlib import Path
from typing import Any

from infsample_rl.observe.files import write_atomically
from infsample_rl.observe.records import set_aside

WRITE_EVERY_S = 10.0  # short steps are written together

Event = dict[str, Any]


class TraceFile:
    """Events of the last `keep_steps` steps. `start_step` as in RunLogger: a resumed run drops the events of later
    steps."""

    def __init__(self, path: Path, *, keep_steps: int, start_step: int) -> None:
        self._path = path
        self._steps: deque[list[str]] = deque(maxlen=keep_steps)  # written out, which is what takes time
        self._names: dict[tuple[Any, ...], Event] = {}  # metadata: names of processes and threads
        self._written_at = 0.0
        if start_step > 0:
            self._restore(start_step)
        else:
            set_aside(path)

    def name(self, event: Event) -> None:
        """Keep a metadata event for as long as the file; a later one of the same process, thread and name replaces
        it."""
        self._names[event["pid"], event.get("tid"), event["name"]] = event

    def add(self, events: list[Event]) -> None:
        """Keep a step's events, each with args.step; the oldest step goes. Written now or within WRITE_EVERY_S seconds
        of steps."""
        self._steps.append([json.dumps(event) for event in events])
        if time.monotonic() - self._written_at >= WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Replace the file; with keep_steps=0 there is none. Where it cannot be written (a full disk) the one before
        stays."""
        if self._steps.maxlen == 0:
            return
        self._written_at = time.monotonic()
        lines = [*map(json.dumps, self._names.values()), *(line for step in self._steps for line in step)]
        with contextlib.suppress(
            OSError
        ):  # no run ends for its timeline; of a full disk the checkpoint's warning tells
            write_atomically(self._path, "[\n" + ",\n".join(lines) + "\n]\n")

    def _restore(self, start_step: int) -> None:
        steps: dict[int, list[str]] = {}
        for event in read_trace(self._path):
            if event["ph"] == "M":
                self.name(event)
            elif event["args"]["step"] <= start_step:
                steps.setdefault(event["args"]["step"], []).append(json.dumps(event))
        self._steps.extend(steps[step] for step in sorted(steps))


def read_trace(path: Path) -> list[Event]:
    """The events of a trace; none where there is no file, or one that is no trace."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    return events if isinstance(events, list) else []

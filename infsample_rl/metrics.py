"""What a run shows and keeps: one call a step feeds the console, run.log, metrics.jsonl, completions.jsonl and the trackers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from infsample_rl.config import Config
from infsample_rl.logging_outputs.records import append_record, json_value, open_records, rewind_records
from infsample_rl.logging_outputs.screen import Screen
from infsample_rl.logging_outputs.timeline_picture import draw_timeline, newest_step
from infsample_rl.logging_outputs.trackers import start_trackers

METRICS_FILE, COMPLETIONS_FILE, TRACE_FILE = "metrics.jsonl", "completions.jsonl", "trace.json"
PICTURE_EVERY_S = 60.0  # trackers get a timeline; drawing one takes a part of a second


class RunLogger:
    """Everything a run reports. `start_step` is the last step already done: 0 for a new run, else the checkpoint's step.

    A resumed run cuts both JSONL files back to `start_step`; a new one sets files of an earlier start aside as NAME.1.jsonl.
    On a terminal a progress bar stays below everything printed; in a pipe or a file every step is one plain line.
    """

    def __init__(self, config: Config, run_dir: Path, *, total_steps: int, start_step: int) -> None:
        self._trackers = start_trackers(config, run_dir, start_step)  # first: it may refuse
        self._pictured, self._picture_due_at = start_step, time.monotonic() + PICTURE_EVERY_S
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._completions_per_step = config.logging.completions_per_step
        self._screen = Screen(run_dir / "run.log", total_steps=total_steps, start_step=start_step, progress=config.logging.progress)
        self._metrics_file = open_records(run_dir / METRICS_FILE, start_step)
        self._completions_file = open_records(run_dir / COMPLETIONS_FILE, start_step)
        self._say_of_trackers()
        for tracker in self._trackers:
            if tracker.place:
                self.note(tracker.place)

    def print_table(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Print names and values below a title."""
        self._screen.table(title, rows)

    def note(self, text: str) -> None:
        """Print a line (above the progress bar) and keep it in run.log."""
        self._screen.line(text)

    def keep(self, text: str) -> None:
        """Keep a line in run.log alone."""
        self._screen.keep(text)

    def warn(self, text: str) -> None:
        """Print a warning, also when logging.progress is false."""
        self._screen.line(f"warning: {text}", style="yellow")

    def start_progress(self) -> None:
        """Show the progress bar already before the first step ends. Optional: log_step does it too."""
        self._screen.start_bar()

    def log_step(self, step: int, metrics: dict[str, float | None], completions: list[dict[str, Any]]) -> None:
        """Keep and show one step. Call it before the step's checkpoint gets its name, or a kill in between loses the record.

        `completions`: dicts with the keys COMPLETION_COLUMNS; the first logging.completions_per_step are kept.
        """
        values = json_value(metrics)
        samples = json_value([{"step": step, **completion} for completion in completions[: self._completions_per_step]])
        append_record(self._metrics_file, {"step": step, **values})
        for sample in samples:
            append_record(self._completions_file, sample)
        known = {name: value for name, value in values.items() if value is not None}
        for tracker in self._trackers:
            tracker.log(step, known, samples)
        if time.monotonic() >= self._picture_due_at:
            self._show_timeline()
        self._say_of_trackers()
        self._screen.step(step, known)

    def _show_timeline(self) -> None:
        """Give the trackers a picture of the newest step that trace.json has, if they have not got it."""
        self._picture_due_at = time.monotonic() + PICTURE_EVERY_S
        found = newest_step(self._run_dir / TRACE_FILE) if self._trackers else None
        if found is None or found[0] <= self._pictured:
            return
        self._pictured, picture = found[0], draw_timeline(*found)
        for tracker in self._trackers:
            tracker.show(found[0], "timeline", picture)

    def _say_of_trackers(self) -> None:
        for tracker in self._trackers:
            for line in tracker.said:
                self.warn(line)
            tracker.said.clear()

    def rewind(self, step: int) -> None:
        """Forget steps after `step`, which are done again: both JSONL files are cut back as on a resume. 0: the first evaluation too."""
        self._metrics_file = rewind_records(self._metrics_file, self._run_dir / METRICS_FILE, step or -1)
        self._completions_file = rewind_records(self._completions_file, self._run_dir / COMPLETIONS_FILE, step or -1)
        self._pictured = min(self._pictured, step)
        self._screen.rewind(step)

    def close(self, *, failed: bool = False) -> None:
        """Stop the bar, finish the trackers (as a failed run if `failed`) and close the files. Calling it again does nothing."""
        self._screen.stop_bar()
        if self._trackers:
            self._show_timeline()
            for tracker in self._trackers:
                tracker.close(failed=failed)
            self._say_of_trackers()
            self._trackers = []
        self._metrics_file.close()
        self._completions_file.close()
        self._screen.close()

"""What a run shows and keeps: one call a step feeds the console, run.log, the JSONL files, report.html and the
trackers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infsample_rl.config import Config
from infsample_rl.observe.health import Health
from infsample_rl.observe.records import RecordFile, json_value, read_records
from infsample_rl.observe.screen import Screen
from infsample_rl.observe.trackers.trackers import Tracker, start_trackers
from infsample_rl.types import ClusterNow

METRICS_FILE, COMPLETIONS_FILE, WARNINGS_FILE = "metrics.jsonl", "completions.jsonl", "warnings.jsonl"
SAMPLES_FILE, LENGTHS_FILE = "samples.jsonl", "lengths.jsonl"
# with a step: cut back where steps are done again
RECORD_FILES = (METRICS_FILE, COMPLETIONS_FILE, SAMPLES_FILE, LENGTHS_FILE, WARNINGS_FILE)
REPORT_FILE = "report.html"
REPORT_SHARE = 0.02  # of a run's time, at most, that reports at checkpoints may take
WARN_EVERY_STEPS = 20  # of warnings that may come with every step, one of a kind in so many is said


class RunLogger:
    """Everything a run reports. `start_step` is the last step already done: 0 for a new run, else the checkpoint's
    step.

    A new run sets files of an earlier start aside as NAME.1.jsonl; a resumed one goes on with them, and has to rewind()
    before its first step. On a terminal a live view stays below everything printed; in a pipe or a file every step is
    one plain line.
    """

    def __init__(
        self, config: Config, run_dir: Path, *, total_steps: int, start_step: int, screen: Screen | None = None
    ) -> None:
        """`screen`: one that has shown lines before, which run.log begins with."""
        self._trackers = start_trackers(config, run_dir, start_step)  # first: it may refuse
        self._run_dir = run_dir
        self._completions_per_step = config.logging.completions_per_step
        self._uploads_completions = config.logging.upload_completions
        self._screen = screen or Screen(config, total_steps=total_steps, start_step=start_step)
        self._screen.keep_in(run_dir / "run.log")
        self._files = {name: RecordFile(run_dir / name, start_step) for name in RECORD_FILES}
        self._is_closed = False
        self._report_due_at = 0.0
        self._step = start_step
        before = (record for record in read_records(run_dir / METRICS_FILE) if record["step"] <= start_step)
        self._health = Health(config, before)
        # kind of warning -> step it was said at, how many were kept back since
        self._seldom: dict[str, tuple[int, int]] = {}
        self._say_of_trackers()
        for place in filter(None, (tracker.place for tracker in self._trackers)):
            self.note(place)

    def note(self, text: str) -> None:
        """Print a line (above the progress bar) and keep it in run.log."""
        self._screen.line(text)

    def keep(self, text: str) -> None:
        """Keep text in run.log alone."""
        self._screen.keep(text)

    def warn(self, text: str, rule: str = "") -> None:
        """Print a warning, also when logging.progress is false, and keep it in warnings.jsonl. `rule`: of health.py,
        where one found it."""
        self._screen.warn(text)
        self.append(WARNINGS_FILE, [{"step": self._step, "rule": rule or None, "text": text}])

    def warn_seldom(self, text: str) -> None:
        """A warning that may come with every step: said once in WARN_EVERY_STEPS of those that differ in numbers alone,
        the others counted."""
        kind = re.sub(r"\d+", "#", text)
        said_at, kept_back = self._seldom.get(kind, (None, 0))
        if said_at is not None and self._step - said_at < WARN_EVERY_STEPS:
            self._seldom[kind] = said_at, kept_back + 1
            return
        self._seldom[kind] = self._step, 0
        self.warn(f"{text} (and {kept_back:,} more like it since step {said_at})" if kept_back else text)

    def start_progress(self, source: Callable[[], ClusterNow] | None = None) -> None:
        """Show the live view before the first step ends. `source`: what is in flight, without waiting; asked on a
        terminal only."""
        self._screen.view.watch(source)
        self._screen.start_live()

    def log_step(self, step: int, metrics: dict[str, float | None], completions: list[dict[str, Any]]) -> None:
        """Keep and show one step. Call it before the step's checkpoint gets its name, or a kill in between loses the
        record.

        `completions`: as StepRecorder has them; the first logging.completions_per_step are kept.
        """
        self._step = step
        findings = self._health.enter(step, metrics)
        if step:
            metrics = {**metrics, "health/warnings": self._health.num_holding}
        values = json_value(metrics)
        samples = json_value([{"step": step, **completion} for completion in completions[: self._completions_per_step]])
        self.append(METRICS_FILE, [{"step": step, **values}])
        self.append(COMPLETIONS_FILE, samples)
        self._track(step, values, samples if self._uploads_completions else [])
        self._screen.step(step, _known(values))
        for finding in findings:
            self.warn(finding.text, finding.rule)

    def record_of(self, step: int) -> dict[str, Any] | None:
        """What is kept of a step, None if nothing is."""
        return next((record for record in read_records(self._run_dir / METRICS_FILE) if record["step"] == step), None)

    def add_to_step(self, step: int, metrics: dict[str, float | None]) -> None:
        """Keep and show what of a step was measured after log_step()."""
        values = json_value(metrics)
        self._files[METRICS_FILE].amend(step, values)
        self._track(step, values, [])
        self._screen.step(step, _known(self.record_of(step) or {}))

    def append(self, name: str, records: list[dict[str, Any]]) -> None:
        """Keep records with a step in one of RECORD_FILES."""
        self._files[name].append(records)

    def write_report(self, *, is_last: bool = False) -> None:
        """Write report.html. Before the run's last it is left out where it would take more than REPORT_SHARE of the
        time."""
        if not is_last and time.monotonic() < self._report_due_at:
            return
        # late: what it takes, a run that fails at start need not load
        from infsample_rl.observe.report.page import write_report

        started = time.monotonic()
        try:
            write_report([self._run_dir], self._run_dir / REPORT_FILE)
        except Exception as error:  # whatever a page stumbles over, the run and its exit code are not its business
            self.warn(f"{REPORT_FILE} could not be written ({type(error).__name__}: {error})")
        self._report_due_at = time.monotonic() + (time.monotonic() - started) / REPORT_SHARE

    def _track(self, step: int, values: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        self._ask_trackers(lambda tracker: tracker.log(step, _known(values), samples))

    def _ask_trackers(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # a tracker must not end a run, whatever its place answers
                self._trackers.remove(tracker)
                why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                self.warn(f"{tracker.name} gets no more of this run, metrics.jsonl has all of it: {why}")
        self._say_of_trackers()

    def _say_of_trackers(self) -> None:
        for tracker in self._trackers:
            for line in tracker.said:
                self.warn(line)
            tracker.said.clear()

    def rewind(self, step: int) -> None:
        """Forget steps after `step`, which are done again: the JSONL files are cut back as on a resume. 0: the first
        evaluation too."""
        for name, file in self._files.items():  # a warning before the first step stays
            file.rewind(step if name == WARNINGS_FILE else step or -1)
        self._health.rewind(step)
        self._seldom = {kind: said for kind, said in self._seldom.items() if said[0] <= step}
        self._step = step
        self._screen.rewind(step)
        self._ask_trackers(lambda tracker: tracker.rewind(step))

    def close(self, *, failed: bool = False) -> None:
        """Stop the live view, finish the trackers (as a failed run if `failed`) and close the files. Calling it again
        does nothing."""
        self._screen.stop_live()
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.write_report(is_last=True)  # before the trackers, which may take longer than run.grace_s leaves
        finally:  # on a full disk the report's warning fails too
            self._ask_trackers(lambda tracker: tracker.close(failed=failed))
        for file in self._files.values():
            file.close()
        self._screen.close()


def _known(values: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}

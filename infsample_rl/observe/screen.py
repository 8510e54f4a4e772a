"""The console half of a run's log: a live view on a terminal, plain lines in a pipe; what is said is copied to
run.log."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections import deque
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from infsample_rl.config import Config
from infsample_rl.observe.live_view import LiveView, written

RATE_STEPS = 20  # time left is estimated over this many steps
LINE = {  # a step in one line
    "reward/mean": "reward {:.3f}",
    "response/length_mean": "length {:.0f}",
    "timing/tokens_per_s": "{:,.0f} tok/s",
    "timing/step": "{:.1f} s",
    "eval/accuracy": "held-out accuracy {:.3f}",
}
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Screen:
    """The console and run.log: a live view below the printed lines on a terminal, plain lines without escape codes
    elsewhere. Lines that come before keep_in() are kept for run.log: until the cluster is reached there is no run
    folder."""

    def __init__(self, config: Config, *, total_steps: int, start_step: int) -> None:
        self._log: TextIO = io.StringIO()
        sizes = {"samples_per_step": config.samples_per_step, "max_new_tokens": config.rollout.max_new_tokens}
        self.view = LiveView(config.run.name, total_steps=total_steps, **sizes)
        self._progress = config.logging.progress
        self._total, self._step = total_steps, start_step
        self._marks: deque[tuple[int, float]] = deque(maxlen=RATE_STEPS + 1)  # (step, time it ended)
        self._pace: tuple[float, float] | None = None  # seconds a step, and when the last one ended
        terminal = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._console = Console(file=sys.stdout, force_terminal=True) if terminal else None
        if isinstance(sys.stdout, io.TextIOWrapper):  # a prompt in Greek must not end a run whose terminal is ASCII
            sys.stdout.reconfigure(errors="replace" if terminal else "backslashreplace")
        self._live: Live | None = None

    def keep_in(self, path: Path) -> None:
        """Write what is printed to this file too, and first what has been."""
        said, self._log = self._log, path.open("a", encoding="utf-8", errors="backslashreplace")
        assert isinstance(said, io.StringIO), "called once"
        self._log.write(said.getvalue())

    def warn(self, text: str) -> None:
        """A line that is also kept in the live view."""
        self.view.warn(printable(text))
        self.line(f"warning: {text}", style="yellow")

    def line(self, text: str, style: str = "") -> None:
        """Print text as it is: no markup, control characters made visible; also to run.log."""
        self.keep(text)
        self.print(text, style)

    def keep(self, text: str) -> None:
        """To run.log alone."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._log.writelines(f"{stamp} {line}\n" for line in printable(text).splitlines())
        self._log.flush()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Bring the view up to date, or print the step's line; of a step that is there already its evaluation."""
        self._step = step
        is_known = bool(self._marks) and self._marks[-1][0] == step
        self._marks.append((step, time.monotonic()))
        (first_step, first_time), (_, last_time) = self._marks[0], self._marks[-1]
        rate = (last_time - first_time) / (step - first_step) if step > first_step else metrics.get("timing/step")
        self._pace = None if rate is None else (rate, last_time)
        said = written(metrics, LINE)[-1 if is_known else 0 :]
        text = "  ".join(filter(None, [self._position(), *said, self._time_left()]))
        self.keep(text)
        if not self._progress:
            return
        self.view.step(step, metrics)
        self.start_live()
        if self._live is None:
            self.print(text)
            return
        if metrics.get("eval/accuracy") is not None:
            self.print(f"{self._position()}  {said[-1]}", "bold")
        self._live.refresh()

    def rewind(self, step: int) -> None:
        """Go on after `step`: what came later is done again."""
        self._step, self._pace = step, None
        self._marks.clear()
        self.view.rewind(step)

    def start_live(self) -> None:
        """Start the live view on a terminal, once, unless logging.progress is false."""
        if self._console is None or not self._progress or self._live is not None:
            return
        # Lines of other processes (Ray prints workers' output here) stay above the view; a stderr that goes to a file
        # is left alone.
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=1,
            vertical_overflow="crop",
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start(refresh=True)
        self._console.show_cursor(True)  # rich hides it, and a killed run could not bring it back

    def stop_live(self) -> None:
        """Leave the view's last state on the screen."""
        self.view.watch(None)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def close(self) -> None:
        """Close run.log."""
        self._log.close()

    def _render(self) -> Group:
        assert self._console is not None, "only a console has a live view"
        width, height = self._console.size
        # Two lines are left: a view as high as the terminal would push itself out of the top.
        return self.view.render(width, height - 2, time_left=self._time_left())

    def _position(self) -> str:
        return f"step {self._step:>{len(str(self._total))}}/{self._total}"

    def _time_left(self) -> str:
        pace = self._pace  # once: the view asks from a thread of its own
        if pace is None or self._step >= self._total:
            return ""
        left = pace[0] * (self._total - self._step) - (time.monotonic() - pace[1])
        # a step that takes longer than those before has no end to tell
        return f"{duration(left)} left" if left >= 1 else ""

    def print(self, text: str, style: str = "") -> None:
        """To the console alone."""
        text = printable(text)
        if self._console is None:
            print(text, flush=True)
        else:
            self._console.print(Text(text, style=style), soft_wrap=True)


def aligned(title: str, rows: list[tuple[str, str]]) -> str:
    """Names and values below a title."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def duration(seconds: float) -> str:
    """Seconds in words: 45 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def printable(text: str) -> str:
    """Text with control characters (a model may sample an escape code) written out."""
    return CONTROL_CHARACTERS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)

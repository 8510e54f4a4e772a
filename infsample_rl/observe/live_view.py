"""The screen of a run that is watched: progress, the last step in figures, the rows that decode now, warnings.

rich draws the bars and cuts every line to the width, so nothing is wider than the terminal.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from infsample_rl.observe.phases import IDLE, current
from infsample_rl.types import ClusterNow, RolloutNow, RowNow

ASK_S = 1.0  # how often what decodes now is asked for
CELL = 26  # least columns of a row that decodes
NAMED_FROM = 60  # narrower terminals leave the run's name out
WARNINGS_SHOWN = 3
DOING = {
    "start": "starting workers",
    "sample": "sampling",
    "update": "updating",
    "learn": "fitting lengths",
    "publish": "handing out weights",
    "evaluate": "evaluating",
    "save": "saving",
    IDLE: "between steps",
}
FIGURES = {  # line -> metric -> how it is written, the most important first
    "reward": {
        "reward/mean": "{:.3f}",
        "reward/std": "std {:.3f}",
        "reward/groups_with_signal": "{:.0%} of groups with signal",
    },
    "length": {
        "response/length_mean": "{:.0f} tokens",
        "response/length_std": "std {:.0f}",
        "response/length_max": "longest {:.0f}",
        "response/cut": "{:.0%} cut",
    },
    "policy": {
        "learner/entropy": "entropy {:.3g}",
        "learner/kl": "KL {:.2g}",
        "learner/grad_norm": "grad {:.2g}",
        "rollout/staleness": "staleness {:.0f}",
        "learner/logprob_diff_mean": "engine diff {:.1g}",
    },
    "seconds": {
        "timing/step": "step {:.1f}",
        "timing/rollout": "rollout {:.1f}",
        "timing/backward_after_rollout": "backward after {:.1f}",
        "timing/update": "update {:.1f}",
        "timing/weight_sync": "weights {:.1f}",
    },
    "rollout": {
        "timing/tokens_per_s": "{:,.0f} tok/s",
        "rollout/row_utilisation": "rows {:.0%} used",
        "kv_peak": "KV peak {:.0%} of the pool",
    },
}


class LiveView:
    """What is known of a run, to be drawn. `render` may be called from another thread than the rest."""

    def __init__(self, name: str, *, total_steps: int, samples_per_step: int, max_new_tokens: int) -> None:
        self._name, self._total = name, total_steps
        self._samples, self._longest = samples_per_step, max_new_tokens
        self._step = 0
        self._metrics: dict[str, float] = {}
        self._held_out = ""  # accuracy, and after which step
        self._warnings: deque[str] = deque(maxlen=WARNINGS_SHOWN)
        self._source: Callable[[], ClusterNow] | None = None
        self._now: ClusterNow | None = None
        self._asked_at, self._asked_in = 0.0, ""

    def watch(self, source: Callable[[], ClusterNow] | None) -> None:
        """Where what is in flight is asked for, at most every ASK_S; it must not wait. None: nothing decodes any
        more."""
        self._source, self._now = source, None

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """A step has ended (0: an evaluation before the first)."""
        self._step = step
        self._metrics = metrics if step else {}
        if metrics.get("eval/accuracy") is not None:
            self._held_out = f"accuracy {metrics['eval/accuracy']:.3f}  after step {step}"

    def rewind(self, step: int) -> None:
        """Go on after `step`."""
        self._step = step

    def warn(self, text: str) -> None:
        """The newest warnings stay on the screen, a line each, with the step they came after."""
        self._warnings.append(f"after step {self._step}: {' '.join(text.split())}")

    def render(self, width: int, height: int, *, time_left: str) -> Group:
        """The view, in at most `height` lines where that is 6 or more; warnings and the header go before figures, and
        those before rows that decode."""
        self._ask()
        warnings = [("warning", text) for text in self._warnings]
        figures = [*step_figures(self._metrics), *([("held-out", self._held_out)] if self._held_out else [])]
        lines = figures[: max(0, height - 2 - len(warnings))]
        if self._source is not None:
            lines.append(("now", self._doing()))
        rows = self._workers(width, height - 1 - len(lines) - len(warnings))
        return Group(self._header(width, time_left), _named(lines, "cyan"), *rows, _named(warnings, "yellow", "yellow"))

    def _ask(self) -> None:
        phase = current()[0]
        if self._source is not None and (time.monotonic() - self._asked_at >= ASK_S or phase != self._asked_in):
            self._asked_at, self._asked_in = time.monotonic(), phase
            self._now = self._source()

    def _header(self, width: int, time_left: str) -> Table:
        place = f"step {self._step:>{len(str(self._total))}}/{self._total}  {time_left}".rstrip()
        header: list[Any] = [ProgressBar(total=max(1, self._total), completed=self._step), place]
        grid = Table.grid(padding=(0, 2), expand=True)
        if width >= NAMED_FROM:
            grid.add_column(no_wrap=True, max_width=width // 3, style="bold")
            header.insert(0, Text(self._name))
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        grid.add_row(*header)
        return grid

    def _doing(self) -> str:
        phase, since = current()
        is_sampled = phase == "sample" and self._now is not None and not self._now.owed
        said = "finishing the step's rewards and rows" if is_sampled else DOING.get(phase, phase)
        parts = [f"{said} {max(0.0, time.time() - since):.0f} s"]
        if self._now is not None:
            if self._now.owed and phase == "sample":
                parts.append(f"{max(0, self._samples - self._now.owed)} of {self._samples} in")
            elif self._now.owed:
                parts.append(f"{self._now.owed} to come")
            parts += [f"{count} at {stage}" for stage, count in self._now.in_flight.items() if count]
        return "  ".join(parts)

    def _workers(self, width: int, height: int) -> list[Table]:
        """Of every worker that decodes a title and its rows, those with most tokens left first."""
        if self._now is None or not self._now.owed:  # what a worker said a second ago is over
            return []
        workers = [worker for worker in self._now.rollout if worker.rows][: max(0, height)]
        cells = max(1, width // CELL)  # in a line
        tables = []
        for worker in workers:
            rows = sorted(worker.rows, key=lambda row: row.tokens - (row.predicted or self._longest))
            shown = rows[: cells * (height // len(workers) - 1)]
            tables += [_title(worker, len(shown)), self._rows(shown, cells)]
        return tables

    def _rows(self, rows: list[RowNow], cells: int) -> Table:
        grid = Table.grid(padding=(0, 1), expand=True)
        for _ in range(cells):
            grid.add_column(no_wrap=True, min_width=5, style="cyan")
            grid.add_column(ratio=1)
            grid.add_column(no_wrap=True, min_width=2 * len(str(self._longest)) + 3, justify="right")
        depth = -(-len(rows) // cells)
        for first in range(depth):  # down the columns
            grid.add_row(*(part for row in rows[first::depth] for part in self._cell(row)))
        return grid

    def _cell(self, row: RowNow) -> tuple[str, ProgressBar, str]:
        end = max(row.tokens, row.predicted or self._longest)
        known = f"/~{end:.0f}" if row.predicted is not None else ""
        return f"{row.prompt_index}.{row.sample_index}", ProgressBar(end, row.tokens), f"{row.tokens}{known} "


def step_figures(metrics: dict[str, float]) -> list[tuple[str, str]]:
    """A step in a few named lines; what was not measured is left out."""
    pool, peak = metrics.get("rollout/kv_pool_bytes"), metrics.get("rollout/peak_kv_bytes")
    if pool and peak is not None:
        metrics = metrics | {"kv_peak": peak / pool}
    lines = [(name, "  ".join(written(metrics, forms))) for name, forms in FIGURES.items()]
    return [(name, text) for name, text in lines if text]


def written(metrics: dict[str, float], forms: dict[str, str]) -> list[str]:
    """The metrics that `forms` names, each in its form; what was not measured is left out.

    Example: written({"reward/mean": 0.5, "learner/kl": None}, {"reward/mean": "reward {:.3f}", "learner/kl": "KL {}"})
    == ["reward 0.500"]
    """
    return [form.format(metrics[name]) for name, form in forms.items() if metrics.get(name) is not None]


def _named(lines: Sequence[tuple[str, str]], name_style: str, style: str = "") -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, width=9, style=name_style)
    grid.add_column(style=style)
    for name, text in lines:
        grid.add_row(name, Text(text, no_wrap=True, overflow="ellipsis"))
    return grid


def _title(worker: RolloutNow, num_shown: int) -> Table:
    count = f"{len(worker.rows)} row{'s' * (len(worker.rows) != 1)}"
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, width=9, style="cyan")
    grid.add_column(no_wrap=True)
    grid.add_column(max_width=20)
    grid.add_column(no_wrap=True)
    grid.add_row(
        f"rollout {worker.worker}",
        f"{count}  KV pool" if num_shown == len(worker.rows) else f"{count}, {num_shown} shown  KV",
        ProgressBar(total=max(1, worker.pages), completed=worker.pages_used),
        f"{worker.pages_used / max(1, worker.pages):.0%}",
    )
    return grid

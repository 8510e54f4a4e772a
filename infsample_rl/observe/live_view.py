"""The screen of a run that is watched: progress, the last step in figures, the rows that decode now, warnings. Lines of
text for any size.

Every line fits the width: what matters least is left out first, so that 40 columns show the same lines as 80 with less
on each.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from rich.cells import cell_len
from rich.text import Text

from infsample_rl.observe.phases import IDLE, current
from infsample_rl.types import ClusterNow, RolloutNow, RowNow

ASK_S = 1.0  # how often what decodes now is asked for
LABEL = 10  # columns of the names on the left
CELL = 24  # least columns of a row's cell
WARNINGS_SHOWN = 3
REWARDS_SHOWN = 24
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII = str.maketrans({"\u2501": "=", "\u2500": "-", "\u00b1": "+", "\u2026": "~"})
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


class LiveView:
    """What is known of a run, as lines. `lines` may be called from another thread than the rest."""

    def __init__(self, name: str, *, total_steps: int, samples_per_step: int, max_new_tokens: int) -> None:
        self._name, self._total = name, total_steps
        self._samples, self._longest = samples_per_step, max_new_tokens
        self._step = 0
        self._metrics: dict[str, float] = {}
        self._held_out: tuple[float, int] | None = None  # accuracy, after which step
        self._rewards: deque[float] = deque(maxlen=REWARDS_SHOWN)
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
        if "eval/accuracy" in metrics:
            self._held_out = metrics["eval/accuracy"], step
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])

    def rewind(self, step: int) -> None:
        """Go on after `step`."""
        self._step = step

    def warn(self, text: str) -> None:
        """The newest warnings stay on the screen, with the step they came after."""
        self._warnings.append(f"after step {self._step}: {text}")

    def lines(self, width: int, height: int, *, time_left: str, unicode: bool = True) -> list[Text]:
        """At most `height` lines of at most `width` columns. Without `unicode` in ASCII alone."""
        self._ask()
        warnings = [_line("warning", text, width, style="yellow") for text in self._warnings]
        warnings = warnings[-(height - 2) :] if height > 2 else []
        figures = self._figures(width, unicode)[: max(0, height - 2 - len(warnings))]
        doing = [] if self._source is None else [self._doing(width)]
        head = [self._header(width, time_left), *figures, *doing][: max(1, height)]
        rows = self._rows(width, height - len(head) - len(warnings))
        shown = [*head, *rows, *warnings]
        for line in shown:
            if not unicode:
                line.plain = line.plain.translate(ASCII).encode("ascii", "replace").decode()
            line.truncate(width, overflow="ellipsis" if unicode else "crop")
        return shown

    def _ask(self) -> None:
        phase = current()[0]
        if self._source is not None and (time.monotonic() - self._asked_at >= ASK_S or phase != self._asked_in):
            self._asked_at, self._asked_in = time.monotonic(), phase
            self._now = self._source()

    def _header(self, width: int, time_left: str) -> Text:
        place = f"step {self._step:>{len(str(self._total))}}/{self._total}"
        right = f"{place}  {time_left}" if time_left else place
        room = width - len(right) - 2
        name = self._name if cell_len(self._name) + 10 <= room else ""
        left = max(0, min(40, room - cell_len(name) - 2))
        text = Text().append(f"{name}  " if name else "", style="bold")
        text.append_text(_bar(self._step, self._total, self._total, left if left >= 4 else 0))
        return text.append(("  " if left >= 4 else "") + right)

    def _figures(self, width: int, unicode: bool) -> list[Text]:
        figures = dict(step_figures(self._metrics))
        if unicode and "reward" in figures and len(self._rewards) > 1:
            figures["reward"].insert(1, _sparkline(self._rewards))
        if self._held_out is not None:
            figures["held-out"] = [f"accuracy {self._held_out[0]:.3f}", f"after step {self._held_out[1]}"]
        return [_line(name, fit(parts, width - LABEL), width) for name, parts in figures.items()]

    def _doing(self, width: int) -> Text:
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
        return _line("now", fit(parts, width - LABEL), width)

    def _rows(self, width: int, height: int) -> list[Text]:
        now = self._now  # where nothing is owed, what a worker said a second ago is over
        workers = [worker for worker in now.rollout if worker.rows] if now is not None and now.owed > 0 else []
        workers = workers[: max(0, height)]
        if not workers:
            return []
        each, more = divmod(height - len(workers), len(workers))
        lines: list[Text] = []
        for place, worker in enumerate(workers):
            lines += self._worker(worker, width, each + (place < more))
        return lines

    def _worker(self, worker: RolloutNow, width: int, height: int) -> list[Text]:
        columns = max(1, width // (CELL + 2))
        cell = (width + 2) // columns - 2
        # most tokens left first
        rows = sorted(worker.rows, key=lambda row: row.tokens - (row.predicted or self._longest))
        shown = rows[: columns * height]
        hidden = f"{len(shown)} shown, most left first" if len(shown) < len(rows) else ""
        full = worker.pages_used / worker.pages if worker.pages else 0.0
        text = _line(f"rollout {worker.worker}", f"{len(rows)} row{'s' * (len(rows) != 1)}  KV pool ", width)
        bar = max(4, min(20, width - text.cell_len - 6))
        text.append_text(_bar(worker.pages_used, worker.pages, worker.pages, bar)).append(f" {full:.0%}")
        if hidden and text.cell_len + 2 + len(hidden) <= width:
            text.append(f"  {hidden}", style="dim")
        lines = [text]
        depth = -(-len(shown) // columns)
        for first in range(depth):  # down the columns
            cells = [self._cell(row, cell) for row in shown[first::depth]]
            lines.append(Text("  ").join(cells))
        return lines

    def _cell(self, row: RowNow, width: int) -> Text:
        known = f"/~{max(row.predicted, row.tokens):.0f}" if row.predicted is not None else ""
        name, count = f"{row.prompt_index}.{row.sample_index}", f"{row.tokens}{known}"
        name, count = f"{name:<6}", f"{count:>{2 * len(str(self._longest)) + 2}}"
        text = Text().append(name, style="cyan")
        text.append_text(
            _bar(
                row.tokens,
                max(row.tokens, row.predicted or 0),
                self._longest,
                max(1, width - len(name) - len(count) - 1),
            )
        )
        return text.append(" " + count)


def step_figures(metrics: dict[str, float]) -> list[tuple[str, list[str]]]:
    """A step in a few named lines, each of parts with the most important first; what was not measured is left out."""
    known = {name: value for name, value in metrics.items() if value is not None}

    def parts(*wanted: tuple[str, str]) -> list[str]:
        return [text.format(known[name]) for name, text in wanted if name in known]

    reward = "{:.3f}".format(known["reward/mean"]) if "reward/mean" in known else ""
    reward += " \u00b1 {:.3f}".format(known["reward/std"]) if reward and "reward/std" in known else ""
    length = "{:.0f}".format(known["response/length_mean"]) if "response/length_mean" in known else ""
    length += (
        " \u00b1 {:.0f} tokens".format(known["response/length_std"])
        if length and "response/length_std" in known
        else ""
    )
    pool = known.get("rollout/kv_pool_bytes")
    peak = (
        f"KV peak {known['rollout/peak_kv_bytes'] / pool:.0%} of the pool"
        if pool and "rollout/peak_kv_bytes" in known
        else ""
    )
    kl = [("learner/kl", "KL {:.2g}")] if known.get("learner/kl") else []
    staleness = [("rollout/staleness", "staleness {:.0f}")] if "rollout/staleness" in known else []
    figures = {
        "reward": [reward, *parts(("reward/groups_with_signal", "{:.0%} of groups with signal"))],
        "length": [length, *parts(("response/length_max", "longest {:.0f}"), ("response/cut", "{:.0%} cut"))],
        "policy": parts(
            ("learner/entropy", "entropy {:.3g}"),
            *kl,
            ("learner/grad_norm", "grad {:.2g}"),
            *staleness,
            ("learner/logprob_diff_mean", "engine diff {:.1g}"),
        ),
        "seconds": parts(
            ("timing/step", "step {:.1f}"),
            ("timing/rollout", "rollout {:.1f}"),
            ("timing/backward_after_rollout", "backward after {:.1f}"),
            ("timing/update", "update {:.1f}"),
            ("timing/weight_sync", "weights {:.1f}"),
        ),
        "rollout": [
            *parts(("timing/tokens_per_s", "{:,.0f} tok/s"), ("rollout/row_utilisation", "rows {:.0%} used")),
            peak,
        ],
    }
    return [(name, found) for name, values in figures.items() if (found := [value for value in values if value])]


def fit(parts: Sequence[str], width: int) -> str:
    """Parts side by side, those that no longer fit left out; the first one always stays."""
    text = parts[0] if parts else ""
    for part in parts[1:]:
        if len(text) + 2 + len(part) <= width:
            text += f"  {part}"
    return text


def _line(name: str, text: str, width: int, style: str = "") -> Text:
    return Text().append(f"{name:<{LABEL}}"[:width], style=style or "cyan").append(text, style=style)


def _bar(done: float, until: float, total: float, width: int) -> Text:
    """Done, then what is expected up to `until`, then nothing up to `total`. Told apart without colour."""
    total = max(total, 1)
    full, expected = round(width * min(done / total, 1)), round(width * min(until / total, 1))
    bar = Text("\u2501" * full, style="green")
    return bar.append("\u2500" * (expected - full), style="dim").append(" " * (width - expected))


def _sparkline(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    if high == low:
        return BLOCKS[0] * len(values)
    return "".join(BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1))] for value in values)

"""The one length probe of a run: merges what workers have seen, fits, decides whether predictions are used, is kept in
checkpoints.

The driver has it for all its rollout workers; an engine that works alone has one for itself.
"""

from __future__ import annotations

import zipfile
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from infsample_rl.rollout.length_prediction.probe import DECAY, LengthProbe
from infsample_rl.types import ProbeReport, ProbeStatistics, PublishedProbe

FILE = "length_probe.npz"  # in a checkpoint
RECENT = 8  # replays that count


class RunProbe:
    """Statistics and fit of a run's length probe, and its gate: predictions are used where recent replays took no more
    steps with them than without, and not before the first replay."""

    def __init__(self, hidden_size: int, *, max_new_tokens: int) -> None:
        self._new_probe = partial(LengthProbe, hidden_size, max_new_tokens=max_new_tokens)
        self.reset(None)

    def reset(self, folder: Path | None) -> None:
        """Go back to what a checkpoint of this run has, None: to the start."""
        self._probe = self._new_probe()
        self._replays: deque[tuple[int, int]] = deque(maxlen=RECENT)  # steps with and without predictions
        self.steps_saved: int | None = None  # by predictions, in the last replay; None: there was none
        if folder is not None:
            self.load(folder)

    def enter(self, reports: Sequence[ProbeReport]) -> str | None:
        """Merge the workers' reports of one step, in their order, and fit anew.

        A sentence at the first replay, and when predictions come into use or go out of it.
        """
        probe = self._probe
        seen = probe.statistics
        older = ProbeStatistics(seen.xx * DECAY, seen.xy * DECAY, seen.yy * DECAY)
        probe.statistics = sum((report.statistics for report in reports), older)
        probe.fit()
        # workers decode side by side, but what counts is the sum: each has groups of its own
        with_them = sum(report.steps_with for report in reports)
        without = sum(report.steps_without for report in reports)
        self.steps_saved = without - with_them if without else None
        if not without:
            return None
        before = self._is_used if self._replays else None
        self._replays.append((with_them, without))
        if self._is_used == before:
            return None
        verb = (
            "are used from the next step on" if self._is_used else "are not used in the next step, it goes on learning"
        )
        with_them, without = (sum(steps) for steps in zip(*self._replays, strict=True))
        took = f"recent groups, replayed, take {with_them:,} steps with them and {without:,} without"
        return f"length probe: its predictions {verb}: {took}"

    @property
    def _is_used(self) -> bool:
        return bool(self._replays) and sum(with_them - without for with_them, without in self._replays) <= 0

    def published(self) -> PublishedProbe:
        """What workers need to predict."""
        return PublishedProbe(fit=self._probe.fitted, is_used=self._is_used)

    def save(self, folder: Path) -> None:
        """Write the probe into a checkpoint."""
        arrays: dict[str, Any] = self._probe.state()
        np.savez(folder / FILE, replays=np.array(self._replays, np.int64).reshape(-1, 2), **arrays)

    def load(self, folder: Path) -> str | None:
        """Go on from a checkpoint; a sentence when there is nothing of use in it, and the probe starts anew."""
        path = folder / FILE
        if not path.is_file():
            return f"{path} is not there: the length probe starts anew"
        try:
            with np.load(path) as file:
                state = dict(file)
            # before anything changes: load_state takes all or nothing
            replays = state["replays"].reshape(-1, 2).tolist()
            self._probe.load_state(state)
        # NotImplementedError: damage that reads as a compression
        except (OSError, EOFError, KeyError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
            return f"{path} is of no use ({type(error).__name__}: {error}); the length probe starts anew"
        self._replays.extend(map(tuple, replays))
        return None

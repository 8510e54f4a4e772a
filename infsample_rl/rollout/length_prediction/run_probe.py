"""The one length probe of a run: merges what workers have seen, fits, decides whether predictions are used, is kept in
checkpoints.

The driver has it for all its rollout workers; an engine that works alone has one for itself.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infsample_rl.rollout.length_prediction.probe import DECAY, LengthProbe
from infsample_rl.rollout.length_prediction.replay import ReplayGate
from infsample_rl.types import ProbeReport, ProbeStatistics, PublishedProbe

FILE = "length_probe.npz"  # in a checkpoint


class RunProbe:
    """Statistics, fit and gate of a run's length probe."""

    def __init__(self, hidden_size: int, *, max_new_tokens: int) -> None:
        self._sizes = (hidden_size, max_new_tokens)
        self._begin()

    def _begin(self) -> None:
        hidden_size, max_new_tokens = self._sizes
        self._probe = LengthProbe(hidden_size, max_new_tokens=max_new_tokens)
        self._gate = ReplayGate()
        self.steps_saved: int | None = None  # by predictions, in the last replay; None: there was none

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
        with_them, without = (
            sum(report.steps_with for report in reports),
            sum(report.steps_without for report in reports),
        )
        self.steps_saved = without - with_them if without else None
        return self._gate.enter(with_them, without)

    def published(self) -> PublishedProbe:
        """What workers need to predict."""
        return PublishedProbe(fit=self._probe.fitted, is_used=self._gate.is_open)

    def save(self, folder: Path) -> None:
        """Write the probe into a checkpoint."""
        arrays: dict[str, Any] = self._probe.state()
        np.savez(folder / FILE, replays=np.array(self._gate.recent, np.int64).reshape(-1, 2), **arrays)

    def reset(self, folder: Path | None) -> None:
        """Go back to what a checkpoint of this run has, None: to the start."""
        self._begin()
        if folder is not None:
            self.load(folder)

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
        except ValueError as error:
            return f"{path}: {error}; the length probe starts anew"
        # Not...: damage that reads as a compression
        except (OSError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile) as error:
            return f"{path} is damaged ({type(error).__name__}: {error}); the length probe starts anew"
        for steps_with, steps_without in replays:
            self._gate.enter(steps_with, steps_without)
        return None

    @property
    def statistics(self) -> ProbeStatistics:
        """All that it has seen, older observations counting less."""
        return self._probe.statistics

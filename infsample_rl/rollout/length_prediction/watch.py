"""The length probe while an engine decodes: asks it for rows, keeps what it saw until a sample ends, then lets it
learn.

Every PREDICT_EVERY running steps, all rows are predicted at once, from the hidden states that the step has just
computed. Letters: R rows, E hidden size, F features.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from infsample_rl.config import RolloutConfig
from infsample_rl.rollout.length_prediction.probe import LengthProbe
from infsample_rl.rollout.length_prediction.replay import ReplayedGroup, ReplayedSample, ReplaySettings, replay
from infsample_rl.rollout.length_prediction.run_probe import RunProbe
from infsample_rl.rollout.schedule.prompt_group import PromptGroup, Sample
from infsample_rl.types import Forecast, MaybeNone, ProbeReport, PublishedProbe

PREDICT_EVERY = 32  # running steps from one prediction for all rows to the next
REPLAYED_GROUPS = 2  # of a stream, its last ones: a replay takes 1 % of the time of decoding on the tiniest policy
OBSERVED_ROWS = 1024  # features that wait to be learnt from together: 1 MB
HALF_RANGE = 60000.0  # features are kept as float16


class Moment(NamedTuple):
    """Features of the rows of one step."""

    samples: list[Sample]
    num_tokens: list[int]  # of each, as its hidden state has seen
    features: torch.Tensor  # [R, F] float32


@dataclass(slots=True)
class _Seen:
    """What was seen of a sample that decodes."""

    states: list[tuple[np.ndarray, int]] = field(default_factory=list)  # features [F] float16, after so many tokens
    predicted: dict[int, float] = field(default_factory=dict)  # total length, by the tokens it had when that was known


class ProbeWatch:
    """The probe of one engine. Predicts with what `load` brought, and collects what `report` hands over."""

    def __init__(self, hidden_size: int, config: RolloutConfig, *, shared: bool) -> None:
        """`shared`: it belongs to a run, which takes its reports and brings the fit; else it learns from each stream
        for the next."""
        self.probe = LengthProbe(hidden_size, max_new_tokens=config.max_new_tokens)
        self._own = None if shared else RunProbe(hidden_size, max_new_tokens=config.max_new_tokens)
        self.is_used = False  # whether predictions are given to the samples
        self.seconds_spent = 0.0
        self._turn = 0  # which prompts are of which fold
        self._steps_since = 0
        self._seen: dict[Sample, _Seen] = {}
        # by fold: features, tokens left, cut
        self._ended: dict[int, list[tuple[np.ndarray, int, bool]]] = {0: [], 1: []}
        self._groups: dict[PromptGroup, ReplayedGroup] = {}
        self._settings: ReplaySettings | MaybeNone = None  # after begin()

    def load(self, published: PublishedProbe) -> None:
        """Predict with this fit from now on. What was not reported before it is of a step that was given up, and is
        done again."""
        self.probe.take_statistics()
        self._groups, self._ended = {}, {0: [], 1: []}
        self.probe.fitted, self.is_used = published.fit, published.is_used

    def prepare(self) -> None:
        """Before a stream: a probe that works alone learns from the one before."""
        if self._own is not None:
            self._own.enter([self.report()])
            self.load(self._own.published())

    def begin(self, groups: Sequence[PromptGroup], settings: ReplaySettings, *, step: int) -> None:
        """A new stream, of a run's `step`. Where its schedule has prefixes, a sample is predicted at their end,
        whatever the running step."""
        # both folds get prompts of every step, also where a step has but one; a run's prompt is in one fold, whichever
        # workers decode its samples
        self._turn = step if self._own is None else self._turn + 1
        self._steps_since, self._settings = 0, settings
        self._seen.clear()
        kept = deque(groups, maxlen=REPLAYED_GROUPS)
        self._groups = {group: ReplayedGroup(len(group.prompt_ids)) for group in kept}

    def launch(self, hidden: torch.Tensor, rows: Sequence[Sample]) -> Moment | None:
        """After a step of `rows` was launched, its last hidden states [R, E]: features of those that are due. The
        samples already count the token that is being drawn, which `hidden` has not seen."""
        self._steps_since += 1
        everyone, wait_at = self._steps_since >= PREDICT_EVERY, self._settings.config.num_prefix_tokens
        if not everyone and not wait_at:
            return None
        due = [
            row
            for row, sample in enumerate(rows)
            if (sample.num_tokens > 1 if everyone else sample.num_tokens == wait_at)
        ]
        if not due:
            return None
        started = time.perf_counter()
        if everyone:
            self._steps_since = 0
        samples = [rows[row] for row in due]
        num_tokens = [sample.num_tokens - 1 for sample in samples]
        features = self.probe.features(hidden[torch.tensor(due).to(hidden.device)], torch.tensor(num_tokens))
        self.seconds_spent += time.perf_counter() - started
        return Moment(samples, num_tokens, features)

    def read(self, moment: Moment) -> None:
        """The step of `moment` has been read: predict its samples, but for those that have ended."""
        started = time.perf_counter()
        features = moment.features.cpu()
        left = self.probe.predict(features).tolist() if self.probe.fitted is not None else None
        halves = features.clamp(-HALF_RANGE, HALF_RANGE).half().numpy()
        for row, (sample, count) in enumerate(zip(moment.samples, moment.num_tokens, strict=True)):
            if sample.finish_reason:  # when this step was launched ahead
                continue
            seen = self._seen.setdefault(sample, _Seen())
            seen.states.append((halves[row].copy(), count))  # a view would keep the rows of all others
            if left is not None:
                seen.predicted[count + 1] = count + left[row]
                sample.forecast = sample.forecast or Forecast(count + 1, count + left[row])
                if self.is_used:
                    sample.predicted = count + left[row]
        self.seconds_spent += time.perf_counter() - started

    def ended(self, sample: Sample, length: int, *, cut: bool) -> None:
        """A sample has ended with `length` tokens; `cut`: at max_new_tokens."""
        started = time.perf_counter()
        seen = self._seen.pop(sample, None) or _Seen()
        group = sample.group
        if group in self._groups:
            self._groups[group].samples.append(ReplayedSample(sample.sample_index, length, seen.predicted))
        ended = self._ended[(group.prompt_index + self._turn) % 2]
        ended += [(features, length - count, cut) for features, count in seen.states]
        if len(ended) >= OBSERVED_ROWS:
            self._observe()
        self.seconds_spent += time.perf_counter() - started

    def report(self) -> ProbeReport:
        """What was learnt since the last report, and a replay of the last stream's groups with and without their
        predictions."""
        started = time.perf_counter()
        self._observe()
        groups, self._groups = list(self._groups.values()), {}
        has_predictions = any(sample.predicted for group in groups for sample in group.samples)
        steps = replay(groups, self._settings) if has_predictions else (0, 0)
        self.seconds_spent += time.perf_counter() - started
        return ProbeReport(statistics=self.probe.take_statistics(), steps_with=steps[0], steps_without=steps[1])

    def _observe(self) -> None:
        for fold, ended in self._ended.items():
            if ended:
                states, left, cut = zip(*ended, strict=True)
                features = torch.from_numpy(np.stack(states)).float()
                self.probe.observe(features, torch.tensor(left), torch.tensor(cut), fold)
                ended.clear()

"""A run's bert predictor while an engine decodes: collects samples until it has been trained, then predicts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from infsample_rl.rollout.length_prediction.bert import BertLengthPredictor
from infsample_rl.rollout.length_prediction.messages import PublishedBert, SampledLengths
from infsample_rl.rollout.length_prediction.run_bert import restored, text_of
from infsample_rl.rollout.schedule.prompt_group import Predict, PromptGroup, Sample


class BertWatch:
    """What DecodeLoop and SamplingEngine ask of a ProbeWatch, for a predictor that reads prefixes alone."""

    is_used = False  # samples wait with their prefix for `predict`, not for what is found in rows

    def __init__(self, prefix_tokens: int, device: torch.device) -> None:
        self._k, self._device = prefix_tokens, device
        self._bert: BertLengthPredictor | None = None  # before it has been trained
        self._seen: dict[PromptGroup, list[tuple[int, list[int], int, bool]]] = {}
        self.seconds_spent = 0.0

    @property
    def predict(self) -> Predict | None:
        """None while all lengths count as equal."""
        return None if self._bert is None else self._predict

    def load(self, published: PublishedBert) -> None:
        """Predict with this from now on. What was not reported before it is of a step that was given up."""
        self._seen = {}
        trained = published.trained
        self._bert = None if trained is None else restored(trained, self._k, self._device)

    def prepare(self) -> None:
        """Nothing is learnt between streams."""

    def begin(self, groups: Sequence[PromptGroup], settings: Any, *, step: int) -> None:
        """Nothing is kept of a stream's settings."""

    def launch(self, hidden: torch.Tensor, rows: Sequence[Any]) -> None:
        """Hidden states are not read."""

    def read(self, moment: Any) -> None:
        """Nothing is due: launch() gives none."""

    def ended(self, sample: Sample, length: int, *, cut: bool) -> None:
        """A sample has ended with `length` tokens; `cut`: at max_new_tokens."""
        if self._bert is None:
            said = (sample.sample_index, list(sample.tokens[: self._k]), length, cut)
            self._seen.setdefault(sample.group, []).append(said)

    def report(self) -> list[SampledLengths]:
        """The samples since the last report."""
        seen, self._seen = self._seen, {}
        return [SampledLengths(group.prompt_index, group.prompt_ids, samples) for group, samples in seen.items()]

    def _predict(self, prompt_ids: list[int], prefixes: list[list[int]]) -> list[float]:
        assert self._bert is not None
        started = time.perf_counter()
        lengths = self._bert.predict(text_of(prompt_ids), [text_of(prefix) for prefix in prefixes])
        self.seconds_spent += time.perf_counter() - started
        return lengths

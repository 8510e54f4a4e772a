"""Where an engine's predictions of lengths come from: its length probe, a BERT, or nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from infsample_rl.config.rollout import PREDICTED_SCHEDULES, RolloutConfig
from infsample_rl.rollout.length_prediction.bert import BertLengthPredictor
from infsample_rl.rollout.length_prediction.bert_watch import BertWatch
from infsample_rl.rollout.length_prediction.watch import ProbeWatch
from infsample_rl.rollout.schedule.prompt_group import Predict
from infsample_rl.types import MaybeNone

Watch = ProbeWatch | BertWatch  # what learns lengths from the samples as they are drawn


class LengthSource:
    """Predictors of one engine."""

    def __init__(
        self,
        config: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        hidden_size: int,
        *,
        shared: bool,
    ) -> None:
        """`device`: of predictors. `hidden_size`: of the states that a probe reads. `shared`: what learns belongs to a
        run; an engine alone trains no bert, and takes lengths as equal."""
        self._bert: BertLengthPredictor | None = None
        self._predict = self._load(config, tokenizer, device)
        self.watch: Watch | MaybeNone = None  # with what learns while the run samples
        if config.probes:
            self.watch = ProbeWatch(hidden_size, config, shared=shared)
        elif shared and config.trains_bert:
            self.watch = BertWatch(config.num_prefix_tokens, device)

    @property
    def predict(self) -> Predict | None:
        """Lengths from a prompt and prefixes of its samples; None: nobody predicts them so, or not yet."""
        return self.watch.predict if isinstance(self.watch, BertWatch) else self._predict

    @property
    def seconds_spent(self) -> float:
        """Spent on predicting so far, and on learning to."""
        of_watch = 0.0 if self.watch is None else self.watch.seconds_spent
        return of_watch if self._bert is None else of_watch + self._bert.seconds_spent

    def waits_for_probe(self, config: RolloutConfig) -> bool:
        """Whether samples decode a prefix and wait for the probe. Not before it has learnt, nor while it is of no
        use."""
        return config.probes and config.num_prefix_tokens > 0 and self.watch is not None and self.watch.is_used

    def _load(self, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> Predict | None:
        if config.schedule not in PREDICTED_SCHEDULES or config.predictor != "bert":
            return None
        if config.predictor_path is None:
            return lambda prompt_ids, prefixes: [1.0] * len(prefixes)
        self._bert = bert = BertLengthPredictor.load(config.predictor_path, device)
        decode: Callable[[list[int]], Any] = tokenizer.decode  # a str, for one list of ids
        return lambda prompt_ids, prefixes: bert.predict(decode(prompt_ids), [decode(prefix) for prefix in prefixes])

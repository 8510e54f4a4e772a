"""Rows in, gradients accumulated under one policy version.

With one update per batch the old log-probabilities are the learner's own, detached, so the ratio is exactly 1; with
several they are the learner's own from its first pass over a row. What the engine reported for the same tokens is
compared with them, and a difference that rounding cannot explain stops the run.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor

from infsample_rl.config import Config
from infsample_rl.learner.backend import Backend
from infsample_rl.learner.loss import loss_denominator, loss_scale, policy_loss
from infsample_rl.learner.reference import ReferencePolicy
from infsample_rl.learner.row_plan import split_passes
from infsample_rl.learner.update_sums import UpdateSums, check_finite, check_tokens
from infsample_rl.model.logprobs import TokenScores
from infsample_rl.model.packing import PackedRow, ReferenceScores, pack_prompt, pack_row, pack_samples
from infsample_rl.model.shared_prompt import SharedPrompt
from infsample_rl.observe.phases import phase
from infsample_rl.types import LossTotals, TrainingSample

PassId = tuple[int, int]  # a row's row_id, and the number of the pass in it


class RowTrainer:
    """Forward and backward of one rank's rows, and what they add up to until the next update."""

    backend: Backend  # set before the first row, as is
    reference: ReferencePolicy | None

    def __init__(self, config: Config) -> None:
        self.config = config
        self.objective = dataclasses.replace(config.objective, importance=config.importance)
        self.device = torch.device("cuda" if config.cluster.learner_gpus > 0 else "cpu")
        self.num_updates = 0  # updates done, skipped ones included
        self.provisional: LossTotals | None = None
        self.sums = UpdateSums()
        self.old_logprobs: dict[PassId, Tensor] = {}  # of this step's rows, where there are several updates
        self._loss_scale = loss_scale(config)

    def accumulate(
        self, samples: list[TrainingSample] | None, totals: LossTotals, row_id: int | None = None
    ) -> dict[str, int]:
        """Forward and backward of one row, in the passes it takes. None: a row of weight zero, so that this rank's
        collectives match.

        `totals` may be provisional but must stay the same until step(), which is given the real ones. `row_id`: the
        row's number in the step, where there are several updates: its log-probabilities are kept for the passes that
        follow. RuntimeError for a non-finite loss, or for log-probabilities that differ from the engine's by more than
        rounding.
        """
        if self.provisional not in (None, totals):
            raise ValueError(f"totals must stay the same until step(): got {totals} after {self.provisional}")
        self.provisional = totals
        self.sums.denominator = loss_denominator(self.objective, totals)
        if not samples:
            dummy = dummy_row(self.device)
            self._reference_scores(dummy, None)
            logprobs = self._forward(dummy)[0]
            with phase("backward"):
                self.backend.backward(logprobs.sum() * 0.0)
            return {"samples": 0, "row_tokens": 0}
        passes, tokens = self._split(samples), 0
        shared: SharedPrompt | None = None
        if len(passes) > 1:
            prompt = pack_prompt(samples[0].prompt_ids, self.device)
            self._forward(prompt)
            shared = prompt.cuts.shared
        for number, part in enumerate(passes):
            tokens += self._accumulate_pass(part, shared, totals, None if row_id is None else (row_id, number))
        if shared is not None:
            tokens += shared.num_tokens
            with phase("backward"):
                self.backend.backward(shared.gradient_carrier())
        return {"samples": len(samples), "row_tokens": tokens}

    def _accumulate_pass(
        self, samples: list[TrainingSample], shared: SharedPrompt | None, totals: LossTotals, pass_id: PassId | None
    ) -> int:
        """Forward and backward of a row, or of some responses of one whose prompt has been run. Returns its tokens."""
        row = pack_samples(samples, self.device, shared)
        reference = row.reference
        if self.reference is not None:
            reference = self._reference_scores(
                row.row if shared is None else pack_samples(samples, self.device).row, pass_id
            )
        scored = row.row if reference is None else dataclasses.replace(row.row, others=reference.ids)
        logprobs, entropy, _, likely = self._forward(scored)
        old = logprobs.detach()
        if pass_id is not None:
            old = self.old_logprobs.setdefault(pass_id, old)
        loss, metrics = policy_loss(
            logprobs,
            old,
            row.advantages,
            row.row.sequence_ids,
            objective=self.objective,
            totals=totals,
            ref_logprobs=None if reference is None else reference.logprobs,
            likely=None if reference is None else (likely, reference.likely),
            engine_logprobs=row.engine_logprobs,
            entropy=entropy,
        )
        with phase("backward"):
            self.backend.backward(loss * self._loss_scale)
            # Checked after the backward pass: a rank that raised before it would leave the others waiting in its
            # collectives. Inside its phase: here the host waits for a GPU, whose work until now this is.
            value, update = loss.item(), self.num_updates + 1
            if self.config.learner.on_nonfinite == "stop":
                check_finite(samples, row, logprobs.detach(), value, update)
        if math.isfinite(value):
            check_tokens(self.config, samples, row, old, update)
            self.sums.add_row(value, metrics, totals.num_tokens, old, row.engine_logprobs, entropy)
        else:
            self.sums.num_nonfinite_rows += 1
        return row.row.input_ids.shape[1]

    @torch.no_grad()
    def remember(self, samples: list[TrainingSample] | None, row_id: int) -> None:
        """Keep a row's log-probabilities under the weights of now, before the step's first update changes them. None:
        as in accumulate."""
        if not samples:
            dummy = dummy_row(self.device)
            self._forward(dummy)
            self._reference_scores(dummy, None)
            return
        for number, part in enumerate(self._split(samples)):
            row = pack_samples(part, self.device).row
            self.old_logprobs[row_id, number] = self._forward(row)[0]
            self._reference_scores(row, (row_id, number))

    def _split(self, samples: list[TrainingSample]) -> list[list[TrainingSample]]:
        return split_passes(samples, self.config.learner.max_tokens_per_micro_batch)

    @phase("forward")
    def _forward(self, row: PackedRow) -> TokenScores:
        return self.backend.forward(row, self.config.rollout.temperature)

    def _reference_scores(self, row: PackedRow, pass_id: PassId | None) -> ReferenceScores | None:
        if self.reference is None:
            return None
        with phase("reference"):
            return self.reference.scores(row, pass_id)


def dummy_row(device: torch.device) -> PackedRow:
    """The shortest row there is."""
    return pack_row([(np.zeros(1, np.int32), [np.zeros(1, np.int32)])], device)

"""Samples packed into one row of tokens, without padding: learner and reference run the same rows.

Shape letters: T tokens of the row, R sampled response tokens, N responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infsample_rl.model.row_cuts import RowCuts, Segment, build_cuts
from infsample_rl.model.shared_prompt import SharedPrompt
from infsample_rl.types import ReferenceTokens, TrainingSample


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """One model call over prompts and their responses, or over a shared prompt alone, or over some of its responses.

    Example, prompt [5, 9, 7] with responses [11, 4] and [6]: input_ids [[5, 9, 7, 11, 4, 6]], position_ids [[0, 1, 2,
    3, 4, 3]], predictor_index [2, 3, 2], labels [11, 4, 6], sequence_ids [0, 0, 1], cuts of Segment(prompt=(0, 3),
    responses=[(3, 5), (5, 6)])
    """

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, every response goes on from its prompt
    cuts: RowCuts
    # [R] int64, the position whose hidden state predicts the token: the prompt's last for every first token. Behind a
    # shared prompt that one has the number 0 and position i of the row the number i + 1.
    predictor_index: Tensor
    labels: Tensor  # [R] int64, the response tokens; of a trajectory those that were sampled, not observed
    sequence_ids: Tensor  # [R] int64, 0..N-1, the response of each token
    others: Tensor | int = 0  # ids [R, K] int64 that are scored beside each label, or the number K of the likeliest


class ReferenceScores(NamedTuple):
    """What the reference says of R response tokens."""

    logprobs: Tensor  # [R] float32
    ids: Tensor  # [R, K] int64, its likeliest ids; K = 0 where nothing reads them
    likely: Tensor  # [R, K] float32, their log-probabilities


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """A packed row with what the loss needs for each of its R response tokens."""

    row: PackedRow
    advantages: Tensor  # [R] float32
    engine_logprobs: Tensor  # [R] float32
    reference: ReferenceScores | None  # None where the loss has no KL term and no teacher, or reads its own


def pack_row(
    groups: Sequence[tuple[np.ndarray, Sequence[np.ndarray]]],
    device: torch.device | str,
    shared: SharedPrompt | None = None,
    sampled: Sequence[np.ndarray] | None = None,
) -> PackedRow:
    """Pack (prompt ids, its responses' ids) groups into one row. ValueError for an empty prompt, group or response.

    `sampled`: for each response [tokens] bool, the tokens that are labels; None: all.

    `shared`: the one group's prompt, which has been run and is left out of the row: responses [11, 4] and [6] to 3
    prompt tokens have input_ids [[11, 4, 6]], position_ids [[3, 4, 3]], predictor_index [0, 1, 0].
    """
    tokens, positions, predictors, segments = [], [], [], []
    cursor, shift = 0, 0 if shared is None else 1
    masks = None if sampled is None else iter(sampled)
    labels, counts = [], []
    for prompt, responses in groups:
        if len(prompt) == 0 or not responses or any(len(response) == 0 for response in responses):
            lengths = [len(response) for response in responses]
            raise ValueError(
                f"cannot pack a prompt of {len(prompt)} tokens with responses of {lengths} tokens: none may be empty"
            )
        prompt_span, spans = (cursor, cursor + len(prompt)), []
        if shared is None:
            tokens.append(prompt)
            positions.append(np.arange(len(prompt)))
            cursor += len(prompt)
        last = cursor - 1 + shift
        for response in responses:
            end = cursor + len(response)
            spans.append((cursor, end))
            tokens.append(response)
            positions.append(np.arange(len(prompt), len(prompt) + len(response)))
            is_label = slice(None) if masks is None else next(masks)
            predictors.append(np.concatenate([[last], np.arange(cursor, end - 1) + shift])[is_label])
            labels.append(response[is_label])
            counts.append(len(labels[-1]))
            cursor = end
        segments.append(Segment(prompt=prompt_span, responses=spans))
    if 0 in counts:
        raise ValueError("cannot pack a response of which no token was sampled")
    of_responses = torch.tensor(counts, device=device)
    return PackedRow(
        input_ids=_ids(tokens, device)[None],
        position_ids=_ids(positions, device)[None],
        cuts=build_cuts(segments, device, shared),
        predictor_index=_ids(predictors, device),
        labels=_ids(labels, device),
        sequence_ids=torch.arange(len(counts), device=device).repeat_interleave(of_responses),
    )


def pack_prompt(prompt: np.ndarray, device: torch.device | str) -> PackedRow:
    """A prompt alone, as a row without labels; its cuts.shared is for the rows of its responses."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return PackedRow(
        input_ids=_ids([prompt], device)[None],
        position_ids=torch.arange(len(prompt), device=device)[None],
        cuts=build_cuts([Segment(prompt=(0, len(prompt)), responses=[])], device, SharedPrompt(len(prompt))),
        predictor_index=nothing,
        labels=nothing,
        sequence_ids=nothing,
    )


def pack_samples(
    samples: list[TrainingSample], device: torch.device | str, shared: SharedPrompt | None = None
) -> TrainingRow:
    """Pack training samples in their order; neighbours of one prompt share it. All or none have reference
    log-probabilities.

    `shared`: the prompt of them all, which has been run.
    """
    groups = [list(group) for _, group in groupby(samples, key=lambda sample: sample.prompt_index)]
    references = [sample.reference for sample in samples if sample.reference is not None]
    if len(references) not in (0, len(samples)):
        raise ValueError(
            f"{len(references)} of {len(samples)} samples of a row have reference log-probabilities: all or none must"
        )
    sampled = [sample.sampled for sample in samples]
    return TrainingRow(
        row=pack_row(
            [(group[0].prompt_ids, [sample.response_ids for sample in group]) for group in groups],
            device,
            shared,
            sampled,
        ),
        advantages=_floats([sample.token_advantages for sample in samples], device),
        engine_logprobs=_floats([sample.engine_logprobs[sample.sampled] for sample in samples], device),
        reference=_reference_scores(references, device) if references else None,
    )


def _reference_scores(references: Sequence[ReferenceTokens], device: torch.device | str) -> ReferenceScores:
    logprobs, ids, likely = zip(*references, strict=True)
    return ReferenceScores(_floats(logprobs, device), _ids(ids, device), _floats(likely, device))


def _ids(parts: Sequence[np.ndarray], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)


def _floats(parts: Sequence[np.ndarray], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(device)

"""Where the prompts and responses of a packed row lie, and how its attention is cut into calls.

Shape letters: T tokens of the row, P prompt tokens, N responses of a fold, L their (padded) length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from infsample_rl.model.block_mask import build_block_mask
from infsample_rl.model.shared_prompt import SharedPrompt
from infsample_rl.types import MaybeNone

# responses share a fold when the shortest has this share of the longest's tokens, so padding stays below 20 %
MIN_FILL = 0.8
# copied keys and values kept for the backward pass, in row lengths; above it the folds are recomputed
MAX_KEPT_COPIES = 2.0


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One prompt and its responses as half-open token spans of a row: Segment(prompt=(0, 3), responses=[(3, 5), (5,
    9)]).

    Where the prompt is shared it has a span of its own, from 0, and the responses count from 0 too.
    """

    prompt: tuple[int, int]
    responses: list[tuple[int, int]]

    @property
    def end(self) -> int:
        """Where the next segment begins."""
        return (self.responses or [self.prompt])[-1][1]


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Responses of one segment that attend in one SDPA call."""

    prompt: tuple[int, int]  # in the row, or in the shared prompt
    index: Tensor  # [N, L] row positions; short responses repeat their last position, whose copies are never read

    @cached_property
    def mask(self) -> Tensor:
        """[L, P + L] bool: all of the prompt, then the lower triangle. Made at first use: FlexAttention needs none, and
        it grows as L squared."""
        prompt, length = self.prompt[1] - self.prompt[0], self.index.shape[1]
        return torch.ones(length, prompt + length, dtype=torch.bool, device=self.index.device).tril_(prompt)


@dataclass(frozen=True, kw_only=True)
class RowCuts:
    """Where the prompts and responses of a row lie, with what its attention needs on its device, built once for all
    layers."""

    num_tokens: int
    segments: list[Segment]
    folds: list[Fold]
    order: Tensor  # [T] for each row position, its place in the concatenation of all prompt and fold outputs
    # recompute the folds in the backward pass instead of keeping their copies of the prompt's keys and values
    recompute: bool
    block_mask: BlockMask | None  # FlexAttention's mask, on CUDA only
    shared: SharedPrompt | MaybeNone = None  # what the row fills, if it is a prompt alone, or whose responses it has

    @property
    def reads_shared(self) -> bool:
        """Whether the prompt is in an earlier pass."""
        return self.shared is not None and bool(self.segments[0].responses)


def build_cuts(segments: list[Segment], device: torch.device | str, shared: SharedPrompt | MaybeNone = None) -> RowCuts:
    """Plan the attention of a row whose segments lie one after another; of one segment with a `shared` prompt, that or
    the responses."""
    num_tokens, reads_shared = segments[-1].end, shared is not None and bool(segments[-1].responses)
    visible_tokens = num_tokens + (shared.num_tokens if reads_shared else 0)
    folds = [
        _build_fold(segment.prompt, spans, device)
        for segment in segments
        for spans in _similar_lengths(segment, visible_tokens)
    ]
    copied = sum(fold.index.numel() + len(fold.index) * (fold.prompt[1] - fold.prompt[0]) for fold in folds)
    prompts = [] if reads_shared else [torch.arange(*segment.prompt) for segment in segments]
    positions = torch.cat(prompts + [fold.index.flatten().cpu() for fold in folds])
    order = torch.empty(num_tokens, dtype=torch.long)
    # Reversed: of a response's padding copies the first place, which is the real one, is written last.
    order[positions.flip(0)] = torch.arange(len(positions) - 1, -1, -1)
    block_mask = None
    if torch.device(device).type == "cuda":
        block_mask = build_block_mask(segments, num_tokens, device, visible_tokens - num_tokens)
    return RowCuts(
        num_tokens=num_tokens,
        segments=segments,
        folds=folds,
        order=order.to(device),
        recompute=copied > MAX_KEPT_COPIES * visible_tokens,
        block_mask=block_mask,
        shared=shared,
    )


def _similar_lengths(segment: Segment, num_tokens: int) -> list[list[tuple[int, int]]]:
    """Responses in groups of similar length whose copies of keys and values stay below num_tokens, so that G sets no
    memory."""
    groups: list[list[tuple[int, int]]] = []
    prompt_tokens = segment.prompt[1] - segment.prompt[0]
    for span in sorted(segment.responses, key=lambda span: (span[0] - span[1], span[0])):  # longest first
        length = groups[-1][0][1] - groups[-1][0][0] if groups else 0
        fits = groups and (len(groups[-1]) + 1) * (prompt_tokens + length) <= num_tokens
        if fits and span[1] - span[0] >= MIN_FILL * length:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _build_fold(prompt: tuple[int, int], spans: list[tuple[int, int]], device: torch.device | str) -> Fold:
    starts, ends = torch.tensor(spans).unbind(1)
    length = int((ends - starts).max())
    index = torch.minimum(starts[:, None] + torch.arange(length), ends[:, None] - 1)
    return Fold(prompt=prompt, index=index.to(device))

"""FlexAttention's mask of a packed row, from the spans of its prompts and responses: no T x V tensor is made.

Shape letters: T tokens of the row, V keys that it sees (a shared prompt's come before its own), Q and K their blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # tokens; FlexAttention's own choice


def build_block_mask(
    segments: Sequence[Any], num_tokens: int, device: torch.device | str, shared_tokens: int = 0
) -> BlockMask:
    """The mask of row_cuts.Segments that lie one after another: causal, inside the segment, and of responses only the
    query's own. With `shared_tokens` every query sees so many keys of a shared prompt before those of the row."""
    spans = visible_spans(segments, num_tokens, shared_tokens)
    partial, full = _blocks(spans, shared_tokens + num_tokens)
    counts, indices, full_counts, full_indices = (
        torch.from_numpy(array)[None, None].to(device) for dense in (partial, full) for array in _ordered(dense)
    )
    return BlockMask.from_kv_blocks(
        counts,
        indices,
        full_counts,
        full_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_function(torch.from_numpy(spans).to(device)),
        seq_lengths=(num_tokens, shared_tokens + num_tokens),
    )


def visible_spans(segments: Sequence[Any], num_tokens: int, shared_tokens: int = 0) -> np.ndarray:
    """int32 [4, T]: what a query sees are the keys from row 0 to before row 1, its prompt's, and those from row 2 to
    before row 3, its own part up to itself. A prompt's token has no keys of the first kind."""
    spans = np.zeros((4, num_tokens), dtype=np.int32)
    spans[3] = np.arange(1, num_tokens + 1) + shared_tokens
    for segment in segments:
        if not shared_tokens:
            spans[2, slice(*segment.prompt)] = segment.prompt[0]
        prompt = (0, shared_tokens) if shared_tokens else segment.prompt
        for start, end in segment.responses:
            spans[:3, start:end] = np.array([*prompt, shared_tokens + start])[:, None]
    return spans


def mask_function(spans: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask_mod of visible_spans()."""
    first, behind, own, place = spans.unbind()

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        of_prompt = (key >= first[query]) & (key < behind[query])
        return of_prompt | ((key >= own[query]) & (key < place[query]))

    return visible


def _blocks(spans: np.ndarray, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """bool [Q, K] twice: blocks of queries and keys of which some pairs are visible, and all."""
    starts = np.arange(0, num_keys, BLOCK)
    partial, full = (np.zeros((-(-spans.shape[1] // BLOCK), len(starts)), dtype=bool) for _ in range(2))
    for number in range(len(partial)):  # one at a time: all together would take T x K numbers
        queries = spans[:, number * BLOCK : (number + 1) * BLOCK, None]
        of_prompt, own = (
            np.minimum(queries[row + 1], starts + BLOCK) - np.maximum(queries[row], starts) for row in (0, 2)
        )
        seen = of_prompt.clip(0) + own.clip(0)  # [queries, K] visible keys
        full[number] = (seen == BLOCK).all(0) & (len(seen) == BLOCK)
        partial[number] = seen.any(0) & ~full[number]
    return partial, full


def _ordered(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int32 [Q] and [Q, K]: how many blocks of keys a block of queries has, and which, those first."""
    return dense.sum(1, dtype=np.int32), np.argsort(~dense, axis=1, kind="stable").astype(np.int32)

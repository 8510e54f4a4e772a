"""What a decode step leaves of its rows, in one launch: what was drawn, for the host, and where the rows are now."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _advance_kernel(
    drawn, probs, sampling_probs, kept_tokens, kept_probs, kept_sampling_probs, tokens, positions, lengths, has_sample,
    num_rows, PAD: tl.constexpr,
):  # fmt: skip
    """One program: all rows [R]."""
    row = tl.arange(0, PAD)
    live = row < num_rows
    token = tl.load(drawn + row, mask=live, other=0)
    tl.store(kept_tokens + row, token, mask=live)
    tl.store(tokens + row, token, mask=live)
    tl.store(kept_probs + row, tl.load(probs + row, mask=live, other=0.0).to(tl.float64), mask=live)
    if sampling_probs is not None:
        tl.store(kept_sampling_probs + row, tl.load(sampling_probs + row, mask=live, other=0.0), mask=live)
    position = tl.load(positions + row, mask=live, other=0) + tl.load(has_sample + row, mask=live, other=0)
    tl.store(positions + row, position, mask=live)
    tl.store(lengths + row, tl.maximum(position + 1, 1).to(tl.int32), mask=live)


def advance(
    drawn: tuple[Tensor, Tensor, Tensor | None],
    kept: tuple[Tensor, Tensor, Tensor | None],
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Copy `drawn`, tokens int64 [R] and probabilities float32 and float64 [R], to `kept`, whose probabilities are
    float64; and bring `rows` on by a token: tokens, positions, lengths (int32), has_sample, as RowBatch.move_on."""
    num_rows = len(drawn[0])
    _advance_kernel[(1,)](*drawn, *kept, *rows, num_rows, PAD=triton.next_power_of_2(num_rows), num_warps=1)

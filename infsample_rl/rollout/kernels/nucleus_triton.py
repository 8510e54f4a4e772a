"""The cut of top_p in one launch. The file needs Triton, so it is imported only where a draw is to run in it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of two bits each. By a count of instructions 30 passes of one bit read for longer, and 10 of three bits, with seven
# sums, add for longer.
PASSES = 15
BLOCK, WARPS = 4096, 16  # numbers at a time; a row has a multiprocessor to itself


@triton.jit
def _nucleus_kernel(probs, cutoffs, top_p, size, PASSES: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): the cutoff's next two bits in every pass, by the sums of the row from each of three trial numbers
    on."""
    row = tl.program_id(0).to(tl.int64)
    numbers, place = probs + row * size, tl.arange(0, BLOCK)
    bits = tl.full([], 0, tl.int32)
    for step in range(PASSES):
        shift = 2 * (PASSES - 1 - step)
        first = (bits | (1 << shift)).to(tl.float32, bitcast=True)
        second = (bits | (2 << shift)).to(tl.float32, bitcast=True)
        third = (bits | (3 << shift)).to(tl.float32, bitcast=True)
        from_first = tl.zeros([BLOCK], tl.float32)
        from_second = tl.zeros([BLOCK], tl.float32)
        from_third = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, size, BLOCK, num_stages=3):
            index = start + place
            number = tl.load(numbers + index, mask=index < size, other=0.0)
            from_first += tl.where(number >= first, number, 0.0)
            from_second += tl.where(number >= second, number, 0.0)
            from_third += tl.where(number >= third, number, 0.0)
        # a sum is no larger from a larger number on: so many trials reach top_p as the two bits say
        reached = (tl.sum(from_first, axis=0) >= top_p).to(tl.int32)
        reached += (tl.sum(from_second, axis=0) >= top_p).to(tl.int32)
        reached += (tl.sum(from_third, axis=0) >= top_p).to(tl.int32)
        bits |= reached << shift
    tl.store(cutoffs + row, bits.to(tl.float32, bitcast=True))


SCHEMA = "(Tensor probs, float top_p) -> Tensor"


@torch.library.custom_op("infsample_rl::nucleus_cutoff", mutates_args=(), schema=SCHEMA)
def nucleus_cutoff(probs: Tensor, top_p: float) -> Tensor:
    """As sampler.nucleus_cutoff, for contiguous probs; sums are added in another order, the same for every row in any
    company. An operator, so that torch.compile takes it as it is."""
    num_rows, size = probs.shape
    cutoffs = torch.empty(num_rows, 1, dtype=torch.float32, device=probs.device)
    _nucleus_kernel[(num_rows,)](probs, cutoffs, top_p, size, PASSES=PASSES, BLOCK=BLOCK, num_warps=WARPS)
    return cutoffs


@nucleus_cutoff.register_fake
def _(probs: Tensor, top_p: float) -> Tensor:
    return probs.new_empty(probs.shape[0], 1)

"""Algorithm 2 of the paper: samples in groups of near equal predicted length, and the KV that such groups may hold."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from numbers import Real


class PredictedKV:
    """The KV budget of `fptas` and `infinite`, counted in predicted tokens.

    The paper wants "the total cost in each bin" below "a predefined memory threshold" and promotes samples "if they fit
    the current memory profile". A slot decodes its bin one sample after another and gives each one's KV back, so what a
    bin takes is its longest sample, never the sum, and what decodes together is one sample of each slot. Hence: a bin
    whose longest sample is above the budget is refused, and a sample that does not fit beside those decoding is passed
    over for the next in line. Nothing waits for ever: where no sample of the group decodes, any one fits. Predictions
    may be wrong; the pool itself is kept within bounds by the planner.
    """

    def __init__(self, lengths: Sequence[float], budget: float = math.inf, bins: Sequence[Sequence[int]] = ()) -> None:
        """Raises ValueError for a bin above `budget` tokens, prompt not counted."""
        self._lengths, self._budget = lengths, budget
        self._running: set[int] = set()
        for number, samples in enumerate(bins):
            load = max((lengths[index] for index in samples), default=0)
            if load > budget:
                smallest = f"the least that works is {math.ceil(max(lengths))}"
                raise ValueError(
                    f"bin {number} takes {load:g} predicted KV tokens, above kv_budget_tokens = {budget:g} without "
                    f"prompt; {smallest}"
                )

    def start(self, index: int) -> bool:
        """Count sample `index` in, if it fits now. Summed anew each time: a running difference of floats would never
        return to 0."""
        if self._budget < math.inf:
            if math.fsum(self._lengths[other] for other in (*self._running, index)) > self._budget:
                return False
            self._running.add(index)
        return True

    def end(self, index: int) -> None:
        """Sample `index` has given its KV back."""
        self._running.discard(index)


def check_predictions(lengths: Sequence[float], name: str = "lengths") -> None:
    """Raise ValueError for a predicted length that is no number of tokens: NaN, None, infinite, zero... `name`: what
    they are called."""
    for index, length in enumerate(lengths):
        if not (isinstance(length, Real) and 0 < length <= sys.float_info.max):
            raise ValueError(
                f"{name} must be finite and > 0 tokens, got {length} for sample {index}; the smallest that makes sense "
                "is 1"
            )


def fptas_groups(lengths: Sequence[float], num_groups: int, epsilon: float) -> list[list[int]]:
    """Algorithm 2: assign samples to `num_groups` groups of near equal total length; each group in its decoding order.

    fptas_groups([6, 5, 4, 3, 2], 2, 0.1) -> [[0, 2], [1, 3, 4]] (loads 10 and 10)

    As the paper has it this is first-fit-decreasing on rounded lengths, with no (1 + epsilon) guarantee, and it drops a
    sample that fits in no group; here such a sample goes to the least loaded one. Raises ValueError for no lengths,
    lengths that are not finite and positive, no groups, epsilon not above 0.
    """
    if len(lengths) == 0:
        raise ValueError("lengths must be positive and at least one, got none")
    check_predictions(lengths)
    lengths = [float(length) for length in lengths]
    if num_groups < 1 or not 0 < epsilon < math.inf:
        raise ValueError(f"num_groups must be >= 1 and epsilon > 0, got {num_groups} and {epsilon}")
    unit = epsilon * sum(lengths) / num_groups
    if not (0 < unit < math.inf and max(lengths) / unit < math.inf):
        raise ValueError(
            f"lengths from {min(lengths):g} to {max(lengths):g} tokens cannot be rounded to units of {unit:g}"
        )
    rounded = [math.ceil(length / unit) for length in lengths]
    capacity = math.ceil(sum(rounded) / num_groups)
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads = [0] * num_groups
    for index in sorted(range(len(lengths)), key=lambda i: -rounded[i]):
        fitting = [group for group in range(num_groups) if loads[group] + rounded[index] <= capacity]
        group = fitting[0] if fitting else min(range(num_groups), key=lambda g: loads[g])
        groups[group].append(index)
        loads[group] += rounded[index]
    return groups

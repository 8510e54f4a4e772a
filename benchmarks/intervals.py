"""Bootstrap intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the bounds of its 95 % interval over prompts."""

    value: float
    low: float
    high: float


def bootstrap(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0, resamples: int = 2000
) -> Interval | None:
    """sum(numerators) / sum(denominators) with the 2.5 and 97.5 % quantiles over prompts drawn with replacement (Efron
    1979).

    One entry a prompt: a mean over samples has sums and counts, a mean over prompts values and ones, a ratio of totals
    both totals. None when the denominators sum to 0. Draws in which they do are left out.
    """
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    if bottom.sum() == 0:
        return None
    drawn = np.random.default_rng(seed).integers(len(top), size=(resamples, len(top)))
    above, below = top[drawn].sum(1), bottom[drawn].sum(1)
    low, high = np.quantile(above[below > 0] / below[below > 0], [0.025, 0.975])
    return Interval(float(top.sum() / bottom.sum()), float(low), float(high))

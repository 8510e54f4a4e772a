"""How often prompts are right, as a Beta distribution fitted to counts: shares of groups with signal for a G that was
not recorded. NumPy only.

A prompt's probability p of a right sample is drawn from Beta(a, b), and c of its n recorded samples are then right with
the beta-binomial probability C(n, c) B(a + c, b + n - c) / B(a, b) (Skellam 1948). a and b are those of a grid with the
largest likelihood; intervals are from prompts drawn anew with replacement and fitted again. An assumption about the
policy: where a share is a recorded one, prefer it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infsample_rl.rollout.length_prediction.accuracy import Interval

MEANS = np.geomspace(1e-4, 0.9, 120)  # a / (a + b)
TOTALS = np.geomspace(0.1, 1000, 80)  # a + b


@dataclass(frozen=True, slots=True)
class BetaFit:
    """Beta(a, b) by its mean and a + b, and how often it or another was the best one of resampled prompts."""

    mean: float
    total: float
    resampled: list[tuple[float, float]]  # (mean, total) of each resample

    def share(self, group_size: int) -> Interval:
        """Share of groups of that size with right and wrong samples, and its 95 % interval."""
        low, high = np.quantile([_share(mean, total, group_size) for mean, total in self.resampled], [0.025, 0.975])
        return Interval(_share(self.mean, self.total, group_size), float(low), float(high))

    def right_counts(self, samples: int) -> np.ndarray:
        """[samples + 1] probabilities of that many right ones among `samples` of one random prompt (beta-binomial)."""
        a, b = (np.array([part * self.total]) for part in (self.mean, 1 - self.mean))
        rises = [(_log_rises(a, right) + _log_rises(b, samples - right))[0] for right in range(samples + 1)]
        ways = [
            math.lgamma(samples + 1) - math.lgamma(right + 1) - math.lgamma(samples - right + 1)
            for right in range(samples + 1)
        ]
        return np.exp(np.array(ways) + np.array(rises) - _log_rises(np.array([self.total]), samples)[0])


def fit_beta(counts: Sequence[tuple[int, int]], resamples: int = 400, seed: int = 0) -> BetaFit:
    """Fit to (samples, right) of every prompt. ValueError when no sample at all is right or all are: then nothing can
    be fitted."""
    if sum(right for _, right in counts) in (0, sum(samples for samples, _ in counts)):
        raise ValueError(
            f"a Beta distribution needs right and wrong samples, got {len(counts)} prompts with one kind alone"
        )
    kinds = sorted(set(counts))
    likelihoods = np.array([_log_likelihood(samples, right) for samples, right in kinds])  # [kinds, grid]
    kind_of = np.array([kinds.index(count) for count in counts])
    generator = np.random.default_rng(seed)
    drawn = [kind_of] + [kind_of[generator.integers(len(counts), size=len(counts))] for _ in range(resamples)]
    best = [_at(int(np.argmax(np.bincount(kind, minlength=len(kinds)) @ likelihoods))) for kind in drawn]
    return BetaFit(*best[0], resampled=best[1:])


def _at(place: int) -> tuple[float, float]:
    row, column = divmod(place, len(TOTALS))
    return float(MEANS[row]), float(TOTALS[column])


def _log_likelihood(samples: int, right: int) -> np.ndarray:
    """Of one prompt at every (mean, total) of the grid, flat, without the binomial coefficient, which is the same for
    all."""
    mean, total = (part.ravel() for part in np.meshgrid(MEANS, TOTALS, indexing="ij"))
    return (
        _log_rises(mean * total, right) + _log_rises((1 - mean) * total, samples - right) - _log_rises(total, samples)
    )


def _log_rises(start: np.ndarray, steps: int) -> np.ndarray:
    """log of start (start + 1) ... (start + steps - 1)."""
    return np.log(start[:, None] + np.arange(steps)).sum(1)


def _share(mean: float, total: float, group_size: int) -> float:
    whole = _log_rises(np.array([total]), group_size)
    alike = [_log_rises(np.array([part * total]), group_size) - whole for part in (mean, 1 - mean)]
    return float(1 - sum(np.exp(value)[0] for value in alike))

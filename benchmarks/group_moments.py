"""Moments of a group's gradient over all ways to draw the group from a prompt's samples, worked out exactly.

Draws are without replacement: an unbiased estimate of what fresh samples of the policy would give (a U-statistic,
Hoeffding 1948). With rewards 0 and 1 a group with k right samples of G has the gradient g = w(k) (mean right score -
mean wrong score), where a score is the gradient of one response's mean log-probability (objective grpo, on policy,
ratio 1) and w(k) = k / G x the advantage of a right sample.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infsample_rl.learner.advantage import group_advantages

Floats = NDArray[np.float64]
KINDS = ("std", "mean_only")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt's samples: how many are right, and inner products of their scores; 0 where there are too few to
    say."""

    samples: int
    right: int
    right_norm: float = 0.0  # mean |s|^2 over right samples
    right_pair: float = 0.0  # mean <s, s'> over pairs of different right samples
    cross: float = 0.0  # mean <s, s'> of a right and a wrong one
    wrong_norm: float = 0.0
    wrong_pair: float = 0.0

    @classmethod
    def of(cls, samples: int, right: int, scores: Floats) -> Prompt:
        """`scores` [n, D]: those of all `right` right samples, then of some wrong ones."""
        gram = scores @ scores.T
        right_norm, right_pair = _norm_and_pair(gram[:right, :right])
        wrong_norm, wrong_pair = _norm_and_pair(gram[right:, right:])
        return cls(
            samples=samples,
            right=right,
            right_norm=right_norm,
            right_pair=right_pair,
            cross=float(gram[:right, right:].mean()),
            wrong_norm=wrong_norm,
            wrong_pair=wrong_pair,
        )


def _norm_and_pair(gram: Floats) -> tuple[float, float]:
    """Mean of the diagonal and of the rest."""
    count, diagonal = len(gram), float(np.trace(gram))
    return diagonal / count, (float(gram.sum()) - diagonal) / max(1, count * (count - 1))


def right_counts(samples: int, right: int, group_size: int) -> Floats:
    """[G + 1] probabilities of k right ones among `group_size` of `samples`, `right` of which are right
    (hypergeometric)."""
    ways = math.comb(samples, group_size)
    counts = range(group_size + 1)
    return np.array([math.comb(right, k) * math.comb(samples - right, group_size - k) / ways for k in counts])


def signal_share(samples: int, right: int, group_size: int) -> float:
    """Probability that a group holds right and wrong samples."""
    return float(right_counts(samples, right, group_size)[1:-1].sum())


@functools.cache
def right_weights(group_size: int, kind: str) -> Floats:
    """[G + 1] w(k), by objective.advantage `kind`."""
    weights = np.zeros(group_size + 1)
    for k in range(1, group_size):
        weights[k] = k / group_size * group_advantages([1.0] * k + [0.0] * (group_size - k), kind)[0]
    return weights


def mean_weight(prompt: Prompt, group_size: int, kind: str) -> float:
    """v with E g = v x (expected right score - expected wrong score)."""
    return float(right_counts(prompt.samples, prompt.right, group_size) @ right_weights(group_size, kind))


def second_moment(prompt: Prompt, group_size: int, kind: str) -> float:
    """E |g|^2 of one group of this prompt."""
    chances, weights = right_counts(prompt.samples, prompt.right, group_size), right_weights(group_size, kind)
    k = np.arange(1, group_size)
    right = (prompt.right_norm + (k - 1) * prompt.right_pair) / k
    wrong = (prompt.wrong_norm + (group_size - k - 1) * prompt.wrong_pair) / (group_size - k)
    return float(np.sum(chances[1:-1] * weights[1:-1] ** 2 * (right - 2 * prompt.cross + wrong)))


def true_weight(prompt: Prompt) -> float:
    """The weight of a group of endless samples with mean_only advantages: r (1 - r), unbiased."""
    return prompt.right * (prompt.samples - prompt.right) / (prompt.samples * (prompt.samples - 1))


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What one update's gradient is worth beside the true one: that of endless prompts with endless samples each, by
    mean_only advantages."""

    signal: float  # |mean|^2 / variance
    cosine: float  # of an update and the true gradient, the update's length in the root mean square
    direction: float  # cosine of the mean of many updates and the true gradient


def moments(prompts: Sequence[Prompt], group_size: int, kind: str) -> Floats:
    """[P, 3] of each prompt its mean weight, true weight and second moment."""
    return np.array(
        [
            (mean_weight(prompt, group_size, kind), true_weight(prompt), second_moment(prompt, group_size, kind))
            for prompt in prompts
        ]
    )


def quality(found: Floats, products: Floats, groups: float) -> Quality:
    """Of an update of so many groups, each of another prompt. `found`: moments(). `products` [P, P]: inner products of
    the prompts' (mean right score - mean wrong score); the diagonal, of a prompt with itself, is not used."""
    weights, true, of_groups = found.T
    mean_mean, mean_true, true_true = (
        _of_two_prompts(products, *pair) for pair in ((weights, weights), (weights, true), (true, true))
    )
    variance = (float(of_groups.mean()) - mean_mean) / groups
    return Quality(
        signal=mean_mean / variance,
        cosine=_cosine(mean_true, true_true, mean_mean + variance),
        direction=_cosine(mean_true, true_true, mean_mean),
    )


def _cosine(product: float, first: float, second: float) -> float:
    """Of an inner product and two squared lengths; not a number where an estimate of a length is not above 0."""
    return product / math.sqrt(first * second) if min(first, second) > 0 else math.nan


def _of_two_prompts(products: Floats, first: Floats, second: Floats) -> float:
    """Mean of first[p] x second[q] x products[p, q] over different prompts p and q."""
    count = len(first)
    whole = first @ products @ second - float(np.sum(first * second * np.diag(products)))
    return float(whole) / (count * (count - 1))

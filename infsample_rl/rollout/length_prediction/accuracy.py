"""How good predicted lengths are: error, rank correlation within a prompt's samples, bootstrap intervals over prompts.
NumPy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
CHUNK = 2_000_000  # resampled prompts held in memory at a time


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the bounds of its 95 % interval over prompts."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptAccuracy:
    """One prompt's samples: sums of errors over those that ended by themselves, and the order of all."""

    num_samples: int
    num_uncensored: int
    log_error: float  # sum of |log(predicted / length)| over uncensored samples
    token_error: float  # sum of |predicted - length| over uncensored samples
    tau: float | None  # Kendall's tau-b over all samples; None where the lengths have no order


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """All prompts together; None where no sample or no prompt says anything."""

    num_prompts: int
    num_samples: int
    num_uncensored: int
    log_error: Interval | None  # mean over uncensored samples
    token_error: Interval | None  # mean over uncensored samples, tokens
    tau: Interval | None  # mean over prompts


def kendall_tau(predicted: np.ndarray, lengths: np.ndarray) -> float | None:
    """Kendall's tau-b of two arrays [n] (Kendall 1945): (concordant - discordant) / sqrt(pairs untied in one x pairs
    untied in the other).

    0 where all predictions are equal, since they give no order; None where all lengths are: there is none to find.
    kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]) -> 0.667
    """
    first, second = (
        np.sign(np.subtract.outer(values, values))
        for values in (np.asarray(predicted, float), np.asarray(lengths, float))
    )
    untied_first, untied_second = np.abs(first).sum(), np.abs(second).sum()
    if untied_second == 0:
        return None
    return float((first * second).sum() / math.sqrt(untied_first * untied_second)) if untied_first else 0.0


def prompt_accuracy(predicted: Sequence[float], lengths: Sequence[int], censored: Sequence[bool]) -> PromptAccuracy:
    """Errors and order of one prompt's predictions (tokens). ValueError for predictions that are not finite and above
    0."""
    guesses, truth, ended = np.asarray(predicted, float), np.asarray(lengths, float), ~np.asarray(censored, bool)
    if not len(guesses) == len(truth) == len(ended):
        raise ValueError(
            f"predicted, lengths and censored must be equally long, got {len(guesses)}, {len(truth)} and {len(ended)}"
        )
    if not (np.isfinite(guesses).all() and (guesses > 0).all()):
        raise ValueError(f"predicted lengths must be finite and > 0, got {list(predicted)[:8]}")
    return PromptAccuracy(
        num_samples=len(guesses),
        num_uncensored=int(ended.sum()),
        log_error=float(np.abs(np.log(guesses[ended] / truth[ended])).sum()),
        token_error=float(np.abs(guesses[ended] - truth[ended]).sum()),
        tau=kendall_tau(guesses, truth) if len(guesses) > 1 else None,
    )


def summarize(prompts: Sequence[PromptAccuracy], seed: int = 0) -> Accuracy:
    """All prompts' accuracy, with bootstrap intervals over prompts."""
    counts = [prompt.num_uncensored for prompt in prompts]
    taus = [prompt.tau for prompt in prompts if prompt.tau is not None]
    return Accuracy(
        num_prompts=len(prompts),
        num_samples=sum(prompt.num_samples for prompt in prompts),
        num_uncensored=sum(counts),
        log_error=bootstrap([prompt.log_error for prompt in prompts], counts, seed),
        token_error=bootstrap([prompt.token_error for prompt in prompts], counts, seed),
        tau=bootstrap(taus, [1] * len(taus), seed),
    )


def bootstrap(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0, resamples: int = RESAMPLES
) -> Interval | None:
    """sum(numerators) / sum(denominators) with the 2.5 and 97.5 % quantiles over prompts drawn with replacement (Efron
    1979).

    One entry a prompt: a mean over samples has sums and counts, a mean over prompts values and ones, a ratio of totals
    both totals. None when the denominators sum to 0. Draws in which they do are left out.
    """
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    if bottom.sum() == 0:
        return None
    generator, ratios = np.random.default_rng(seed), []
    rows = max(1, CHUNK // len(top))
    for start in range(0, resamples, rows):
        drawn = generator.integers(len(top), size=(min(rows, resamples - start), len(top)))
        above, below = top[drawn].sum(1), bottom[drawn].sum(1)
        ratios.append(above[below > 0] / below[below > 0])
    low, high = np.quantile(np.concatenate(ratios), [0.025, 0.975])
    return Interval(float(top.sum() / bottom.sum()), float(low), float(high))

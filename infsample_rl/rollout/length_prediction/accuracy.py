"""How good predicted lengths are: errors, and rank correlation within a prompt's samples. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptAccuracy:
    """One prompt's samples: sums of errors over those that ended by themselves, and the order of all."""

    num_samples: int
    num_uncensored: int
    log_error: float  # sum of |log(predicted / length)| over uncensored samples
    token_error: float  # sum of |predicted - length| over uncensored samples
    tau: float | None  # Kendall's tau-b over all samples; None where the lengths have no order


def prompt_accuracy(predicted: Sequence[float], lengths: Sequence[int], censored: Sequence[bool]) -> PromptAccuracy:
    """Errors and order of one prompt's predictions (tokens)."""
    guesses, truth, ended = np.asarray(predicted, float), np.asarray(lengths, float), ~np.asarray(censored, bool)
    return PromptAccuracy(
        num_samples=len(guesses),
        num_uncensored=int(ended.sum()),
        log_error=float(np.abs(np.log(guesses[ended] / truth[ended])).sum()),
        token_error=float(np.abs(guesses[ended] - truth[ended]).sum()),
        tau=kendall_tau(guesses, truth),
    )


def mean_accuracy(prompts: Sequence[PromptAccuracy]) -> dict[str, float | None]:
    """log_error and token_error, means over uncensored samples, and tau, mean over prompts; None where nothing says
    it."""
    ended = sum(prompt.num_uncensored for prompt in prompts)
    taus = [prompt.tau for prompt in prompts if prompt.tau is not None]
    return {
        "log_error": sum(prompt.log_error for prompt in prompts) / ended if ended else None,
        "token_error": sum(prompt.token_error for prompt in prompts) / ended if ended else None,
        "tau": sum(taus) / len(taus) if taus else None,
    }


def kendall_tau(predicted: np.ndarray, lengths: np.ndarray) -> float | None:
    """Kendall's tau-b of two arrays [n] (Kendall 1945): (concordant - discordant) / sqrt(pairs untied in one x pairs
    untied in the other).

    0 where all predictions are equal, since they give no order; None where all lengths are: there is none to find.
    kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]) -> 0.667
    """
    first, second = (np.sign(np.subtract.outer(values, values)) for values in (predicted, lengths))
    untied_first, untied_second = np.abs(first).sum(), np.abs(second).sum()
    if untied_second == 0:
        return None
    return float((first * second).sum() / math.sqrt(untied_first * untied_second)) if untied_first else 0.0

"""How far the policy is from a reference, or from a teacher, at every token."""

from __future__ import annotations

import torch
from torch import Tensor

REST = 1e-6  # probability


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token estimates of KL(policy || reference), d = logprob - ref_logprob (Schulman, "Approximating KL
    divergence").

    k1 = d: unbiased, but its gradient is zero on average, so as a loss it only adds noise. k2 = d^2 / 2: the right
    gradient on policy. k3 = exp(-d) + d - 1: unbiased and never negative, GRPO's choice (arXiv 2402.03300, equation 4).
    """
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def likely_kl(policy: Tensor, teacher: Tensor, kind: str) -> Tensor:
    """KL [T] of two distributions from their log-probabilities [T, K] of the same K ids, all other ids taken as one:
    "reverse" KL(policy || teacher), "forward" KL(teacher || policy).

    Of all ids it is the whole KL; of fewer it is never more, and 0 where the two agree on each of the K (the log-sum
    inequality).
    """
    first, second = (policy, teacher) if kind == "reverse" else (teacher, policy)
    # Below REST float32 tells no rest from none: it counts as so much on both sides, without gradient.
    rests = [(1 - each.exp().sum(-1)).clamp(min=REST) for each in (first, second)]
    of_rest = rests[0] * (rests[0].log() - rests[1].log())
    return (first.exp() * (first - second)).sum(-1) + of_rest

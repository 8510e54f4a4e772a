"""What a group of G samples says, from recorded ones: shares with signal, and mean and variance of the gradient
estimate. NumPy only.

Everything here is an average over all ways to draw the group's samples, without replacement, from a prompt's recorded
n, worked out exactly and not by drawing. Such an average is an unbiased estimate of what fresh samples of the policy
would give (a U-statistic, Hoeffding 1948). With std advantages it needs G <= n. With mean_only ones all moments are
polynomials of degree 4 in k, so that four samples are enough for any G: E k (k-1) .. (k-i+1) m .. (m-j+1), with i
factors of k and j of m = G - k, is G .. (G-i-j+1) x a rate of the prompt.

With rewards 0 and 1 a group with k right samples of G has the gradient g = w(k) (mean right score - mean wrong score),
where a score is the gradient of one response's mean log-probability (objective grpo, on policy, ratio 1) and w(k) = k /
G x the advantage of a right sample. Letters: n recorded samples of a prompt, c of them right, G group size, k right
ones in the group, P prompts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infsample_rl.learner.advantage import group_advantages


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptMoments:
    """One prompt's recorded samples: how many are right, and inner products of their scores; 0 where there are too few
    to say.

    Example: PromptMoments(samples=256, right=3, right_norm=2.1, right_pair=0.9, cross=0.3, wrong_norm=1.6,
    wrong_pair=0.2)
    """

    samples: int  # n
    right: int  # c
    right_norm: float = 0.0  # mean |s|^2 over right samples
    right_pair: float = 0.0  # mean <s, s'> over pairs of different right samples
    cross: float = 0.0  # mean <s, s'> of a right and a wrong one
    wrong_norm: float = 0.0
    wrong_pair: float = 0.0

    @property
    def squared_difference(self) -> float:
        """|expected right score - expected wrong score|^2, unbiased and so sometimes below 0; 0 with fewer than two
        right ones."""
        return self.right_pair - 2 * self.cross + self.wrong_pair if self.right >= 2 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientMoments:
    """Of the gradient estimate of one group, prompts drawn at random; an update of M groups has 1 / M of both
    variances.

    Example: GradientMoments(weight=0.02, signal=0.01, prompt_signal=0.11, within=0.6)
    """

    # mean v over prompts, where v x (expected right score - expected wrong score) is the prompt's expected gradient
    weight: float
    signal: float  # |expected gradient over all prompts|^2
    prompt_signal: float  # mean over prompts of |the prompt's own expected gradient|^2
    within: float  # mean over prompts of the variance between groups of one prompt, summed over parameters

    @property
    def between(self) -> float:
        """Variance of the prompts' own expected gradients, summed over parameters."""
        return self.prompt_signal - self.signal

    def signal_to_noise(self, groups: float) -> float:
        """|mean|^2 / variance of the mean gradient of that many groups of different random prompts."""
        variance = self.within + self.between
        return groups * self.signal / variance if variance > 0 else 0.0

    def gain(self, groups: float) -> float:
        """The same per unit of what two prompts' (right - wrong) scores have in common, and of the variance within
        prompts alone.

        |mean|^2 is weight^2 times that common part, which is the same for every G: gains compare G where it is not
        known.
        """
        return groups * self.weight**2 / self.within if self.within > 0 else 0.0


def right_counts(samples: int, right: int, group_size: int) -> np.ndarray:
    """[G + 1] probabilities of k right ones among `group_size` of `samples`, `right` of which are right
    (hypergeometric)."""
    if not 0 <= right <= samples or not 1 <= group_size <= samples:
        raise ValueError(
            f"need 0 <= right <= samples and 1 <= group_size <= samples, got right={right}, group_size={group_size}, "
            f"samples={samples}"
        )
    logs = np.concatenate([[0.0], np.log(np.arange(1, samples + 1)).cumsum()])  # of factorials

    def log_ways(count: int, taken: np.ndarray) -> np.ndarray:
        return logs[count] - logs[taken] - logs[count - taken]

    k = np.arange(max(0, group_size - (samples - right)), min(right, group_size) + 1)
    chances = np.zeros(group_size + 1)
    chances[k] = np.exp(
        log_ways(right, k) + log_ways(samples - right, group_size - k) - log_ways(samples, np.array(group_size))
    )
    return chances


def signal_share(samples: int, right: int, group_size: int) -> float:
    """Probability that a group holds right and wrong samples: all others have advantage 0 throughout."""
    chances = right_counts(samples, right, group_size)
    return float(chances[1:-1].sum())


@functools.cache
def right_weights(group_size: int, kind: str) -> np.ndarray:
    """[G + 1] w(k) = k / G x a right sample's advantage in a group with k right ones, by objective.advantage `kind`."""
    weights = np.zeros(group_size + 1)
    for k in range(1, group_size):
        weights[k] = k / group_size * group_advantages([1.0] * k + [0.0] * (group_size - k), kind)[0]
    return weights


def has_moments(samples: int, group_size: int, kind: str) -> bool:
    """Whether `samples` recorded ones are enough for groups of that size."""
    return samples >= (4 if kind == "mean_only" else group_size)


def second_moment(prompt: PromptMoments, group_size: int, kind: str) -> float:
    """E |g|^2 of one group of this prompt."""
    if kind == "mean_only":
        return _mean_only_second_moment(prompt, group_size)
    chances, weights = right_counts(prompt.samples, prompt.right, group_size), right_weights(group_size, kind)
    k = np.arange(1, group_size)
    rest = group_size - k
    right = (prompt.right_norm + (k - 1) * prompt.right_pair) / k
    wrong = (prompt.wrong_norm + (rest - 1) * prompt.wrong_pair) / rest
    return float(np.sum(chances[1:-1] * weights[1:-1] ** 2 * (right - 2 * prompt.cross + wrong)))


def _mean_only_second_moment(prompt: PromptMoments, group_size: int) -> float:
    """The same with w(k) = k m / G^2, for any G."""
    one, two_right, two_wrong, two = (
        math.perm(group_size, i + j) * _rate(prompt, i, j) if group_size >= i + j else 0.0
        for i, j in ((1, 1), (2, 1), (1, 2), (2, 2))
    )
    right = prompt.right_norm * (two_wrong + one) + prompt.right_pair * (two + two_right)  # E k m^2 and E k (k-1) m^2
    wrong = prompt.wrong_norm * (two_right + one) + prompt.wrong_pair * (two + two_wrong)
    return (right - 2 * prompt.cross * (two + two_right + two_wrong + one) + wrong) / group_size**4


def _rate(prompt: PromptMoments, right: int, wrong: int) -> float:
    """Share of ordered draws of right + wrong samples in which first `right` right ones and then `wrong` wrong ones
    come."""
    ways = math.perm(prompt.right, right) * math.perm(prompt.samples - prompt.right, wrong)
    return ways / math.perm(prompt.samples, right + wrong)


def mean_weight(prompt: PromptMoments, group_size: int, kind: str) -> float:
    """v with E g = v x (expected right score - expected wrong score)."""
    if kind == "mean_only":
        return (group_size - 1) / group_size * _rate(prompt, 1, 1)
    return float(right_counts(prompt.samples, prompt.right, group_size) @ right_weights(group_size, kind))


def squared_mean(prompt: PromptMoments, group_size: int, kind: str) -> float:
    """|E g|^2 of this prompt: the mean inner product of two groups without a common sample.

    Where n < 2 G there are no two such groups with std, and v^2 takes the place of their mean product of weights (too
    large by v's variance).
    """
    if kind == "mean_only":
        return ((group_size - 1) / group_size) ** 2 * _rate(prompt, 2, 2) * prompt.squared_difference
    if 2 * group_size > prompt.samples:
        return mean_weight(prompt, group_size, kind) ** 2 * prompt.squared_difference
    chances, weights = right_counts(prompt.samples, prompt.right, group_size), right_weights(group_size, kind)
    product = 0.0
    for k in range(1, min(prompt.right, group_size) + 1):
        if chances[k] > 0:
            others = right_counts(prompt.samples - group_size, prompt.right - k, group_size)
            product += chances[k] * weights[k] * float(others @ weights)
    return product * prompt.squared_difference


def gradient_moments(
    prompts: Sequence[PromptMoments], products: np.ndarray, group_size: int, kind: str
) -> GradientMoments:
    """Signal and variance of one group's gradient over random prompts.

    products [P, P]: inner products of the prompts' (mean right score - mean wrong score); its diagonal is not read, so
    that the signal is unbiased too. ValueError for fewer than two prompts.
    """
    if len(prompts) < 2 or products.shape != (len(prompts), len(prompts)):
        raise ValueError(f"need at least 2 prompts and their products [P, P], got {len(prompts)} and {products.shape}")
    v = np.array([mean_weight(prompt, group_size, kind) for prompt in prompts])
    everyone = v @ products @ v - np.sum(v**2 * np.diag(products))
    signal = float(everyone) / (len(prompts) * (len(prompts) - 1))
    of_means = float(np.mean([squared_mean(prompt, group_size, kind) for prompt in prompts]))
    of_groups = float(np.mean([second_moment(prompt, group_size, kind) for prompt in prompts]))
    return GradientMoments(weight=float(v.mean()), signal=signal, prompt_signal=of_means, within=of_groups - of_means)


def pool(prompts: Sequence[PromptMoments]) -> PromptMoments:
    """Mean inner products of several prompts; each mean over the pairs of right ones counts as often as the prompt has
    such pairs.

    Its counts are sums and mean nothing by themselves.
    """
    pairs = [prompt.right * (prompt.right - 1) for prompt in prompts]
    return PromptMoments(
        samples=sum(prompt.samples for prompt in prompts),
        right=sum(prompt.right for prompt in prompts),
        right_norm=float(np.mean([prompt.right_norm for prompt in prompts])),
        right_pair=sum(count * prompt.right_pair for count, prompt in zip(pairs, prompts, strict=True))
        / max(1, sum(pairs)),
        cross=float(np.mean([prompt.cross for prompt in prompts])),
        wrong_norm=float(np.mean([prompt.wrong_norm for prompt in prompts])),
        wrong_pair=float(np.mean([prompt.wrong_pair for prompt in prompts])),
    )


def modelled_moments(
    chances: np.ndarray, pooled: PromptMoments, product: float, group_size: int, kind: str
) -> GradientMoments:
    """The same for prompts that have K right ones among 2 G samples with probability chances[K] and all have the inner
    products of `pooled`.

    product: mean inner product of (right score - wrong score) of two prompts. Two groups of G are what all moments
    need, so 2 G samples give them exactly.
    """
    prompts = [dataclasses.replace(pooled, samples=2 * group_size, right=right) for right in range(2 * group_size + 1)]
    weight, of_means, of_groups = (
        sum(
            chance * float(moment(prompt, group_size, kind))
            for chance, prompt in zip(chances, prompts, strict=True)
            if chance > 1e-12
        )
        for moment in (mean_weight, squared_mean, second_moment)
    )
    return GradientMoments(
        weight=weight, signal=weight**2 * product, prompt_signal=of_means, within=of_groups - of_means
    )


def leave_one_out(
    prompts: Sequence[PromptMoments], products: np.ndarray, group_size: int, kind: str
) -> list[GradientMoments]:
    """`gradient_moments` without each prompt in turn, for the jackknife."""
    found = []
    for place in range(len(prompts)):
        kept = [index for index in range(len(prompts)) if index != place]
        found.append(
            gradient_moments([prompts[index] for index in kept], products[np.ix_(kept, kept)], group_size, kind)
        )
    return found


def jackknife_error(values: Sequence[float]) -> float:
    """Standard error from the values found without each prompt in turn (Quenouille, Tukey)."""
    count = len(values)
    return math.sqrt((count - 1) / count * float(np.sum((np.asarray(values) - np.mean(values)) ** 2)))

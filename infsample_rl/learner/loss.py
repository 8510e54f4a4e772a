"""The GRPO family of losses over flat response tokens.

Shape letters: T response tokens of this call, N sequences (responses). The denominators are an argument (LossTotals of
the whole update), so any split of an update into calls sums to the same loss, metrics and gradient, as long as every
sequence is whole in one call.

Each loss is `sum over t of w_t (-c_t J_t + kl_coef KL_t - entropy_coef H_t)` with the policy ratio r_t = exp(logprob_t
- old_logprob_t), c_t the importance weight of `engine_weights` (1 with importance none), KL_t of `kl_estimate` and H_t
the entropy of the policy at t:

grpo     w_t = 1 / (num_sequences |o_i|), J_t = min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A): the mean over each
         response's tokens, then over the responses (the paper's equations 2-4; GRPO, arXiv 2402.03300, equation 3).
dr_grpo  the same J_t, w_t = 1 / (num_sequences length_normalizer): no bias towards long wrong answers (arXiv
         2503.20783).
dapo     the same J_t, w_t = 1 / num_tokens: every token weighs the same (arXiv 2503.14476, equation 8).
gspo     grpo with r_t replaced by the sequence ratio s_i = exp(mean over o_i of log r_t), through which the gradient
         goes: ds_i / dlogprob_t = s_i / |o_i| (arXiv 2507.18071, equations 5 and 7).
cispo    J_t = stop_gradient(min(r_t, 1 + clip_high)) A logprob_t, w_t = 1 / num_tokens: no token loses its gradient
         (MiniMax-M1, arXiv 2506.13585). One-sided, as in TRL, whose epsilon_high is 1 + clip_high; no clip_low.

A is reward_coef times the advantage that is given; with objective.distill_coef a token has distill_coef (ref_logprob_t
- old_logprob_t) beside it. On policy the second term's gradient is, in the mean, that of the exact KL(policy ||
teacher) at t (GKD, arXiv 2306.13649, with the reverse KL). With objective.distill_top_k the term is instead
distill_coef D_t in the loss, D_t the KL of `likely_kl` at t, which needs no sampling.

KL and entropy have the token weights w_t of the loss they stand in, as in verl. Log-ratios are not clamped, but for 80
where the clip bounds the token anyway. docs/objectives.md has a table of where TRL and verl differ from each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from infsample_rl.config import Config, ObjectiveConfig
from infsample_rl.learner.divergence import kl_estimate, likely_kl
from infsample_rl.types import LossTotals, MaybeNone

MOST_LOG_RATIO = 80.0  # whose exponential is finite in float32
SCALED_TOKENS = 4096


def loss_scale(config: Config) -> float:
    """What losses are multiplied by before the backward pass, and gradients divided by after it; 1 but in float16.

    A token's gradient is divided by the samples or tokens of the whole update, and would be below float16's smallest
    numbers in a large one (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2). The scale, a power of
    two, makes of it one of SCALED_TOKENS.
    """
    if config.model.dtype != "float16":
        return 1.0
    return 2.0 ** round(math.log2(max(1.0, config.samples_per_step * config.rollout.max_new_tokens / SCALED_TOKENS)))


def loss_denominator(objective: ObjectiveConfig, totals: LossTotals) -> float:
    """The one number every loss is divided by: sequences, sequences x length_normalizer (dr_grpo) or tokens (dapo,
    cispo)."""
    if objective.loss in ("dapo", "cispo"):
        return float(totals.num_tokens)
    if objective.loss == "dr_grpo":
        return float(totals.num_sequences) * totals.length_normalizer
    return float(totals.num_sequences)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    *,
    objective: ObjectiveConfig,
    totals: LossTotals,
    ref_logprobs: Tensor | MaybeNone = None,
    likely: tuple[Tensor, Tensor] | MaybeNone = None,
    engine_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Loss (to minimise) and metrics of some whole sequences; all tensors [T], sequence_ids[t] names the sequence of
    token t.

    Metrics are sums over these tokens divided by totals.num_tokens, so over all calls of an update they add to means:
    kl (the estimator chosen; of a distillation without a KL term k1 to the teacher, or D_t), clip_fraction (tokens
    whose gradient the clip removed, or capped in cispo), importance_mean (of the weights the loss was given),
    engine_weight and engine_weight_square (of `engine_weights`, for `effective_sample_size`). ref_logprobs is needed
    for a KL term and for distillation; `likely`, log-probabilities [T, K] of the teacher's likeliest ids by the policy,
    with gradient, and by the teacher, for objective.distill_top_k; engine_logprobs for importance weights; entropy
    (with gradient) for objective.entropy_coef > 0. ValueError when totals are empty.
    objective.importance=auto counts as none: whoever knows the run resolves it.
    """
    denominator = loss_denominator(objective, totals)
    if denominator <= 0 or totals.num_tokens <= 0:
        raise ValueError(f"the loss needs totals above zero, got {totals}")
    _, inverse, lengths = torch.unique(sequence_ids, return_inverse=True, return_counts=True)
    advantages = objective.reward_coef * advantages
    if objective.distills and objective.teacher_top_k == 0:
        advantages = advantages + objective.distill_coef * (ref_logprobs - old_logprobs.detach())
    log_ratio = logprobs - old_logprobs
    if objective.loss == "gspo":
        log_ratio = _sequence_sum(log_ratio, inverse, len(lengths))[inverse] / lengths[inverse]
    # Beyond the clip a token that is to be likelier has no gradient: an infinite ratio would make it NaN.
    log_ratio = torch.where(advantages >= 0, log_ratio.clamp(max=MOST_LOG_RATIO), log_ratio)
    token_objective, clipped = _clipped_objective(log_ratio.exp(), logprobs, advantages, objective)
    weights = engine_weights(old_logprobs, engine_logprobs, inverse, len(lengths), objective)
    importance = weights if objective.importance in ("token_tis", "sequence_tis") else torch.ones_like(weights)
    regularizer, kl = _regularizer(logprobs, ref_logprobs, likely, entropy, objective)
    token_loss = regularizer - importance * token_objective
    if objective.loss in ("grpo", "gspo"):
        token_loss = token_loss / lengths[inverse]
    sums = {
        "kl": kl,
        "clip_fraction": clipped,
        "importance_mean": importance,
        "engine_weight": weights,
        "engine_weight_square": weights.square(),
    }
    values = torch.stack([value.detach().sum(dtype=logprobs.dtype) for value in sums.values()]).tolist()
    metrics = {name: value / totals.num_tokens for name, value in zip(sums, values, strict=True)}
    return token_loss.sum() / denominator, metrics


def _regularizer(
    logprobs: Tensor,
    ref_logprobs: Tensor | MaybeNone,
    likely: tuple[Tensor, Tensor] | MaybeNone,
    entropy: Tensor | None,
    objective: ObjectiveConfig,
) -> tuple[Tensor, Tensor]:
    """kl_coef KL_t + distill_coef D_t - entropy_coef H_t, and KL_t (or D_t) of every token; zeros for terms that are
    not used."""
    total = kl = torch.zeros_like(logprobs)
    if objective.teacher_top_k > 0:
        kl = likely_kl(likely[0], likely[1], objective.distill_kl)
        total = total + objective.distill_coef * kl
    elif objective.distills:
        kl = kl_estimate(logprobs.detach(), ref_logprobs, "k1")
    if objective.kl_in_loss:
        kl = kl_estimate(logprobs, ref_logprobs, objective.kl)
        total = total + objective.kl_coef * kl
    if objective.entropy_coef > 0:
        if entropy is None or (logprobs.requires_grad and not entropy.requires_grad):
            raise ValueError(f"objective.entropy_coef={objective.entropy_coef} needs entropies with gradient")
        total = total - objective.entropy_coef * entropy
    return total, kl


def _clipped_objective(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, objective: ObjectiveConfig
) -> tuple[Tensor, Tensor]:
    """J_t of every token and whether the clip bound it."""
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    if objective.loss == "cispo":
        return ratio.clamp(max=high).detach() * advantages * logprobs, ratio > high
    unclipped, clipped = ratio * advantages, ratio.clamp(low, high) * advantages
    return torch.minimum(unclipped, clipped), ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))


def engine_weights(
    old_logprobs: Tensor,
    engine_logprobs: Tensor | None,
    inverse: Tensor,
    num_sequences: int,
    objective: ObjectiveConfig,
) -> Tensor:
    """Truncated importance weights min(exp(old - engine), importance_cap) [T], without gradient, for samples of another
    policy.

    The other policy is an engine that rounds differently, or one a step behind. Every token has its own ratio; with
    importance=sequence_tis all tokens of sequence `inverse[t]` have the product over it, not its mean (Yao et al.,
    "Your efficient RL framework secretly brings you off-policy RL training", 2025). Only the policy term is weighted,
    not KL and entropy. With importance none the loss does not use them, but their effective sample size is still told.
    engine_logprobs=None: ones.
    """
    if engine_logprobs is None:
        if objective.importance in ("token_tis", "sequence_tis"):
            raise ValueError(f"objective.importance={objective.importance} needs engine_logprobs, got None")
        return torch.ones_like(old_logprobs)
    log_weights = (old_logprobs - engine_logprobs).detach()
    if objective.importance == "sequence_tis":
        log_weights = _sequence_sum(log_weights, inverse, num_sequences)[inverse]
    return log_weights.exp().clamp(max=objective.importance_cap)


def effective_sample_size(weight_sum: float, square_sum: float, num_tokens: int) -> float:
    """Effective sample size as a share of the tokens: (sum w)^2 / (n sum w^2), 1 when all weights are equal (Kong
    1992).

    The sums are over all tokens, calls and ranks of an update. As in verl the weights are the truncated ones, and every
    token counts once, with sequence_tis too. 0 without any token.
    """
    return weight_sum**2 / (num_tokens * square_sum) if num_tokens and square_sum else 0.0


def _sequence_sum(values: Tensor, inverse: Tensor, num_sequences: int) -> Tensor:
    return values.new_zeros(num_sequences).index_add(0, inverse, values)


def engine_mismatch(logprobs: Tensor, engine_logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How far engine and learner are apart on the same tokens [T]: sum |d|, max |d| and sum of k3, d = learner -
    engine.

    k3 = exp(d) - d - 1 estimates KL(engine || learner), since the engine drew the tokens.
    """
    difference = (logprobs.detach() - engine_logprobs).double()
    return difference.abs().sum(), difference.abs().max(), (torch.expm1(difference) - difference).sum()

"""The rules of health.py: thresholds, and why they are where they are. Pure.

A rule looks at the last few steps, never at one alone: a step of few prompts is noisy. Thresholds lie beyond what runs
that learn have shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from infsample_rl.config import Config

BASELINE_STEPS = 5  # the first steps of a run, which later ones are compared with
RECENT = 5  # steps that most rules look at
LONGEST_WINDOW = 20  # no rule looks back further

# few prompts and hard ones: 32 samples a step with a mean reward of 0.2 had five in a row once in 150 steps
SAME_REWARD_STEPS = 8
# k3 of a token: on average a token is e times as likely as under the reference, or worse; runs that learn stay below
# 0.1
KL_LIMIT = 1.0
# or tenfold within ten steps; below the floor that is a policy leaving the reference's own point
KL_GROWTH, KL_FLOOR = 10.0, 0.2
# of the first steps' entropy; runs that learn kept 0.6 of it, and at a tenth most tokens are no longer a choice
ENTROPY_SHARE = 0.1
# of samples that ended at max_new_tokens; such a sample has no answer, a run that starts badly shows 0.6
CUT_SHARE = 0.9
IDLE_SHARE = 0.15  # of rows that decode; few prompts and one long sample leave 0.2 to 0.4 in runs as they should be
UNFILLED_SHARE = 0.5  # the same where a step has fewer samples than rows, which no order of samples mends
FAILED_SHARE = 0.1  # of rewards; the odd timeout is far below, a bug in a function above
# gradients always this far above max_grad_norm: the clip, not learner.lr, sets the step
CLIPPED_STEPS, CLIPPED_TIMES = 20, 3.0
# of the bound at which the run stops; and so many times the first steps', so that it grows
MISMATCH_SHARE, MISMATCH_GROWTH = 0.5, 3.0
ESS_LIMIT = 0.5  # effective share of the tokens under importance weights; half the samples would teach as much
TAU_STEPS = 10  # a rank correlation within one step is noisy


Verdict = tuple[float, str] | None  # how bad, on the rule's own scale; one line: what, with numbers, and what to do


@dataclass(frozen=True, slots=True)
class Steps:
    """Metrics of a run's first steps, and of the newest, oldest first."""

    first: Sequence[dict[str, Any]]
    recent: Sequence[dict[str, Any]]

    def last(self, count: int, name: str) -> list[float]:
        """A metric in the last `count` steps that have it; empty where fewer have. Steps without a learner row have no
        mean over tokens."""
        return values if len(values := _known(self.recent, name)[-count:]) == count else []

    def baseline(self, name: str) -> float | None:
        """Mean of a metric over those of the first BASELINE_STEPS that have it, once later ones are there to be
        compared with them."""
        if len(self.first) < BASELINE_STEPS or self.recent[-1]["step"] < self.first[-1]["step"] + RECENT:
            return None
        values = _known(self.first, name)
        return fmean(values) if values else None


def _known(records: Sequence[dict[str, Any]], name: str) -> list[float]:
    values = (record.get(name) for record in records)
    return [value for value in values if value is not None and math.isfinite(value)]


def _slower(config: Config) -> str:
    return f"learner.lr={config.learner.lr / 3:.1g}"


def constant_reward(config: Config, steps: Steps) -> Verdict:
    """No group has two different rewards: every advantage is 0."""
    signal = steps.last(SAME_REWARD_STEPS, "reward/groups_with_signal")
    means = steps.last(SAME_REWARD_STEPS, "reward/mean")
    if not signal or not means or max(signal) > 0 or config.objective.distills:
        return None
    return 1.0, (
        f"the samples of every prompt of the last {SAME_REWARD_STEPS} steps got the same reward (mean "
        f"{fmean(means):.3g}): nothing is learnt; see in completions.jsonl whether reward.functions reads the answer "
        "(data.answer_field); if it does, take prompts of middling difficulty, or set "
        f"rollout.group_size={2 * config.rollout.group_size}"
    )


def exploding_kl(config: Config, steps: Steps) -> Verdict:
    """The policy runs away from the reference; to a teacher it has a long way at first."""
    newest, objective = steps.last(3, "learner/kl"), config.objective
    if not newest or objective.distills or not objective.needs_reference:
        return None
    now, before = median(newest), steps.last(13, "learner/kl")[:10]
    grows = bool(before) and now > KL_FLOOR and now > KL_GROWTH * abs(median(before))
    if now <= KL_LIMIT and not grows:
        return None
    since = f", after {median(before):.2g} in the ten before" if before else ""
    weight = "kl_coef" if objective.kl_in_loss else "kl_reward_coef"
    return now, (
        f"KL to the reference is {now:.2g} a token in the median of the last 3 steps{since}: set {_slower(config)} or "
        f"objective.{weight}={10 * getattr(objective, weight):.2g}, from the checkpoint before it rose"
    )


def collapsing_entropy(config: Config, steps: Steps) -> Verdict:
    """Samples of a prompt grow alike."""
    newest, first = steps.last(RECENT, "learner/entropy"), steps.baseline("learner/entropy")
    if not newest or first is None or not fmean(newest) < ENTROPY_SHARE * first:
        return None
    now, more = fmean(newest), f"objective.entropy_coef={max(0.001, 3 * config.objective.entropy_coef):.1g}"
    if config.objective.updates_per_step > 1 or config.run.max_staleness > 0:  # else every ratio is 1: no clip binds
        more = f"objective.clip_high=0.28, {more}"
    return first / max(now, 1e-9), (
        f"the policy's entropy is {now:.2g} over the last {RECENT} steps, {now / first:.0%} of the first "
        f"{BASELINE_STEPS} steps' {first:.2g}: samples grow alike; set {more} or {_slower(config)}"
    )


def all_cut(config: Config, steps: Steps) -> Verdict:
    """Samples do not end by themselves."""
    cut = steps.last(RECENT, "response/cut")
    if not cut or fmean(cut) < CUT_SHARE:
        return None
    tokens = 2 * config.rollout.max_new_tokens
    longest, row = config.data.max_prompt_tokens + tokens, config.learner.max_tokens_per_micro_batch
    with_row = f" (with learner.max_tokens_per_micro_batch={longest})" if longest > row else ""
    return fmean(cut), (
        f"{fmean(cut):.0%} of the last {RECENT} steps' samples were cut at rollout.max_new_tokens="
        f"{config.rollout.max_new_tokens}: set rollout.max_new_tokens={tokens}{with_row}; if they go on after the "
        "answer, set rollout.stop_strings or check the chat template"
    )


def predictor_worse_than_none(config: Config, steps: Steps) -> Verdict:
    """Predicted lengths cost running steps, or order samples the wrong way round."""
    used, saved = steps.last(RECENT, "predictor/used"), steps.last(RECENT, "predictor/steps_saved")
    taus, is_used = steps.last(TAU_STEPS, "predictor/tau"), bool(used) and min(used) == 1
    if is_used and saved and sum(saved) < 0 and max(saved) <= 0:
        return -sum(saved), (
            f"predicted lengths are used and cost {-sum(saved):.0f} running steps in the last {RECENT} steps' replays: "
            "set rollout.predictor=none"
        )
    if not taus or fmean(taus) > 0 or not (is_used or config.rollout.predictor == "bert"):
        return None
    return 1.0 - fmean(taus), (
        f"predicted lengths order samples no better than chance: Kendall's tau is {fmean(taus):.2f} over the last "
        f"{TAU_STEPS} steps; set rollout.predictor=none, or train a bert predictor on this policy's samples"
    )


def idle_rows(config: Config, steps: Steps) -> Verdict:
    """Memory and compute for rows that do not decode; not where samples wait for their environments meanwhile."""
    if config.environment.is_set:
        return None
    used, workers = steps.last(RECENT, "rollout/row_utilisation"), steps.last(1, "cluster/rollout_workers") or [1.0]
    rollout, prompts = config.rollout, config.data.prompts_per_step
    samples = prompts * rollout.group_size / workers[-1]
    slots = None if rollout.schedule in ("token_budget", "full_group") else rollout.num_slots  # their rows are not set
    unfilled = slots is not None and samples < slots
    if not used or fmean(used) >= (UNFILLED_SHARE if unfilled else IDLE_SHARE):
        return None
    if unfilled:
        do = f"a worker has {samples:.0f} samples a step; set rollout.slots={max(1, int(samples))}"
    else:
        do = f"the last decode nearly alone; set data.prompts_per_step={2 * prompts}"
        if rollout.prompts_at_once != "auto":
            do += " or rollout.prompts_at_once=auto"
    return 1 / max(fmean(used), 1e-3), (
        f"{1 - fmean(used):.0%} of the decode rows stood idle over the last {RECENT} steps: {do}"
    )


def skipped_updates(config: Config, steps: Steps) -> Verdict:
    """Updates that could not be made: NaN, infinity, or nothing to learn from."""
    recent = steps.recent[-10:]
    if not recent[-1].get("learner/skipped_updates"):
        return None
    count = sum(_known(recent, "learner/skipped_updates"))
    if config.learner.on_nonfinite == "stop":  # what is not finite would have ended the run
        why = (
            "an update had no sample with a reward or a signal; see the warnings before this one, take prompts of "
            "middling difficulty or set fewer objective.mini_batches"
        )
    else:
        dtype = {"float16": "model.dtype=bfloat16", "bfloat16": "model.lm_head_fp32=true"}.get(config.model.dtype)
        do = " or ".join(filter(None, [_slower(config), dtype]))
        why = f"the loss or the gradient was not finite, or nothing had a reward or a signal; set {do}"
    return count, f"{count:.0f} updates of the last {len(recent)} steps were skipped: {why}"


def always_clipped(config: Config, steps: Steps) -> Verdict:
    """The clip decides how far an update goes."""
    norms, bound = steps.last(CLIPPED_STEPS, "learner/grad_norm"), config.learner.max_grad_norm
    if not norms or min(norms) <= bound or median(norms) <= CLIPPED_TIMES * bound:
        return None
    return median(norms) / bound, (
        f"every gradient of the last {CLIPPED_STEPS} steps was clipped: norm {median(norms):.2g}, "
        f"learner.max_grad_norm={bound:g}; set learner.max_grad_norm={1.5 * median(norms):.2g} if the reward rises, "
        f"else {_slower(config)}"
    )


def failing_rewards(config: Config, steps: Steps) -> Verdict:
    """Samples whose reward function failed teach nothing, where rewards train at all."""
    if config.objective.reward_coef == 0:
        return None
    failed, samples = steps.last(3, "reward/failed"), steps.last(3, "response/samples")
    share = sum(failed) / sum(samples) if failed and samples else 0.0
    if share < FAILED_SHARE:
        return None
    return share, (
        f"{share:.0%} of the last 3 steps' rewards failed; those samples teach nothing: run.log has the reasons; of "
        f"calls that time out: reward.timeout_s={2 * config.reward.timeout_s:g} or "
        f"reward.processes={2 * config.reward.processes}"
    )


def growing_mismatch(config: Config, steps: Steps) -> Verdict:
    """Engine and learner drift apart, towards the bound at which the run stops."""
    if config.mismatch_is_rounding:
        name, setting = "learner/logprob_diff_max", "mismatch_stop_float32"
    elif config.mismatch_is_bounded_in_mean:
        name, setting = "learner/logprob_diff_mean", "mismatch_stop"
    else:
        return None
    bound, newest, first = getattr(config.objective, setting), steps.last(RECENT, name), steps.baseline(name)
    if not newest or first is None or fmean(newest) < max(MISMATCH_SHARE * bound, MISMATCH_GROWTH * first):
        return None
    now = fmean(newest)
    do = "set objective.importance=token_tis or model.lm_head_fp32=true"
    if config.mismatch_is_rounding:
        do = f"set objective.{setting}={4 * now:.1g} if it is rounding; else engine and learner run different policies"
    return now / bound, (
        f"engine and learner differ by {now:.2g} in log-probability over the last {RECENT} steps, "
        f"{now / max(first, 1e-12):.1f} times the first steps'; the run stops at objective.{setting}={bound:g}: {do}"
    )


def stale_samples(config: Config, steps: Steps) -> Verdict:
    """Importance weights of samples from older weights, or of a rounding engine, leave few of them."""
    shares = steps.last(RECENT, "learner/engine_ess")
    if not shares or config.importance == "none" or fmean(shares) >= ESS_LIMIT:
        return None
    if config.run.max_staleness > 0:
        do = f"set run.max_staleness=0 or {_slower(config)}"
    else:
        do = "set rollout.kv_dtype=auto, model.lm_head_fp32=true or objective.importance=token_tis"
    return 1 / fmean(shares), (
        f"importance weights leave {fmean(shares):.0%} of the last {RECENT} steps' tokens effective: samples are of a "
        f"policy too different; {do}"
    )


RULES: tuple[Callable[[Config, Steps], Verdict], ...] = (
    constant_reward,
    exploding_kl,
    collapsing_entropy,
    all_cut,
    predictor_worse_than_none,
    idle_rows,
    skipped_updates,
    always_clipped,
    failing_rewards,
    growing_mismatch,
    stale_samples,
)

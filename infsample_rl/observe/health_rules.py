"""The rules of health.py: thresholds, and why they are where they are. Pure.

A rule looks at the last few steps, never at one alone: a step of few prompts is noisy. Thresholds lie beyond what runs
that learn have shown; docs/warnings.md has the runs they were tried on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

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


class Finding(NamedTuple):
    """Something wrong.

    Example: Finding(rule="all_cut", severity=0.97, text="97 % of the last 5 steps' samples ...: set
    rollout.max_new_tokens=512")
    """

    rule: str
    severity: float  # grows as it gets worse; every rule has its own scale
    text: str  # one line: what, with numbers, over how many steps, and what to do


@dataclass(frozen=True, slots=True)
class Steps:
    """Metrics of a run's first steps, and of the newest, oldest first."""

    first: Sequence[dict[str, Any]]
    recent: Sequence[dict[str, Any]]

    def last(self, count: int, name: str, default: float | None = None) -> list[float]:
        """A metric in the last `count` steps; empty unless all of them are there and have a number or `default`."""
        return _numbers(self.recent[-count:], count, name, default)

    def last_known(self, count: int, name: str) -> list[float]:
        """A metric of the last `count` steps that have it; empty where fewer have. Steps without a learner row have no
        mean over tokens."""
        return _numbers([record for record in self.recent if record.get(name) is not None][-count:], count, name, None)

    def baseline(self, name: str) -> float | None:
        """Mean of a metric over those of the first BASELINE_STEPS that have it, once later ones are there to be
        compared with them."""
        known = (
            [record for record in self.first if record.get(name) is not None]
            if len(self.first) == BASELINE_STEPS
            else []
        )
        values = _numbers(known, len(known), name, None)
        later = self.recent and self.recent[-1]["step"] >= self.first[-1]["step"] + RECENT
        return fmean(values) if values and later else None


def _numbers(records: Sequence[dict[str, Any]], count: int, name: str, default: float | None) -> list[float]:
    values: list[Any] = [default if record.get(name) is None else record[name] for record in records]
    return (
        values if len(values) == count and all(value is not None and math.isfinite(value) for value in values) else []
    )


def constant_reward(config: Config, steps: Steps) -> Finding | None:
    """No group has two different rewards: every advantage is 0."""
    signal, means = (
        steps.last(SAME_REWARD_STEPS, "reward/groups_with_signal"),
        steps.last(SAME_REWARD_STEPS, "reward/mean"),
    )
    if not signal or not means or max(signal) > 0:
        return None
    spread = steps.last(SAME_REWARD_STEPS, "reward/std", 0.0)
    said = (
        f"the samples of every prompt of the last {SAME_REWARD_STEPS} steps got the same reward (mean "
        f"{fmean(means):.3g}): nothing is learnt"
    )
    if max(spread) == 0:
        do = (
            "see in completions.jsonl whether reward.functions reads the answer (data.answer_field); if it does, "
            "take "
            "easier or harder prompts"
        )
    else:
        do = f"take prompts of middling difficulty, rollout.group_size={2 * config.rollout.group_size}"
        if not config.objective.dynamic_sampling and config.run.max_staleness == 0:
            do += ", or objective.dynamic_sampling=true"
    return Finding("constant_reward", 1.0, f"{said}; {do}")


def exploding_kl(config: Config, steps: Steps) -> Finding | None:
    """The policy runs away from the reference."""
    newest = steps.last(3, "learner/kl") if config.objective.kl_in_loss else []
    if not newest:
        return None
    now, before = median(newest), steps.last(13, "learner/kl")[:10]
    grows = bool(before) and now > KL_FLOOR and now > KL_GROWTH * abs(median(before))
    if now <= KL_LIMIT and not grows:
        return None
    since = f", after {median(before):.2g} in the ten before" if before else ""
    do = (
        f"set learner.lr={config.learner.lr / 3:.1g} or objective.kl_coef={10 * config.objective.kl_coef:.2g}, from "
        "the checkpoint before it rose"
    )
    return Finding(
        "exploding_kl", now, f"KL to the reference is {now:.2g} a token in the median of the last 3 steps{since}: {do}"
    )


def collapsing_entropy(config: Config, steps: Steps) -> Finding | None:
    """Samples of a prompt grow alike."""
    newest, first = steps.last_known(RECENT, "learner/entropy"), steps.baseline("learner/entropy")
    if not newest or first is None or not fmean(newest) < ENTROPY_SHARE * first:
        return None
    now = fmean(newest)
    # else every ratio is 1 and no clip binds
    clipped = config.objective.updates_per_step > 1 or config.run.max_staleness > 0
    more = (
        f"objective.clip_high=0.28, objective.entropy_coef={_bonus(config)}"
        if clipped
        else f"objective.entropy_coef={_bonus(config)}"
    )
    said = (
        f"the policy's entropy is {now:.2g} over the last {RECENT} steps, {now / first:.0%} of the first "
        f"{BASELINE_STEPS} steps' {first:.2g}"
    )
    return Finding(
        "collapsing_entropy",
        first / max(now, 1e-9),
        f"{said}: samples grow alike; set {more} or learner.lr={config.learner.lr / 3:.1g}",
    )


def _bonus(config: Config) -> str:
    return f"{max(0.001, 3 * config.objective.entropy_coef):.1g}"


def all_cut(config: Config, steps: Steps) -> Finding | None:
    """Samples do not end by themselves."""
    cut = steps.last(RECENT, "response/cut")
    if not cut or fmean(cut) < CUT_SHARE:
        return None
    tokens = 2 * config.rollout.max_new_tokens
    longest, row = config.data.max_prompt_tokens + tokens, config.learner.max_tokens_per_micro_batch
    with_row = f" (with learner.max_tokens_per_micro_batch={longest})" if longest > row else ""
    said = (
        f"{fmean(cut):.0%} of the last {RECENT} steps' samples were cut at "
        f"rollout.max_new_tokens={config.rollout.max_new_tokens}"
    )
    do = (
        f"set rollout.max_new_tokens={tokens}{with_row}; if they go on after the answer, set rollout.stop_strings or "
        "check the chat template"
    )
    return Finding("all_cut", fmean(cut), f"{said}: {do}")


def predictor_worse_than_none(config: Config, steps: Steps) -> Finding | None:
    """Predicted lengths cost running steps, or order samples the wrong way round."""
    used, saved = steps.last(RECENT, "predictor/used"), steps.last(RECENT, "predictor/steps_saved")
    if used and saved and min(used) == 1 and sum(saved) < 0 and max(saved) <= 0:
        said = (
            f"predicted lengths are used and cost {-sum(saved):.0f} running steps in the last {RECENT} steps' replays"
        )
        return Finding("predictor_worse_than_none", -sum(saved), f"{said}: set rollout.predictor=none")
    taus = steps.last(TAU_STEPS, "predictor/tau")
    in_use = config.rollout.predictor == "bert" or (used and min(used) == 1)
    if taus and in_use and fmean(taus) <= 0:
        frozen = config.rollout.predictor == "bert"
        do = (
            "train it on this policy's samples, or set rollout.predictor=probe"
            if frozen
            else "set rollout.predictor=none"
        )
        said = (
            f"predicted lengths order samples no better than chance: Kendall's tau is {fmean(taus):.2f} over the "
            f"last {TAU_STEPS} steps"
        )
        return Finding("predictor_worse_than_none", 1.0 - fmean(taus), f"{said}; {do}")
    return None


def idle_rows(config: Config, steps: Steps) -> Finding | None:
    """Memory and compute for rows that do not decode."""
    used, workers = steps.last(RECENT, "rollout/row_utilisation"), steps.last(RECENT, "cluster/rollout_workers", 1.0)
    if not used:
        return None
    rollout, prompts = config.rollout, config.data.prompts_per_step
    samples = prompts * rollout.group_size / workers[-1]
    unfilled = rollout.schedule != "token_budget" and samples < rollout.num_slots
    if fmean(used) >= (UNFILLED_SHARE if unfilled else IDLE_SHARE):
        return None
    said = f"{1 - fmean(used):.0%} of the decode rows stood idle over the last {RECENT} steps"
    if unfilled:
        do = (
            f"a worker has {samples:.0f} samples a step for {rollout.num_slots} slots; set "
            f"rollout.slots={max(1, int(samples))}"
        )
    elif prompts / workers[-1] > rollout.prompts_at_once:
        do = f"a prompt's last samples decode nearly alone; set rollout.prompts_at_once={2 * rollout.prompts_at_once}"
    else:
        do = (
            f"a step's last samples decode nearly alone; set data.prompts_per_step={2 * prompts}, or "
            "rollout.max_new_tokens lower"
        )
    return Finding("idle_rows", 1 / max(fmean(used), 1e-3), f"{said}: {do}")


def skipped_updates(config: Config, steps: Steps) -> Finding | None:
    """Updates that could not be made: NaN, infinity, or nothing to learn from."""
    newest = steps.recent[-1]
    if not newest.get("learner/skipped_updates"):
        return None
    count = sum(record.get("learner/skipped_updates") or 0 for record in steps.recent[-10:])
    said = f"{count:.0f} updates of the last {len(steps.recent[-10:])} steps were skipped"
    if (newest.get("reward/failed") or 0) >= (newest.get("response/samples") or config.samples_per_step):
        return Finding(
            "skipped_updates", count, f"{said}: no sample has a reward; see the warnings above it in run.log"
        )
    if config.objective.dynamic_sampling and not newest.get("reward/groups_with_signal"):
        return Finding(
            "skipped_updates",
            count,
            f"{said}: no group was left by objective.dynamic_sampling; take prompts of middling difficulty",
        )
    empty = "an update had no sample with a reward or a signal; set fewer objective.mini_batches"
    if config.learner.on_nonfinite == "stop":  # what is not finite would have ended the run
        return Finding("skipped_updates", count, f"{said}: {empty}")
    dtype = {"float16": "model.dtype=bfloat16", "bfloat16": "model.lm_head_fp32=true"}.get(config.model.dtype)
    do = " or ".join(filter(None, [f"learner.lr={config.learner.lr / 3:.1g}", dtype]))
    return Finding("skipped_updates", count, f"{said}: the loss or the gradient was not finite; set {do}")


def always_clipped(config: Config, steps: Steps) -> Finding | None:
    """The clip decides how far an update goes."""
    norms, bound = steps.last(CLIPPED_STEPS, "learner/grad_norm"), config.learner.max_grad_norm
    if not norms or min(norms) <= bound or median(norms) <= CLIPPED_TIMES * bound:
        return None
    said = (
        f"every gradient of the last {CLIPPED_STEPS} steps was clipped: norm {median(norms):.2g}, "
        f"learner.max_grad_norm={bound:g}"
    )
    do = (
        f"set learner.max_grad_norm={1.5 * median(norms):.2g} if the reward rises, else "
        f"learner.lr={config.learner.lr / 3:.1g}"
    )
    return Finding("always_clipped", median(norms) / bound, f"{said}; {do}")


def failing_rewards(config: Config, steps: Steps) -> Finding | None:
    """Samples whose reward function failed teach nothing."""
    failed, samples = steps.last(3, "reward/failed"), steps.last(3, "response/samples", config.samples_per_step)
    share = sum(failed) / sum(samples) if failed else 0.0
    if share < FAILED_SHARE:
        return None
    said = f"{share:.0%} of the last 3 steps' rewards failed; those samples teach nothing"
    do = f"run.log has the reasons; of calls that time out: reward.timeout_s={2 * config.reward.timeout_s:g}"
    return Finding("failing_rewards", share, f"{said}: {do} or reward.processes={2 * config.reward.processes}")


def growing_mismatch(config: Config, steps: Steps) -> Finding | None:
    """Engine and learner drift apart, towards the bound at which the run stops."""
    objective = config.objective
    name, bound, setting = "learner/logprob_diff_mean", objective.mismatch_stop, "objective.mismatch_stop"
    if config.mismatch_is_rounding:
        name, bound, setting = (
            "learner/logprob_diff_max",
            objective.mismatch_stop_float32,
            "objective.mismatch_stop_float32",
        )
    elif not config.mismatch_is_bounded_in_mean:
        return None
    newest, first = steps.last_known(RECENT, name), steps.baseline(name)
    if not newest or first is None or fmean(newest) < MISMATCH_SHARE * bound or fmean(newest) < MISMATCH_GROWTH * first:
        return None
    now = fmean(newest)
    times = f"{now / max(first, 1e-12):.1f} times the first steps'"
    said = f"engine and learner differ by {now:.2g} in log-probability over the last {RECENT} steps, {times}"
    if config.mismatch_is_rounding:
        do = (
            f"set {setting}={4 * now:.1g} if it is rounding of a sure policy; else engine and learner no longer run "
            "the same one"
        )
    else:
        do = "set objective.importance=token_tis" + ("" if config.model.lm_head_fp32 else " or model.lm_head_fp32=true")
    return Finding("growing_mismatch", now / bound, f"{said}; the run stops at {setting}={bound:g}: {do}")


def stale_samples(config: Config, steps: Steps) -> Finding | None:
    """Importance weights of samples from older weights, or of a rounding engine, leave few of them."""
    shares = steps.last_known(RECENT, "learner/engine_ess")
    if not shares or config.importance == "none" or fmean(shares) >= ESS_LIMIT:
        return None
    said = (
        f"importance weights leave {fmean(shares):.0%} of the last {RECENT} steps' tokens effective: samples are "
        "of "
        "a policy too different"
    )
    if config.run.max_staleness > 0:
        do = f"set run.max_staleness=0 or learner.lr={config.learner.lr / 3:.1g}"
    elif config.importance == "sequence_tis":
        do = "set objective.importance=token_tis"
    else:
        do = "set rollout.kv_dtype=auto" if config.rollout.kv_dtype != "auto" else "set model.lm_head_fp32=true"
    return Finding("stale_samples", 1 / fmean(shares), f"{said}; {do}")


RULES: tuple[Callable[[Config, Steps], Finding | None], ...] = (
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

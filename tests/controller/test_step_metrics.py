"""Metrics of a step from a hand-written book."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest

from infsample_rl.config.loading import load_config
from infsample_rl.controller import step_metrics
from infsample_rl.controller.groups import StepGroups
from infsample_rl.controller.step_metrics import (
    UpdateReport,
    evaluation_metrics,
    forecast_metrics,
    rollout_metrics,
    sample_metrics,
    timing_metrics,
    update_metrics,
)
from infsample_rl.learner.update_sums import UpdateSums
from infsample_rl.reward.functions import METRICS_OF_RUN
from infsample_rl.types import Forecast, StreamEnd, WorkerPhases
from tests.fakes import header, rewarded
from tests.tiny_models import prompt_of

UPDATES = [(0.1, 1.0, 0.0), (0.9, 0.0, 1.0), (0.2, 3.0, 0.0)]


def book(*settings: str) -> StepGroups:
    """Two prompts of two samples; lengths 2, 4, 6, 8; rewards 1, 0, none, 1."""
    prompts = [prompt_of(index, [0] * 3) for index in range(2)]
    groups = StepGroups(prompts, load_config([*settings]), group_size=2, step=0, with_reference=False)
    for key, (lengths, rewards) in enumerate((([2, 4], [1.0, 0.0]), ([6, 8], [None, 1.0]))):
        reasons = ["stop" if length < 8 else "length" for length in lengths]
        told = header(key, [0, 1], lengths=lengths, finish_reasons=reasons, finished_at=10.0 + key)
        groups.add_micro_group(key, told)
        groups.add_rewards(key, dataclasses.replace(rewarded(*rewards, kk=rewards), started_at=9.0, finished_at=9.5))
    groups.take_complete()
    return groups


def test_sample_metrics_leave_failed_rewards_out_of_the_mean():
    metrics = sample_metrics(book())
    assert metrics["reward/mean"] == pytest.approx(2 / 3) and metrics["reward/failed"] == 1
    assert (metrics["response/length_mean"], metrics["response/length_max"], metrics["response/tokens"]) == (5, 8, 20)
    assert metrics["response/cut"] == 0.25 and metrics["reward/groups_with_signal"] == 0.5


BOTH = "rloo objective.kl=k3 objective.kl_coef=0.1"  # a KL in the loss too


@pytest.mark.parametrize(("objective", "kl"), [("rloo", 0.25), ("no_kl", 0.5), (BOTH, 0.5)])
def test_a_kl_in_the_reward_alone_is_that_of_the_samples(objective, kl):
    groups = book(*f"objective={objective}".split())
    groups.started_at = 5.0
    for sample in (sample for group in groups.groups for sample in group.samples):
        sample.kl_sum = 1.25  # of 5 tokens, in the mean
    learner = {"learner/kl": 0.5, "learner/skipped_updates": 0.0, "learner/lr": 0.1}
    update = UpdateReport([learner], [], groups, backward_done=12.0, ended=12.5)
    assert step_metrics.step_metrics(groups, [], update, started=5.0)["learner/kl"] == kl


def test_evaluation_leaves_failed_rewards_out_and_tells_sources_apart():
    groups = book()
    metrics = evaluation_metrics(groups, 2)
    assert metrics["eval/accuracy"] == metrics["eval/mean@2"] == pytest.approx(2 / 3) and metrics["eval/failed"] == 1
    assert metrics["eval/pass@1"] == 1.0 and metrics["eval/length_mean"] == 5
    assert not [name for name in metrics if name.count("/") > 1]
    groups.groups[0].samples[0].components = {"judge": 1.0, "judge/cost": 0.002}
    assert evaluation_metrics(groups, 2)["eval/judge/cost"] == 0.002
    for group, source in zip(groups.groups, ("kk", "sums"), strict=True):
        group.prompt = dataclasses.replace(group.prompt, source=source)
    found = evaluation_metrics(groups, 2) | sample_metrics(groups)
    assert (found["eval/accuracy/kk"], found["eval/accuracy/sums"]) == (0.5, 1.0)
    assert (found["reward/mean/kk"], found["reward/mean/sums"]) == (0.5, 1.0)
    for group in groups.groups:
        for sample in group.samples:
            sample.reward = None
    assert evaluation_metrics(groups, 2)["eval/accuracy"] is None


def test_no_function_takes_a_name_of_the_run_itself():
    found = sample_metrics(book()) | evaluation_metrics(book(), 2)
    own = {name.partition("/")[2] for name in found if name.startswith(("reward/", "eval/"))}
    assert {name for name in own if name.isidentifier()} == set(METRICS_OF_RUN)


def test_without_a_function_no_reward_has_failed():
    groups = book()
    for sample in (sample for group in groups.groups for sample in group.samples):
        sample.reward, sample.components = None, {}
    assert sample_metrics(groups)["reward/failed"] == evaluation_metrics(groups, 2)["eval/failed"] == 0


def end(worker, running_steps, row_utilisation, peak_kv_bytes):
    stats = {"running_steps": running_steps, "row_utilisation": row_utilisation, "peak_kv_bytes": peak_kv_bytes}
    stats |= {"recomputed_tokens": 1.0, "preemptions": 0.0, "parked_tokens": 0.0, "kv_pool_bytes": 64.0}
    stats |= {"predict_seconds": running_steps / 10, "row_steps": running_steps, "draft_seconds": 0.5}
    stats |= {"sent_tokens": 10, "cached_tokens": running_steps}
    stats |= {"drafted_tokens": 8.0, "accepted_tokens": 5.0, "least_steps": running_steps / 1.25}
    return StreamEnd(worker=worker, stats=stats, phases=WorkerPhases("rollout", worker, "here", []))


SIDE_BY_SIDE = [end(0, 10.0, 1.0, 32.0), end(1, 30.0, 0.5, 48.0)]


@pytest.mark.parametrize(
    ("rounds", "steps", "utilisation", "recomputed", "seconds"),
    [
        ([SIDE_BY_SIDE], 30, 0.625, 2, 3.0),  # the longest
        ([[*SIDE_BY_SIDE, end(0, 25.0, 1.0, 8.0)]], 35, 50 / 65, 3, 3.5),  # streams of one worker, one after the other
        ([SIDE_BY_SIDE, [end(0, 20.0, 0.25, 32.0)]], 50, 0.5, 3, None),  # rounds too
    ],
)
def test_rollout_figures_of_workers_streams_and_rounds(rounds, steps, utilisation, recomputed, seconds):
    metrics = rollout_metrics(rounds)
    assert metrics["rollout/running_steps"] == steps and metrics["rollout/row_utilisation"] == utilisation
    assert metrics["rollout/recomputed_tokens"] == recomputed and seconds in (None, metrics["predictor/seconds"])
    ends = sum(map(len, rounds))
    assert (metrics["rollout/drafted_tokens"], metrics["rollout/accepted_tokens"]) == (8 * ends, 5 * ends)
    rows = sum(end.stats["running_steps"] for each in rounds for end in each)
    assert metrics["rollout/tokens_per_row_step"] == 1 + 5 * ends / rows
    assert metrics["rollout/of_bound"] == 1.25
    assert metrics["rollout/prefix_cache_hits"] == rows / (10 * ends)
    assert metrics["rollout/peak_kv_bytes"] == 48 and metrics["rollout/rounds"] == len(rounds)


def test_a_steps_updates_are_averaged_and_skipped_ones_counted():
    updates = [
        {"learner/loss": loss, "learner/lr": lr, "learner/skipped_updates": 1.0}
        for loss, lr in ((1.0, 0.1), (2.0, 0.2))
    ]
    assert update_metrics(updates) == {
        "learner/loss": 1.5,
        "learner/lr": 0.2,
        "learner/skipped_updates": 2.0,
        "learner/updates": 2,
    }


def test_maxima_are_the_steps_and_a_skipped_update_has_no_norm():
    updates = [
        {"learner/logprob_diff_max": d, "learner/grad_norm": n, "learner/skipped_updates": s, "learner/lr": 0.1}
        for d, n, s in UPDATES
    ]
    found = update_metrics(updates)
    assert (found["learner/logprob_diff_max"], found["learner/grad_norm"], found["learner/skipped_updates"]) == (
        0.9,
        2.0,
        1.0,
    )
    assert update_metrics(updates[1:2])["learner/grad_norm"] == 0.0


def test_an_update_without_a_row_has_no_part_in_the_means_over_tokens():
    sums = UpdateSums(entropy=0.8, num_tokens=2, engine_weight=2.0, engine_weight_square=2.0)
    rest = {"learner/skipped_updates": 0.0, "learner/lr": 0.1}
    found = update_metrics([sums.metrics() | rest, UpdateSums().metrics() | rest])
    assert (found["learner/entropy"], found["learner/engine_ess"]) == (0.4, 1.0)
    assert update_metrics([UpdateSums().metrics() | rest])["learner/entropy"] is None


def test_timing_of_overlap_and_leads():
    groups = book()  # the last sample ends at 11
    groups.started_at = 5.0
    rows = [(0, 10.4, 10.6), (1, 10.4, 10.9), (0, 10.8, 11.5), (1, 11.0, 11.5)]
    update = UpdateReport([], rows, groups, backward_done=12.0, ended=12.5)
    metrics = timing_metrics(groups, update, started=5.0)
    assert (
        metrics["timing/rollout"] == 6.0
        and metrics["timing/backward_after_rollout"] == 1.0
        and metrics["timing/update"] == 0.5
    )
    assert metrics["timing/overlap"] == pytest.approx((0.2 + 0.5 + 0.2) / 2)  # of two ranks
    assert metrics["timing/backward_lead"] == pytest.approx(0.6) and metrics["timing/reward_lead"] == 2.0
    assert metrics["timing/tokens_per_s"] == pytest.approx(20 / 6)
    groups.groups[0].samples[1].observed = 3  # of 4 tokens: an environment gave them
    assert timing_metrics(groups, update, started=5.0)["timing/tokens_per_s"] == pytest.approx(17 / 6)


def test_timing_of_a_step_whose_samples_were_drawn_before():
    groups, following = book(), book()
    groups.started_at = 5.0
    for group in following.groups:
        group.last_sample_at += 1.5  # the last at 12.5
    update = UpdateReport([], [(0, 12.0, 13.0)], following, backward_done=13.0, ended=14.0)
    metrics = timing_metrics(groups, update, started=11.5)
    assert (metrics["timing/rollout"], metrics["timing/overlap"], metrics["timing/backward_after_rollout"]) == (
        6.0,
        0.5,
        0.5,
    )
    # nothing was sampled beside it
    last = timing_metrics(groups, update._replace(sampled=groups), started=11.5)
    assert last["timing/backward_after_rollout"] == 1.5 and last["timing/overlap"] == 0.0


def test_forecasts_are_compared_with_the_lengths_that_came():
    groups = book()
    assert forecast_metrics(groups) == {}
    for group, predicted in zip(groups.groups, ([4.0, 2.0], [6.0, 9.0]), strict=True):
        for sample, tokens in zip(group.samples, predicted, strict=True):
            sample.forecast = Forecast(1, tokens)
    # lengths 2, 4 in the wrong order; 6, 8 in the right one, 8 was cut at the maximum
    metrics = forecast_metrics(groups)
    assert metrics["predictor/tau"] == 0.0 and metrics["predictor/token_error"] == pytest.approx((2 + 2 + 0) / 3)
    assert metrics["predictor/log_error"] == pytest.approx(2 * math.log(2) / 3)


def test_the_mean_of_a_component_whose_sum_no_float_holds():
    samples = [SimpleNamespace(components={"mine": 1.0, "mine/big": value}) for value in (1.5e308, 1.7e308)]
    assert step_metrics._component_means(samples) == {"mine": 1.0, "mine/big": 1.6e308}

"""Metrics of a step from a hand-written book."""

from __future__ import annotations

import numpy as np
import pytest

from infsample_rl.config_loading import load_config
from infsample_rl.groups import StepGroups
from infsample_rl.model.loading import load_tokenizer
from infsample_rl.step_metrics import completion_records, evaluation_metrics, rollout_metrics, sample_metrics, timing_metrics
from infsample_rl.types import Completion, MicroGroupHeader, Prompt, RewardResult


def book() -> StepGroups:
    """Two prompts of two samples; lengths 2, 4, 6, 8; rewards 1, 0, none, 1."""
    prompts = [Prompt(prompt_index=i, row=i, messages=[], text="", token_ids=np.zeros(3, np.int32)) for i in range(2)]
    groups = StepGroups(prompts, load_config([]), group_size=2, step=0, with_reference=False)
    for key, (lengths, rewards) in enumerate((([2, 4], [1.0, 0.0]), ([6, 8], [None, 1.0]))):
        reasons = ["stop" if length < 8 else "length" for length in lengths]
        header = MicroGroupHeader(
            prompt_index=key, sample_indices=[0, 1], lengths=lengths, finish_reasons=reasons, policy_version=0, finished_at=10.0 + key
        )
        groups.add_micro_group(key, header)
        groups.add_rewards(key, RewardResult(rewards=rewards, components={"kk": rewards}, failures=[], started_at=9.0, finished_at=9.5))
    groups.take_complete()
    return groups


def test_sample_metrics_leave_failed_rewards_out_of_the_mean():
    metrics = sample_metrics(book())
    assert metrics["reward/mean"] == pytest.approx(2 / 3) and metrics["reward/failed"] == 1
    assert (metrics["response/length_mean"], metrics["response/length_max"], metrics["response/tokens"]) == (5, 8, 20)
    assert metrics["response/cut"] == 0.25 and metrics["reward/groups_with_signal"] == 0.5


def test_evaluation_counts_a_failed_reward_as_wrong():
    metrics = evaluation_metrics(book(), 2)
    assert metrics["eval/accuracy"] == metrics["eval/mean@2"] == 0.5
    assert metrics["eval/pass@1"] == 0.5 and metrics["eval/length_mean"] == 5


def test_records_show_the_text_rewards_saw():
    tokenizer = load_tokenizer(load_config([]).model)
    ids = np.array(tokenizer(" knight. knave.<|im_end|>", add_special_tokens=False)["input_ids"], np.int32)
    figures = {"logprobs": np.zeros(len(ids), np.float32), "sampling_logprobs": None, "finish_reason": "stop", "policy_version": 0}
    completions = [Completion(prompt_index=0, sample_index=index, token_ids=ids, **figures) for index in range(2)]
    shown = [
        [record["response"] for record in completion_records(book(), lambda key: completions, tokenizer, step=1, limit=4, stop_strings=strings)]
        for strings in ([], [" knave", "."])
    ]
    assert shown == [[" knight. knave."] * 4, [" knight"] * 4]


def test_rollout_figures_of_workers_side_by_side():
    zero = {"recomputed_tokens": 1.0, "preemptions": 0.0, "parked_tokens": 0.0, "kv_pool_bytes": 64.0, "predict_seconds": 0.25}
    stats = [
        {"running_steps": 10.0, "row_utilisation": 1.0, "peak_kv_bytes": 32.0, **zero},
        {"running_steps": 30.0, "row_utilisation": 0.5, "peak_kv_bytes": 48.0, **zero},
    ]
    metrics = rollout_metrics(stats)
    assert (metrics["rollout/running_steps"], metrics["rollout/peak_kv_bytes"], metrics["rollout/row_utilisation"]) == (30, 48, 0.625)
    assert metrics["rollout/recomputed_tokens"] == 2 and metrics["rollout/predict_seconds"] == 0.25  # side by side: the longest


def test_timing_of_overlap_and_reward_lead():
    metrics = timing_metrics(book(), 10.4, started=5.0, backward_done=12.0, updated=12.5)
    assert metrics["timing/rollout"] == 6.0 and metrics["timing/backward_after_rollout"] == 1.0 and metrics["timing/update"] == 0.5
    assert metrics["timing/overlap"] == pytest.approx(0.6) and metrics["timing/reward_lead"] == 2.0
    assert metrics["timing/tokens_per_s"] == pytest.approx(20 / 6)

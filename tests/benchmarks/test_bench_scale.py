"""Fake workers answer like the real ones, and the real driver trains with them."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fake_workers import FakeLearnerWorker, FakeReferenceWorker, FakeRewardWorker, FakeRolloutWorker, Pace
from infsample_rl.config import (
    Config,
    DataConfig,
    LearnerConfig,
    ModelConfig,
    ObjectiveConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
)
from infsample_rl.learner.reference_worker import ReferenceWorker
from infsample_rl.learner.worker import LearnerWorker
from infsample_rl.reward.worker import RewardWorker
from infsample_rl.rollout.worker import RolloutWorker
from infsample_rl.types import (
    Completion,
    LossTotals,
    MicroGroupHeader,
    ProbeReport,
    Prompt,
    ReferenceResult,
    RewardResult,
    RolloutWork,
    TrainingSample,
    WeightSyncReport,
)

ROOT = Path(__file__).resolve().parents[2]
PACE = Pace(0.0, 0.0)
PROMPT_IDS = np.array([5, 9, 7], np.int32)
PROMPT = Prompt(
    prompt_index=0,
    row=0,
    messages=[{"role": "user", "content": "1"}],
    text="1",
    token_ids=PROMPT_IDS,
    columns={"answer": "1"},
)
SAMPLES = [
    Completion(
        prompt_index=0,
        sample_index=index,
        token_ids=np.array([40 + index, 41, 42], np.int32),
        logprobs=np.full(3, -1.0, np.float32),
        sampling_logprobs=None,
        finish_reason="length",
        policy_version=0,
    )
    for index in range(2)
]


@pytest.fixture(scope="module")
def config(tiny_qwen3, tmp_path_factory):
    reward = tmp_path_factory.mktemp("reward") / "my_rewards.py"
    reward.write_text("def score(prompts, completions, **columns):\n    return [1.0] * len(completions)\n")
    return Config(
        model=ModelConfig(path=str(tiny_qwen3)),
        data=DataConfig(source="problems.jsonl", max_prompt_tokens=16),
        rollout=RolloutConfig(group_size=4, slots=2, max_new_tokens=8),
        reward=RewardConfig(functions=[RewardFunctionConfig(name=f"{reward}:score")]),
        objective=ObjectiveConfig(kl="none", mismatch_stop_float32=100.0),
        learner=LearnerConfig(max_tokens_per_micro_batch=64, warmup_steps=0),
    )


ROLLOUT = [lambda config: RolloutWorker(config, 0), lambda config: FakeRolloutWorker(config, 0, PACE)]
LEARNER = [lambda config: LearnerWorker(config, 0, 1, 10), lambda config: FakeLearnerWorker(config, 0, 1, 10, PACE)]
KINDS = pytest.mark.parametrize("kind", [0, 1], ids=["real", "fake"])


@KINDS
def test_rollout_and_learner_answer_the_calls_of_a_step(config, kind, tmp_path):
    rollout, learner = ROLLOUT[kind](config), LEARNER[kind](config)
    assert isinstance(learner.host_store(), int)
    assert learner.setup("localhost", 0, None).keys() == {
        "backend",
        "device",
        "ranks",
        "parameters",
        "threads",
        "updates",
    }
    manifest, buckets, sums = learner.publisher.export(3)
    assert manifest.version == 3 and isinstance(sums, dict)
    report = rollout.load_weights(manifest, (bucket.copy() for bucket in buckets), None, sums=sums)
    assert isinstance(report, WeightSyncReport) and (report.version, report.num_bytes) == (3, manifest.num_bytes)
    work = [
        RolloutWork(prompt_index=index, prompt_ids=PROMPT_IDS, sample_indices=samples)
        for index, samples in ((1, [0, 1, 2]), (0, [3]))
    ]
    items = list(rollout.stream(work, step=2, evaluation=False))
    headers, groups = items[::2], items[1::2]
    assert {(c.prompt_index, c.sample_index) for group in groups for c in group} == {(1, 0), (1, 1), (1, 2), (0, 3)}
    for header, group in zip(headers, groups, strict=True):
        assert isinstance(header, MicroGroupHeader) and len(group) <= config.rollout.micro_group
        assert {c.prompt_index for c in group} == {header.prompt_index} and header.sample_indices == [
            c.sample_index for c in group
        ]
        assert header.lengths == [len(c.token_ids) for c in group] and {c.policy_version for c in group} == {
            header.policy_version
        } == {3}
        assert all(
            c.token_ids.dtype == np.int32 and c.logprobs.dtype == np.float32 and len(c.logprobs) == len(c.token_ids)
            for c in group
        )
        assert header.finish_reasons == [c.finish_reason for c in group] and header.finished_at > 0
    assert rollout.progress() > 0 and isinstance(rollout.learn(), ProbeReport)
    samples = [
        TrainingSample(
            prompt_index=c.prompt_index,
            sample_index=c.sample_index,
            prompt_ids=PROMPT_IDS,
            response_ids=c.token_ids,
            advantage=1.0,
            engine_logprobs=c.logprobs,
            reference_logprobs=None,
        )
        for c in groups[0]
    ]
    totals = LossTotals(
        num_sequences=len(samples), num_tokens=sum(len(sample.response_ids) for sample in samples), length_normalizer=8
    )
    row = learner.accumulate(samples, totals, None)
    assert row["samples"] == len(samples) and row["row_tokens"] >= totals.num_tokens
    assert learner.accumulate(None, totals, None) == {"samples": 0, "row_tokens": 0}
    learner.step(totals, is_last=True)
    learner.save(str(tmp_path))
    assert list(tmp_path.glob("*.safetensors"))


@KINDS
def test_reward_and_reference_answer_with_floats_and_arrays(config, kind):
    reward = (RewardWorker, FakeRewardWorker)[kind](config)
    try:
        result = reward.score(PROMPT, SAMPLES)
        assert reward.progress() > 0
    finally:
        if kind == 0:
            reward.close()
    assert (
        isinstance(result, RewardResult)
        and all(isinstance(value, float) for value in result.rewards)
        and len(result.rewards) == 2
    )
    assert (
        result.failures == []
        and result.started_at <= result.finished_at
        and [len(column) for column in result.components.values()] == [2]
    )
    found = (ReferenceWorker, FakeReferenceWorker)[kind](config).logprobs(PROMPT, SAMPLES)
    assert (
        isinstance(found, ReferenceResult)
        and [len(row) for row in found.logprobs] == [3, 3]
        and len(found.report.kl_sums) == 2
    )


def test_what_they_report_has_the_same_names(config):
    for real, fake in zip(
        *([build(config) for build in kinds] for kinds in zip(ROLLOUT, LEARNER, strict=True)), strict=True
    ):
        assert fake.statistics().keys() == real.statistics().keys()
    rollouts, learners = [build(config) for build in ROLLOUT], [build(config) for build in LEARNER]
    assert rollouts[0].stats().keys() == rollouts[1].stats().keys()
    learners[0].setup("", 0, None)
    totals = LossTotals(num_sequences=0, num_tokens=0, length_normalizer=8)
    for learner in learners:
        learner.accumulate(None, totals, None)
    assert learners[0].step(totals).keys() == learners[1].step(totals).keys()


PAIRS = [
    (RolloutWorker, FakeRolloutWorker),
    (LearnerWorker, FakeLearnerWorker),
    (RewardWorker, FakeRewardWorker),
    (ReferenceWorker, FakeReferenceWorker),
]


@pytest.mark.parametrize(("real", "fake"), PAIRS, ids=lambda kind: kind.__name__)
def test_every_call_of_a_fake_takes_what_the_real_one_takes(real, fake):
    for name, method in vars(fake).items():
        if not name.startswith("_"):
            wanted, offered = inspect.signature(getattr(real, name)).parameters, inspect.signature(method).parameters
            assert list(offered) == [parameter for parameter in wanted if parameter != "pause_every"], name
            assert [p.kind for p in offered.values()] == [wanted[parameter].kind for parameter in offered], name


@pytest.mark.slow
def test_the_command_measures_the_real_driver(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.scale",
        "workers=[4]",
        "step_seconds=1",
        "steps=2",
        "processes=2",
        "json=true",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    point = json.loads(done.stdout)
    assert (
        point["workers"] == 4
        and point["micro_groups"] == 4 * 32 / 4
        and point["object_store_bytes"] > 4 * 32 * 1024 * 8
    )
    assert point["worker_processes"] == 4, "two processes of two rollout workers, one learner rank, one reward worker"
    assert 1 < point["step_s"] and 0 < point["driver_thread_cpu_s"] < point["step_s"] and point["driver_bytes"] > 0
    assert 0 <= point["stolen_share"] < 1


def test_a_wrong_argument_is_one_line(refused):
    from benchmarks import scale

    assert "workers" in refused(scale.main, "workers=[0]")
    assert replace(SAMPLES[0], sample_index=1).num_bytes == 24

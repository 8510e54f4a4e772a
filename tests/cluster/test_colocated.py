"""Rollout and learner in one process: shared weights, and turns that change nothing but the time."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import infsample_rl
from infsample_rl.cluster.colocated import ColocatedWorker, TurnLock
from infsample_rl.config import LearnerConfig, ModelConfig, RolloutConfig
from infsample_rl.plan.learner_memory import learner_lines
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.types import LossTotals, RolloutWork, TrainingSample
from tests.configs import run_config

POLICY = str(Path(infsample_rl.__file__).parent / "assets" / "kk_tiny" / "policy")
PAGE_BYTES = 4 * 2 * 16 * 2 * 32 * 4  # layers, keys and values, tokens, kv heads, head size, bytes
PROMPTS = [np.array(ids, np.int32) for ids in ([5, 9, 7, 12], [8, 3], [14, 11, 10, 9, 4])]


def config(**changes):
    made = run_config(
        model={"path": POLICY},
        data={"max_prompt_tokens": 16, "prompts_per_step": 3},
        rollout={"group_size": 4, "slots": 2, "max_new_tokens": 24, "micro_group_size": 1, "predictor": "none"},
        objective={"kl_coef": 0.0},
        learner={"lr": 1e-2, "max_tokens_per_micro_batch": 1024},
        cluster={"colocate": True},
    )
    return replace(made, **changes)


def worker(made):
    found = ColocatedWorker(made, 0, 1, 10)
    found.setup(None)
    found.publish(0)
    return found


def training_samples(completions):
    return [
        TrainingSample(
            prompt_index=each.prompt_index,
            sample_index=each.sample_index,
            prompt_ids=PROMPTS[each.prompt_index],
            response_ids=each.token_ids,
            advantages=(1.0 if each.token_ids.sum() % 2 else -1.0,),
            engine_logprobs=each.logprobs,
            reference=None,
        )
        for each in completions
    ]


def step(both, *, overlap):
    """One step; with `overlap` a row is trained whenever the engine pauses. The samples, their loss, and the rows
    trained before the last sample."""
    work = [
        RolloutWork(prompt_index=index, prompt_ids=ids, sample_indices=[0, 1, 2, 3])
        for index, ids in enumerate(PROMPTS)
    ]
    totals, waiting, samples, early = LossTotals(num_sequences=12, num_tokens=200, length_normalizer=24), [], [], 0
    for item in both.rollout.stream(work, step=0, pause_every=1):
        if isinstance(item, list) and item:
            samples += item
            waiting += item
        elif overlap and waiting:
            both.learner.accumulate(training_samples(waiting), totals)
            waiting, early = [], early + 1
    if waiting:
        both.learner.accumulate(training_samples(waiting), totals)
    return samples, both.learner.step(totals), early


def test_engine_and_learner_are_two_modules_over_the_same_weights():
    both = worker(config())
    engine, learner = both.rollout.engine.runner.model, both.learner.policy.lm
    assert [p.data_ptr() for p in engine.parameters()] == [p.data_ptr() for p in learner.parameters()]
    assert (
        engine.config is not learner.config
        and engine.config._attn_implementation != learner.config._attn_implementation
    )
    before = [parameter.clone() for parameter in engine.parameters()]
    step(both, overlap=False)
    assert both.publish(1).num_bytes == 0
    assert both.rollout.engine.policy_version == 1
    assert any(not torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))


@pytest.mark.parametrize("checkpointing", [0, 1])
def test_training_between_decode_steps_changes_neither_samples_nor_gradient(checkpointing):
    made = config(
        learner=LearnerConfig(lr=1e-3, max_tokens_per_micro_batch=1024, activation_checkpointing=checkpointing)
    )
    apart, together = worker(made), worker(made)
    for turn in range(2):  # the second with weights that the first has changed
        first, one, _ = step(apart, overlap=False)
        second, other, early = step(together, overlap=True)
        key = lambda each: (each.prompt_index, each.sample_index)  # noqa: E731
        for a, b in zip(sorted(first, key=key), sorted(second, key=key), strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
        assert early > 2
        assert one["learner/grad_norm"] == pytest.approx(other["learner/grad_norm"], rel=1e-5)
        assert one["learner/logprob_diff_max"] < 1e-4
        apart.publish(turn + 1), together.publish(turn + 1)
    for a, b in zip(
        apart.rollout.engine.runner.model.parameters(), together.rollout.engine.runner.model.parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # of steps of 1e-3 each: AdamW divides by tiny gradients


def test_in_sixteen_bits_the_engine_reads_what_the_learner_reads():
    both = worker(config(model=ModelConfig(path=POLICY, dtype="bfloat16")))
    _, metrics, _ = step(both, overlap=False)
    assert both.shares_weights and {parameter.dtype for parameter in both.rollout.engine.runner.model.parameters()} == {
        torch.bfloat16
    }
    assert {master.dtype for master in both.learner.backend.masters.values()} == {torch.float32}
    assert metrics["learner/logprob_diff_mean"] < 0.05


def test_turns_are_taken_in_the_order_they_were_asked_for():
    lock, order = TurnLock(), []

    def take(name):
        with lock:
            order.append(name)

    with lock:
        threads = []
        for name in range(5):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            while lock._next < name + 2:
                pass
    for thread in threads:
        thread.join(timeout=10)
    assert order == [0, 1, 2, 3, 4]


def test_the_auto_budget_leaves_the_learner_its_planned_peak(monkeypatch):
    made = config(
        rollout=RolloutConfig(
            group_size=4, max_new_tokens=24, kv_budget_bytes="auto", prompts_at_once=2, predictor="none"
        )
    )
    planned = sum(learner_lines(made, ModelOutline.of(made))[0].values())
    growth = planned - planned // 3
    monkeypatch.setattr("infsample_rl.model.peak_memory.PeakMemory.held_bytes", lambda memory: planned // 3)
    pages = {}
    # of which half is taken beside the learner: more than the resident prompts could use, and less
    for free_pages in (100, 11):
        monkeypatch.setattr(
            "infsample_rl.rollout.engine.engine_pool.free_bytes",
            lambda device, gpu_part, free=free_pages: growth + free * PAGE_BYTES,
        )
        found = ColocatedWorker(made, 0, 1, 10)
        found.setup(None)
        assert found.rollout.engine.runner.page_bytes(made.rollout.page_size) == PAGE_BYTES
        pages[free_pages] = found.rollout.engine.runner.kv.num_pages
    assert pages == {100: made.rollout.most_prompts * (4 * 2 + 1), 11: 5}
    monkeypatch.setattr(
        "infsample_rl.rollout.engine.engine_pool.free_bytes", lambda device, gpu_part: growth + 2 * PAGE_BYTES
    )
    with pytest.raises(ValueError, match="auto .* bytes free for it.* too few for a prompt"):
        ColocatedWorker(made, 0, 1, 10).setup(None)

"""The bert predictor that a run trains on its first groups: once, whatever order workers report in, with equal bits
from a checkpoint, and without a word about the samples."""

from __future__ import annotations

import numpy as np
import pytest

from infsample_rl.config import RolloutConfig
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine
from infsample_rl.rollout.length_prediction.messages import SampledLengths
from infsample_rl.rollout.length_prediction.run_bert import FILE, FIRST_GROUPS, RunBert

K = 4


def step_of(number, groups=16, size=8):
    """Reports of two workers; a sample's second token says how long it is."""
    draw = np.random.default_rng(number)
    halves = ([], [])
    for prompt in range(groups):
        ids = draw.integers(5, 40, 6).tolist()
        samples = [
            (index, [1, kind, *draw.integers(5, 40, 2).tolist()], (10, 40, 160)[kind - 2], False)
            for index, kind in enumerate(draw.integers(2, 5, size).tolist())
        ]
        for half, part in zip(halves, (samples[: size // 2], samples[size // 2 :]), strict=True):
            half.append(SampledLengths(prompt, ids, part))
    return list(halves)


def trained_bits(run):
    return {name: value.tobytes() for name, value in run.published().trained.weights.items()}


def test_it_trains_once_on_the_first_groups_and_is_frozen():
    run = RunBert(K, seed=3)
    steps = FIRST_GROUPS // 16
    assert [run.enter(step_of(number)) for number in range(steps - 1)] == [None] * (steps - 1)
    assert not run.published().is_used
    said = run.enter(step_of(steps - 1))
    assert said.startswith(f"length predictor: trained on {FIRST_GROUPS} groups in ") and "frozen" in said
    assert float(said.split("tau ")[1].split()[0]) > 0.5
    before = trained_bits(run)
    assert run.enter(step_of(9)) is None and trained_bits(run) == before


def test_a_killed_run_trains_to_the_same_bits_and_keeps_them(tmp_path):
    whole, killed = RunBert(K, seed=3), RunBert(K, seed=3)
    for number in range(FIRST_GROUPS // 16):
        whole.enter(step_of(number))
        killed.enter(step_of(number)[::-1])  # workers report in another order
        killed.save(tmp_path)
        killed = RunBert(K, seed=3)
        assert killed.load(tmp_path) is None
    assert killed.published().is_used and trained_bits(killed) == trained_bits(whole)
    other = RunBert(K + 1)
    assert "now rollout.prefix_tokens is 5); the length predictor starts anew" in other.load(tmp_path)
    (tmp_path / FILE).write_bytes(b"PK")
    assert "starts anew" in other.load(tmp_path) and not other.published().is_used


@pytest.mark.parametrize("schedule", ["infinite", "lpt"])
def test_an_engine_collects_until_it_is_trained_and_samples_the_same_then(schedule, make_model, tokenizer):
    settings = {"group_size": 6, "slots": 2, "max_new_tokens": 20, "schedule": schedule, "predictor": "bert"}
    config = RolloutConfig(**settings, prefix_tokens=K)
    engine = SamplingEngine(make_model(), tokenizer, config, stop_token_ids={3, 17, 40}, shared_probe=True)

    def draw():
        groups = engine.generate([[5, 9], [7]], seed=1)
        return [[completion.token_ids.tolist() for completion in group] for group in groups], groups

    first, groups = draw()
    assert all(completion.forecast is None for group in groups for completion in group)  # no prefix is waited for
    seen = {report.prompt_index: report for report in engine.learn()}
    assert [seen[index].prompt_ids for index in (0, 1)] == [[5, 9], [7]]
    for index, group in enumerate(first):
        said = [(sample, ids[:K], len(ids)) for sample, ids in enumerate(group)]
        assert sorted(sample[:3] for sample in seen[index].samples) == said
    run = RunBert(K)
    for number in range(FIRST_GROUPS // 16):
        run.enter(step_of(number))
    engine.lengths.watch.load(run.published())
    again, groups = draw()
    assert again == first and engine.learn() == []
    outlive = [completion for group in groups for completion in group if len(completion.token_ids) > K]
    assert outlive and all(completion.forecast.known == K for completion in outlive)

"""One rank: what the worker reports, refuses, skips and keeps."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from infsample_rl.config import LearnerConfig, ObjectiveConfig, ReferenceConfig
from infsample_rl.learner.row_plan import split_passes
from infsample_rl.types import LossTotals
from tests.tiny_models import reference_tokens

LEARNER = LearnerConfig(lr=1e-3, warmup_steps=2, max_tokens_per_micro_batch=256, logprob_chunk_tokens=7)
NOTHING = LossTotals(num_sequences=0, num_tokens=0, length_normalizer=16)


@pytest.fixture(scope="module")
def samples(tools, untied_policy):
    return tools.make_samples(tools.load_plain(untied_policy))


def test_metrics_of_an_update_are_means_over_its_tokens(tools, untied_policy, samples):
    totals = tools.totals_of(samples)
    shifted = [replace(sample, engine_logprobs=sample.engine_logprobs - np.float32(5e-5)) for sample in samples]
    calls = [("accumulate", (shifted[:5], totals)), ("accumulate", (shifted[5:], totals)), ("step", (totals,))]
    first, _, step = tools.run_here(tools.make_config(untied_policy, learner=LEARNER), calls)
    assert first["samples"] == 5
    lm = tools.load_plain(untied_policy)
    with torch.no_grad():
        outputs = [tools.plain_logprobs(lm, sample.prompt_ids, sample.response_ids) for sample in samples]
    logprobs, entropy = (torch.cat(values) for values in zip(*outputs, strict=True))
    difference = logprobs - torch.from_numpy(np.concatenate([sample.reference.logprobs for sample in samples]))
    assert step["learner/kl"] == pytest.approx((torch.expm1(-difference) + difference).mean().item(), rel=1e-4)
    assert step["learner/entropy"] == pytest.approx(entropy.mean().item(), rel=1e-5)
    assert step["learner/logprob_diff_mean"] == pytest.approx(5e-5, rel=0.05)
    assert 4e-5 < step["learner/logprob_diff_max"] < 6e-5
    assert 0 <= step["learner/logprob_diff_k3"] < 1e-8
    assert step["learner/clip_fraction"] == 0.0  # on policy the ratio is exactly 1
    assert step["learner/lr"] == pytest.approx(5e-4)  # first of two warm-up steps
    assert step["learner/skipped_updates"] == 0.0


def test_an_engine_that_ran_another_policy_stops_the_run_and_is_named(tools, untied_policy, samples):
    broken = list(samples)
    logprobs = samples[6].engine_logprobs.copy()
    logprobs[0] += 0.01
    broken[6] = replace(samples[6], engine_logprobs=logprobs)
    with pytest.raises(
        RuntimeError, match=r"differ by 0\.01 .*\(prompt_index=1, sample_index=2, token 0\): engine -.*, learner -"
    ):
        tools.run_here(
            tools.make_config(untied_policy, learner=LEARNER), [("accumulate", (broken, tools.totals_of(broken)))]
        )


def test_float32_with_rounded_kv_stops_on_the_mean_alone(tools, untied_policy, samples):
    plain = tools.make_config(
        untied_policy,
        learner=LEARNER,
        objective=ObjectiveConfig(kl_coef=0.0, importance="token_tis", mismatch_stop=0.05),
    )
    rounded = replace(plain, rollout=replace(plain.rollout, kv_dtype="int8"))
    assert (plain.mismatch_is_rounding, rounded.mismatch_is_rounding) == (True, False)
    totals = tools.totals_of(samples)

    def calls(shift):
        shifted = [replace(sample, engine_logprobs=sample.engine_logprobs + np.float32(shift)) for sample in samples]
        return [("accumulate", (shifted, totals)), ("step", (totals,))]

    with pytest.raises(RuntimeError, match="objective.mismatch_stop_float32=0.0001"):
        tools.run_here(plain, calls(0.02))
    step = tools.run_here(rounded, calls(0.02))[1]
    assert (
        step["learner/logprob_diff_mean"] == pytest.approx(0.02, rel=0.01) and step["learner/logprob_diff_max"] > 0.0199
    )
    with pytest.raises(
        RuntimeError, match=r"differ by 0\.2 in the mean log-probability of a token, above objective.mismatch_stop=0.05"
    ):
        tools.run_here(rounded, calls(0.2))


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_nonfinite_loss_stops_or_skips(tools, untied_policy, samples, kind):
    nothing_likely = np.full_like(samples[-1].engine_logprobs, -np.inf)  # makes k3 infinite, but its gradient 1
    last = (
        replace(samples[-1], advantages=(math.nan,))
        if kind == "nan"
        else replace(samples[-1], reference=reference_tokens(nothing_likely))
    )
    broken = [*samples[:-1], last]
    totals = tools.totals_of(samples)
    with pytest.raises(RuntimeError, match=f"loss is {kind}"):
        tools.run_here(tools.make_config(untied_policy, learner=LEARNER), [("accumulate", (broken, totals))])
    calls = [("parameters", ()), ("accumulate", (broken, totals)), ("step", (totals,)), ("parameters", ())]
    calls += [("accumulate", (samples, totals)), ("step", (totals,)), ("parameters", ())]
    config = tools.make_config(
        untied_policy, learner=replace(LEARNER, on_nonfinite="skip"), objective=ObjectiveConfig(kl_coef=0.1)
    )
    before, _, skipped, unchanged, _, step, changed = tools.run_here(config, calls)
    assert (skipped["learner/skipped_updates"], step["learner/skipped_updates"]) == (1.0, 0.0)
    assert all(value is None or math.isfinite(value) for value in skipped.values()), (
        "no row is left that there could be a mean over"
    )
    assert all(torch.equal(before[name], unchanged[name]) for name in before)
    assert not torch.equal(before["lm_head.weight"], changed["lm_head.weight"])


def test_an_update_without_rows_moves_by_momentum_and_one_without_samples_is_skipped(tools, untied_policy, samples):
    totals = tools.totals_of(samples)
    calls = [("accumulate", (samples, totals)), ("step", (totals,)), ("parameters", ())]
    calls += [("step", (NOTHING,)), ("parameters", ()), ("step", (totals,)), ("parameters", ())]
    _, _, first, skipped, second, no_rows, third = tools.run_here(
        tools.make_config(untied_policy, learner=LEARNER), calls
    )
    assert skipped["learner/skipped_updates"] == 1.0 and skipped["learner/loss"] is None
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (no_rows["learner/grad_norm"], no_rows["learner/skipped_updates"]) == (0.0, 0.0)
    # AdamW's momentum, as for a gradient of exact zeros
    assert not torch.equal(second["lm_head.weight"], third["lm_head.weight"])


@pytest.mark.parametrize("remembered", [False, True])
def test_several_updates_of_rows_in_passes_are_those_of_rows_of_one(tools, untied_policy, samples, remembered):
    objective = ObjectiveConfig(kl_coef=0.1, epochs=2)
    totals, rows = (
        tools.totals_of(samples),
        [[sample for sample in samples if sample.prompt_index == prompt] for prompt in range(3)],
    )
    assert [len(split_passes(row, 32)) for row in rows] == [1, 1, 2]
    calls = [("remember", (row, number)) for number, row in enumerate(rows) if remembered]
    for is_last in (False, True):
        calls += [("accumulate", (row, totals, number)) for number, row in enumerate(rows)]
        calls.append(("step", {"totals": totals, "is_last": is_last}))
    found = {}
    for max_tokens in (32, 256):
        config = tools.make_config(
            untied_policy, learner=replace(LEARNER, max_tokens_per_micro_batch=max_tokens), objective=objective
        )
        config = replace(config, reference=ReferenceConfig(placement="learner"))
        found[max_tokens] = [result for result in tools.run_here(config, calls) if result and "learner/loss" in result]
    for passes, whole in zip(found[32], found[256], strict=True):
        assert tools.figures(passes) == pytest.approx(tools.figures(whole), rel=1e-4, abs=1e-6)
    assert found[32][1]["learner/kl"] > 0


def test_a_resumed_run_goes_on_bit_for_bit(tools, untied_policy, tmp_path):
    learner = replace(LEARNER, lr_schedule="cosine")
    config = tools.make_config(untied_policy, learner=learner, deterministic=True)
    history, _ = tools.plain_updates(untied_policy, config.objective, learner, count=3)
    updates = []
    for samples, _, _ in history:
        totals = tools.totals_of(samples)
        updates.append(
            [("accumulate", (samples[:5], totals)), ("accumulate", (samples[5:], totals)), ("step", (totals,))]
        )
    folder = str(tmp_path / "checkpoint")
    whole = tools.run_here(config, [*updates[0], *updates[1], ("save", (folder,)), *updates[2], ("parameters", ())])
    resumed = tools.run_here(config, [*updates[2], ("parameters", ())], checkpoint=folder)
    torch.use_deterministic_algorithms(False)
    assert tools.figures(whole[-2]) == tools.figures(resumed[-2]) and whole[-2]["memory/learner_peak_bytes"] > 0
    assert whole[-2]["learner/lr"] == pytest.approx(1e-3)  # the third of ten updates, after two of warm-up
    for name, value in whole[-1].items():
        assert torch.equal(value, resumed[-1][name]), name


@pytest.mark.parametrize(("epochs", "is_old"), [(1, False), (2, False), (2, True), (3, False)])
def test_the_schedule_of_a_resumed_run_ends_with_its_last_step(tools, untied_policy, tmp_path, epochs, is_old):
    folder, learner = tmp_path / "checkpoint", replace(LEARNER, lr_schedule="linear")

    def steps(epochs, calls, checkpoint=None):
        config = tools.make_config(untied_policy, learner=learner, objective=ObjectiveConfig(epochs=epochs))
        return tools.run_here(config, calls, checkpoint=checkpoint)

    steps(2, [("step", {"totals": NOTHING, "is_last": False}), ("step", (NOTHING,)), ("save", (str(folder),))])
    if is_old:  # of a version that did not count steps
        (folder / "training_state" / "progress.json").write_text('{"num_updates": 2, "optimizer_steps": 0}')
    found = steps(epochs, [("step", (NOTHING,))] * 2, str(folder))
    left = 9 * epochs  # updates, after two of warm-up
    assert [step["learner/lr"] for step in found] == pytest.approx([1e-3, 1e-3 * (1 - 1 / left)], rel=1e-12)


def test_a_checkpoint_holds_a_whole_hugging_face_folder(tools, untied_policy, tmp_path):
    folder = tmp_path / "checkpoint"
    config = tools.make_config(untied_policy, learner=LEARNER, dtype="bfloat16")
    tools.run_here(config, [("save", (str(folder),))])
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "training_state"} <= names
    assert '"bfloat16"' in (folder / "config.json").read_text()
    assert "infsample" not in (folder / "config.json").read_text()
    reloaded, original = tools.load_plain(str(folder), torch.bfloat16), tools.load_plain(untied_policy, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(reloaded.parameters(), original.parameters(), strict=True))
    with pytest.raises(ValueError, match="has no training_state"):
        tools.run_here(config, [], checkpoint=untied_policy)

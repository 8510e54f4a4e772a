"""`bench.group_size`: its moments against every possible draw, its gradients against the learner's loss."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import group_size
from benchmarks.group_size import (
    GradientSketch,
    GroupSizeOptions,
    Prompt,
    choose_samples,
    estimate,
    load_gradients,
    mean_weight,
    right_counts,
    right_weights,
    score_gradient,
    second_moment,
    signal_share,
    squared_mean,
)
from infsample_rl.config import ModelConfig, ObjectiveConfig
from infsample_rl.learner.advantage import group_advantages
from infsample_rl.learner.loss import policy_loss
from infsample_rl.model.loading import load_model, load_tokenizer
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.packing import pack_row
from infsample_rl.types import LossTotals

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"


def prompt_of(scores: np.ndarray, right: int) -> Prompt:
    """Of samples whose first `right` are right; scores [n, D]."""
    gram = scores @ scores.T

    def pairs(block):
        return (block.sum() - np.trace(block)) / (len(block) * (len(block) - 1)) if len(block) > 1 else 0.0

    good, bad = gram[:right, :right], gram[right:, right:]
    products = {"right_norm": np.trace(good) / right, "right_pair": pairs(good), "cross": gram[:right, right:].mean()}
    products |= {"wrong_norm": np.trace(bad) / len(bad), "wrong_pair": pairs(bad)}
    return Prompt(samples=len(scores), right=right, **products)


def gradient_of(scores: np.ndarray, right: int, group: tuple[int, ...], kind: str) -> np.ndarray:
    advantages = group_advantages([float(index < right) for index in group], kind)
    return np.array(advantages) @ scores[list(group)] / len(group)


def test_shares_of_groups_with_signal_are_the_hypergeometric_ones():
    assert signal_share(4, 1, 2) == pytest.approx(0.5)  # 3 of the 6 pairs hold the right one
    assert signal_share(256, 4, 256) == pytest.approx(1.0)
    assert signal_share(256, 0, 64) == signal_share(256, 256, 64) == 0.0
    assert signal_share(32, 1, 8) == pytest.approx(0.25)
    assert right_counts(4, 2, 2).tolist() == pytest.approx([1 / 6, 4 / 6, 1 / 6])


def test_weights_are_k_over_G_times_the_learners_advantage():
    assert right_weights(4, "mean_only").tolist() == [0.0, 0.1875, 0.25, 0.1875, 0.0]  # k (G - k) / G^2
    assert right_weights(4, "std")[1] == pytest.approx(0.375, abs=1e-5)  # advantage 0.75 / 0.5


@pytest.mark.parametrize("kind", ["std", "mean_only"])
@pytest.mark.parametrize(("samples", "right", "size"), [(7, 3, 3), (8, 2, 4), (6, 5, 2), (7, 1, 3), (8, 4, 4)])
def test_moments_are_the_means_over_all_draws_without_replacement(kind, samples, right, size):
    scores = np.random.default_rng(samples).normal(size=(samples, 3))
    prompt = prompt_of(scores, right)
    found = {group: gradient_of(scores, right, group, kind) for group in itertools.combinations(range(samples), size)}
    disjoint = [float(found[a] @ found[b]) for a in found for b in found if not set(a) & set(b)]
    assert second_moment(prompt, size, kind) == pytest.approx(np.mean([g @ g for g in found.values()]))
    assert squared_mean(prompt, size, kind) == pytest.approx(np.mean(disjoint), abs=1e-12)
    difference = scores[:right].mean(0) - scores[right:].mean(0)
    assert mean_weight(prompt, size, kind) * difference == pytest.approx(np.mean(list(found.values()), 0))


def test_variance_splits_into_within_and_between_prompts():
    """Two prompts whose right scores are +e and wrong ones -e: E g = v 2 e, the same within a class, so only k
    varies."""
    moments, differences = [], []
    for direction in np.eye(2):
        prompt = prompt_of(np.concatenate([np.tile(direction, (2, 1)), np.tile(-direction, (2, 1))]), 2)
        moments.append([function(prompt, 2, "mean_only") for function in (mean_weight, squared_mean, second_moment)])
        differences.append(2 * direction)
    found = estimate(np.array(moments), np.array(differences) @ np.array(differences).T, 10, 4)
    # k = 1 in 4 of 6 draws, w = 1/4, g = e / 2; the other pair then has k = 1 too, so |E g|^2 = 4/6 x 1/4; the prompts
    # are orthogonal
    assert (found["signal"], found["within"]) == pytest.approx((0, 0), abs=1e-12)
    assert found["prompt_signal"] == pytest.approx(1 / 6) and found["between"] == pytest.approx(1 / 60)


def test_a_sketch_with_a_bucket_for_every_parameter_is_exact_and_a_small_one_unbiased():
    a, b = (torch.randn(60, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    parameters = [torch.nn.Parameter(torch.zeros(4, 10)), torch.nn.Parameter(torch.zeros(20))]
    wide = GradientSketch(parameters, 60, 0)
    assert float(wide.of(a) @ wide.of(b)) == pytest.approx(float(a @ b), rel=1e-5)
    padded = torch.cat([a, torch.zeros(5)]), torch.cat([b, torch.zeros(5)])
    sketches = [GradientSketch(parameters, 13, seed) for seed in range(600)]
    products = [float(sketch.of(padded[0]) @ sketch.of(padded[1])) for sketch in sketches]
    assert abs(np.mean(products) - float(a @ b)) < 4 * np.std(products) / 600**0.5
    assert np.std(products) < 1.5 * float(a.norm() * b.norm()) / 13**0.5


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """Three prompts of 6 samples with 2, 1 and 0 right ones."""
    generator, lines = np.random.default_rng(3), []
    for index, right in enumerate((2, 1, 0)):
        lengths = [int(length) for length in generator.integers(1, 9, size=6)]
        line = {"dataset": "made", "model": "tiny", "prompt_id": str(index), "prompt": f"{index} + 2 ="}
        line |= {"lengths": lengths, "scores": [1.0] * right + [0.0] * (6 - right)}
        lines.append(line | {"token_ids": [generator.integers(0, 256, size=length).tolist() for length in lengths]})
    path = tmp_path_factory.mktemp("group_size") / "made_n6.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def measured(recorded, tiny_qwen3, run_benchmark) -> tuple[list[dict], Path]:
    """What the command says when it has computed the gradients, and their file."""
    gradients = recorded.parent / "gram.npz"
    sizes = ["group_sizes=[2,3,6,8]", "samples=12", "prompts=2", "wrong=8", "json=true"]
    said = run_benchmark(
        "group_size", f"recordings=[{recorded}]", f"gradients={gradients}", f"model={tiny_qwen3}", *sizes
    )
    return [json.loads(line) for line in said.splitlines()], gradients


def test_the_command_reports_every_size_that_was_recorded(measured):
    records, gradients = measured
    assert [(record["what"], record.get("advantage"), record["group_size"]) for record in records] == [
        (what, kind, size)
        for what, kind in (("signal", None), ("gradient", "std"), ("gradient", "mean_only"))
        for size in (2, 3, 6)
    ]
    whole = records[2]
    assert whole["signal_share"]["value"] == pytest.approx(2 / 3)  # two of three prompts have a right sample
    assert whole["samples_with_signal"] == pytest.approx(8.0) and whole["right"] == pytest.approx(3 / 18)
    assert whole["update_without_signal"] == pytest.approx(1 / 9)
    for record in records[3:]:  # the mean of samples x weight^2 per variance, whichever way the update is counted
        equal = record["gain_equal_samples"] * 2 / (12 / record["group_size"])
        assert record["gain_equal_prompts"] == pytest.approx(equal)
    with np.load(gradients) as found:
        assert found["place"].tolist() == [0] * 6 + [1] * 6
        assert found["right"].tolist() == [True] * 2 + [False] * 4 + [True] + [False] * 5


@pytest.mark.parametrize("kind", ["std", "mean_only"])
def test_a_groups_gradient_is_the_one_the_learners_loss_gives(recorded, measured, tiny_qwen3, kind):
    """The whole recorded group of prompt 0 through pack_row, group_advantages and policy_loss: |gradient|^2 as from the
    inner products."""
    line = json.loads(recorded.read_text().splitlines()[0])
    config = ModelConfig(path=str(tiny_qwen3))
    policy = PackedPolicy(load_model(config), valid_vocab=259, chunk_tokens=64)
    prompt_ids = load_tokenizer(config)(line["prompt"], add_special_tokens=False)["input_ids"]
    row = pack_row([(np.array(prompt_ids), [np.array(ids) for ids in line["token_ids"]])], "cpu")
    logprobs, _ = policy(row, 0.8)
    lengths = torch.tensor(line["lengths"])
    advantages = torch.tensor(group_advantages(line["scores"], kind)).repeat_interleave(lengths)
    totals = LossTotals(num_sequences=6, num_tokens=int(lengths.sum()), length_normalizer=8)
    objective = ObjectiveConfig(loss="grpo", kl="none", advantage=kind)
    loss, _ = policy_loss(logprobs, logprobs.detach(), advantages, row.sequence_ids, objective=objective, totals=totals)
    loss.backward()
    expected = sum(float(parameter.grad.square().sum()) for parameter in policy.parameters())
    prompts, _ = load_gradients(str(measured[1]), [Prompt(samples=6, right=right) for right in (2, 1, 0)])
    assert second_moment(prompts[0], 6, kind) == pytest.approx(expected, rel=0.02)  # the sketch's error
    assert prompts[2] == Prompt(samples=6, right=0)


def test_the_score_of_a_response_is_the_mean_of_its_tokens(tiny_qwen3):
    """Against one plain forward in float64, for the last norm's weight."""
    model = load_model(ModelConfig(path=str(tiny_qwen3)))
    score_gradient(PackedPolicy(model, valid_vocab=264, chunk_tokens=64), [5, 6, 7], [8, 9], 0.5)
    found = model.model.norm.weight.grad.clone()
    plain = load_model(ModelConfig(path=str(tiny_qwen3)), dtype=torch.float64)
    logits = plain(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits[0, 2:4] / 0.5
    logits.log_softmax(-1).gather(1, torch.tensor([[8], [9]])).mean().backward()
    assert found.double() == pytest.approx(plain.model.norm.weight.grad, rel=1e-4, abs=1e-6)


def test_right_ones_are_all_taken_and_wrong_ones_drawn(recorded):
    options = GroupSizeOptions(recordings=[str(recorded)], wrong=3)
    chosen = choose_samples(recorded, options)
    assert [(place, right) for place, _, right, _, _ in chosen] == [
        *[(0, True), (0, True), (0, False), (0, False), (0, False)],
        *[(1, True), (1, False), (1, False), (1, False)],
    ]
    assert choose_samples(recorded, options) == chosen


@pytest.mark.parametrize(
    ("recording", "shares", "variances", "gains"),
    [("n32", [0.056, 0.118], (2.56, 1.12), (0.87, 1.10)), ("n256", [0.115, 0.325], (2.99, 1.13), (1.11, 1.08))],
)
def test_the_recorded_policy_gives_what_the_docs_say(recording, shares, variances, gains):
    """docs/group_size.md, from the recordings in tests/data."""
    stem = str(DATA / "group_size" / f"smollm2_135m_gsm8k_T0.8_{recording}")
    options = GroupSizeOptions(recordings=[f"{stem}.jsonl.gz"], gradients=f"{stem}.npz", group_sizes=[8, 32])
    records = group_size.measure(options)
    assert [round(record["signal_share"]["value"], 3) for record in records[:2]] == shares
    for (small, large), variance, gain in zip((records[2:4], records[4:6]), variances, gains, strict=True):
        assert large["within"] / small["within"] == pytest.approx(variance, abs=0.01)
        assert large["gain_equal_samples"] / small["gain_equal_samples"] == pytest.approx(gain, abs=0.01)


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"scores": [0.5] * 6}, [], "scores of 0 and 1, got [0.5]"),
        ({"scores": None}, [], "scores of 0 and 1, got []"),
        ({}, ["gradients={npz}"], "has none of prompts [0], or is not of the 1 of the recordings"),
        ({"token_ids": None}, ["model=nowhere"], "give gradients=FILE.npz, where its gradients are written"),
    ],
)
def test_bad_input_is_one_line_and_status_2(recorded, tmp_path, refused, change, arguments, message):
    (tmp_path / "bad.jsonl").write_text(json.dumps(json.loads(recorded.read_text().splitlines()[0]) | change) + "\n")
    np.savez(tmp_path / "other.npz", gram=np.eye(1), place=np.array([3]), right=np.array([True]))
    given = [argument.format(npz=tmp_path / "other.npz") for argument in arguments]
    assert message in refused(group_size.main, f"recordings=[{tmp_path / 'bad.jsonl'}]", *given)


def test_a_recording_without_tokens_is_refused(recorded, tmp_path):
    line = json.loads(recorded.read_text().splitlines()[0])
    del line["token_ids"]
    (tmp_path / "first.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="tokens=all"):
        choose_samples(tmp_path / "first.jsonl", GroupSizeOptions(recordings=["x"]))


def test_a_recording_is_cut_back_to_whole_lines(tmp_path):
    spec = importlib.util.spec_from_file_location("record_completions", ROOT / "scripts" / "record_completions.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    path = tmp_path / "cut.jsonl"
    assert script.whole_lines(path) == 0
    path.write_text('{"a": 1}\n{"b": 2}\n{"c"')
    assert script.whole_lines(path) == 2 and path.read_text() == '{"a": 1}\n{"b": 2}\n'
    assert script.whole_lines(path) == 2


@pytest.mark.slow  # two imports of everything
def test_recorded_tokens_are_whole_responses_and_go_on_behind_what_is_there(tmp_path):
    """The script itself on the default experiment's policy, a prompt a call, behind a file with one line and a half."""
    out = tmp_path / "kk.jsonl"
    out.write_text('{"prompt_id": "the first"}\n{"prompt_id": "cut o')
    settings = ["+experiment=kk_tiny", "rollout.group_size=2", "rollout.slots=2", "rollout.max_new_tokens=40"]
    own = [f"out={out}", "dataset=kk", "tokens=all", "seconds=0.01", "seed=3", "threads=1", "data.prompts_per_step=1"]
    command = [sys.executable, str(ROOT / "scripts" / "record_completions.py"), *own, *settings]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    first, line = [json.loads(line) for line in out.read_text().splitlines()]
    assert first == {"prompt_id": "the first"}
    assert [len(ids) for ids in line["token_ids"]] == line["lengths"] and len(line["lengths"]) == 2
    assert [ids[:32] for ids in line["token_ids"]] == line["first_tokens"]

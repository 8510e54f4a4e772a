"""`bench.group_size`: its moments against every possible draw, its gradients against the learner's loss, its commands
as processes."""

from __future__ import annotations

import dataclasses
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
from benchmarks.group_size import GroupSizeOptions, Scored, load_moments
from benchmarks.group_size_beta import BetaFit, fit_beta
from benchmarks.group_size_gradients import GradientOptions, GradientSketch, load_tasks, measure, score_gradient
from benchmarks.group_size_moments import (
    GradientMoments,
    PromptMoments,
    gradient_moments,
    jackknife_error,
    mean_weight,
    modelled_moments,
    pool,
    right_counts,
    right_weights,
    second_moment,
    signal_share,
    squared_mean,
)
from infsample_rl.config import ModelConfig, ObjectiveConfig
from infsample_rl.learner.advantage import group_advantages
from infsample_rl.learner.loss import policy_loss
from infsample_rl.model.loading import load_model
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.packing import pack_row
from infsample_rl.types import LossTotals

ROOT = Path(__file__).resolve().parents[2]


def moments_of(scores: np.ndarray, right: int) -> PromptMoments:
    """Of samples whose first `right` are right; scores [n, D]."""
    gram = scores @ scores.T

    def pairs(block):
        return (block.sum() - np.trace(block)) / (len(block) * (len(block) - 1)) if len(block) > 1 else 0.0

    good, bad = gram[:right, :right], gram[right:, right:]
    products = {"right_norm": np.trace(good) / right, "right_pair": pairs(good), "cross": gram[:right, right:].mean()}
    return PromptMoments(
        samples=len(scores), right=right, wrong_norm=np.trace(bad) / len(bad), wrong_pair=pairs(bad), **products
    )


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
    prompt = moments_of(scores, right)
    found = {group: gradient_of(scores, right, group, kind) for group in itertools.combinations(range(samples), size)}
    disjoint = [float(found[a] @ found[b]) for a in found for b in found if not set(a) & set(b)]
    assert second_moment(prompt, size, kind) == pytest.approx(np.mean([g @ g for g in found.values()]))
    assert squared_mean(prompt, size, kind) == pytest.approx(np.mean(disjoint), abs=1e-12)
    difference = scores[:right].mean(0) - scores[right:].mean(0)
    assert mean_weight(prompt, size, kind) * difference == pytest.approx(np.mean(list(found.values()), 0))


def test_a_group_of_all_samples_has_the_gradient_itself_as_second_moment():
    scores = np.random.default_rng(0).normal(size=(5, 4))
    whole = gradient_of(scores, 2, tuple(range(5)), "std")
    assert second_moment(moments_of(scores, 2), 5, "std") == pytest.approx(whole @ whole)


@pytest.mark.parametrize("size", [3, 6, 9])
def test_mean_only_moments_of_few_samples_are_unbiased_for_any_group_size(size):
    """Over all draws of 5 from a population of 9: their mean is the population's own value, for groups larger than the
    draw too."""
    scores, right = np.random.default_rng(5).normal(size=(9, 3)), 4
    found = []
    for drawn in itertools.combinations(range(9), 5):
        count = sum(index < right for index in drawn)
        if 0 < count < 5:
            part = moments_of(scores[list(drawn)], count)
            found.append((second_moment(part, size, "mean_only"), squared_mean(part, size, "mean_only")))
        else:
            found.append((0.0, 0.0))
    whole = moments_of(scores, right)
    assert np.mean(found, 0) == pytest.approx(
        [second_moment(whole, size, "mean_only"), squared_mean(whole, size, "mean_only")]
    )
    if size == 9:
        gradient = gradient_of(scores, right, tuple(range(9)), "mean_only")
        assert second_moment(whole, 9, "mean_only") == pytest.approx(gradient @ gradient)


def test_a_fitted_beta_finds_the_one_that_counts_were_drawn_from():
    generator = np.random.default_rng(0)
    counts = [(32, int(generator.binomial(32, p))) for p in generator.beta(0.5, 9.5, size=4000)]
    fit = fit_beta(counts, resamples=20)
    assert fit.mean == pytest.approx(0.05, rel=0.1) and fit.total == pytest.approx(10, rel=0.2)
    shares = {size: np.mean([signal_share(samples, right, size) for samples, right in counts]) for size in (2, 8, 32)}
    for size, expected in shares.items():
        share = fit.share(size)
        assert share.value == pytest.approx(expected, rel=0.05) and share.low <= share.value <= share.high
    with pytest.raises(ValueError, match="right and wrong samples"):
        fit_beta([(8, 0), (8, 0)])


@pytest.mark.parametrize("kind", ["std", "mean_only"])
def test_modelled_moments_are_those_of_recordings_of_any_number_of_samples(kind):
    """Prompts from Beta(0.6, 2.4): the mean over recordings of 6 samples, which modelled_moments takes, is that over
    recordings of 11."""
    fit, size = BetaFit(0.2, 3.0, []), 3
    pooled = PromptMoments(
        samples=4, right=2, right_norm=2.0, right_pair=0.9, cross=0.3, wrong_norm=1.6, wrong_pair=0.2
    )
    found = modelled_moments(fit.right_counts(6), pooled, 0.5, size, kind)
    chances = fit.right_counts(11)
    assert chances.sum() == pytest.approx(1.0) and chances @ np.arange(12) == pytest.approx(0.2 * 11)
    prompts = [dataclasses.replace(pooled, samples=11, right=right) for right in range(12)]
    for_all = [
        np.array([moment(prompt, size, kind) for prompt in prompts]) @ chances
        for moment in (mean_weight, squared_mean, second_moment)
    ]
    assert found.weight == pytest.approx(for_all[0]) and found.signal == pytest.approx(for_all[0] ** 2 * 0.5)
    assert found.prompt_signal == pytest.approx(for_all[1])
    assert found.within == pytest.approx(for_all[2] - for_all[1])


def test_pooled_right_pairs_weigh_by_how_many_there_are():
    one = PromptMoments(samples=8, right=1, right_norm=2.0, cross=0.2, wrong_norm=1.0, wrong_pair=0.1)
    three = PromptMoments(samples=8, right=3, right_norm=4.0, right_pair=0.6, cross=0.4, wrong_norm=3.0, wrong_pair=0.3)
    pooled = pool([one, three])
    assert (pooled.right_norm, pooled.right_pair, pooled.wrong_norm) == (3.0, pytest.approx(0.6), 2.0)
    assert pooled.cross == pytest.approx(0.3) and pooled.wrong_pair == pytest.approx(0.2)


def test_variance_splits_into_within_and_between_prompts():
    """Two prompts whose right scores are +e and wrong ones -e: E g = v 2 e, the same within a class, so only k
    varies."""
    towards = np.array([[1.0, 0.0], [0.0, 1.0]])
    prompts, differences = [], []
    for direction in towards:
        scores = np.concatenate([np.tile(direction, (2, 1)), np.tile(-direction, (2, 1))])
        prompts.append(moments_of(scores, 2))
        differences.append(2 * direction)
    found = gradient_moments(prompts, np.array(differences) @ np.array(differences).T, 2, "mean_only")
    # k = 1 in 4 of 6 draws, w = 1/4, g = e / 2; the other pair then has k = 1 too, so |E g|^2 = 4/6 x 1/4; the prompts
    # are orthogonal
    assert found.signal == pytest.approx(0.0)
    assert found.prompt_signal == pytest.approx(1 / 6)
    assert found.within == pytest.approx(0.0)
    assert found.between == pytest.approx(1 / 6)
    assert found.signal_to_noise(100) == pytest.approx(0.0)


def test_signal_to_noise_grows_with_the_groups_and_gain_leaves_the_signal_out():
    found = GradientMoments(weight=0.1, signal=0.02, prompt_signal=0.05, within=0.5)
    assert found.between == pytest.approx(0.03)
    assert found.signal_to_noise(10) == pytest.approx(10 * 0.02 / 0.53)
    assert found.gain(10) == pytest.approx(10 * 0.01 / 0.5)


def test_prompts_without_a_right_sample_count_as_no_gradient():
    scores = np.random.default_rng(1).normal(size=(6, 3))
    one, none = moments_of(scores, 3), PromptMoments(samples=6, right=0)
    products = np.zeros((3, 3))
    with_zeros = gradient_moments([one, none, none], products, 3, "std")
    assert with_zeros.prompt_signal == pytest.approx(squared_mean(one, 3, "std") / 3)
    assert jackknife_error([1.0, 2.0, 3.0]) == pytest.approx((2 / 3 * 2) ** 0.5)


def test_a_sketch_with_a_bucket_for_every_parameter_is_exact_and_a_small_one_unbiased():
    a, b = (
        torch.randn(60, generator=torch.Generator().manual_seed(0)),
        torch.randn(60, generator=torch.Generator().manual_seed(1)),
    )
    parameters = [torch.nn.Parameter(torch.zeros(4, 10)), torch.nn.Parameter(torch.zeros(20))]
    wide = GradientSketch(parameters, 60, 0)
    assert float(wide.of(a) @ wide.of(b)) == pytest.approx(float(a @ b), rel=1e-5)
    padded = torch.cat([a, torch.zeros(5)]), torch.cat([b, torch.zeros(5)])
    products = [
        float(sketch.of(padded[0]) @ sketch.of(padded[1]))
        for sketch in (GradientSketch(parameters, 13, seed) for seed in range(600))
    ]
    error = np.std(products) / 600**0.5
    assert abs(np.mean(products) - float(a @ b)) < 4 * error
    assert np.std(products) < 1.5 * float(a.norm() * b.norm()) / 13**0.5


@pytest.fixture(scope="module")
def recorded(tiny_qwen3, tmp_path_factory) -> Path:
    """Three prompts of 6 samples with 2, 1 and 0 right ones."""
    generator, lines = np.random.default_rng(3), []
    for index, right in enumerate((2, 1, 0)):
        lengths = [int(length) for length in generator.integers(1, 9, size=6)]
        ids = [generator.integers(0, 256, size=length).tolist() for length in lengths]
        scores = [1.0] * right + [0.0] * (6 - right)
        fields = {
            "dataset": "made",
            "model": "tiny",
            "prompt_id": str(index),
            "prompt": f"{index} + 2 =",
            "prompt_tokens": 5,
            "max_new_tokens": 8,
        }
        lines.append(fields | {"lengths": lengths, "scores": scores, "token_ids": ids})
    path = tmp_path_factory.mktemp("group_size") / "made_n6.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def gram(recorded, tiny_qwen3) -> Path:
    path = recorded.parent / "gram.npz"
    measure(
        GradientOptions(
            recordings=[str(recorded)], model=str(tiny_qwen3), out=str(path), wrong=8, sketch=104729, exact=2
        )
    )
    return path


@pytest.mark.parametrize("kind", ["std", "mean_only"])
def test_a_groups_gradient_is_the_one_the_learners_loss_gives(recorded, gram, tiny_qwen3, kind):
    """The whole recorded group of prompt 0 through pack_row, group_advantages and policy_loss: |gradient|^2 as from the
    inner products."""
    line = json.loads(recorded.read_text().splitlines()[0])
    policy = PackedPolicy(load_model(ModelConfig(path=str(tiny_qwen3))), valid_vocab=259, chunk_tokens=64)
    prompt_ids = np.frombuffer(line["prompt"].encode(), np.uint8)
    responses = [np.array(ids) for ids in line["token_ids"]]
    tokenizer_ids = load_tokenizer_ids(tiny_qwen3, line["prompt"])
    row = pack_row([(np.array(tokenizer_ids), responses)], "cpu")
    assert len(prompt_ids) == len(tokenizer_ids)
    logprobs, _ = policy(row, 0.8)
    lengths = torch.tensor(line["lengths"])
    advantages = torch.tensor(group_advantages(line["scores"], kind)).repeat_interleave(lengths)
    totals = LossTotals(num_sequences=6, num_tokens=int(lengths.sum()), length_normalizer=8)
    objective = ObjectiveConfig(loss="grpo", kl="none", advantage=kind)
    loss, _ = policy_loss(logprobs, logprobs.detach(), advantages, row.sequence_ids, objective=objective, totals=totals)
    loss.backward()
    expected = sum(float(parameter.grad.square().sum()) for parameter in policy.parameters())
    moments, _ = load_moments(str(gram), [Scored(6, 2), Scored(6, 1), Scored(6, 0)])
    assert second_moment(moments[0], 6, kind) == pytest.approx(expected, rel=0.02)  # the sketch's error
    assert moments[2] == PromptMoments(samples=6, right=0)


def load_tokenizer_ids(folder: Path, text: str) -> list[int]:
    from infsample_rl.model.loading import load_tokenizer

    return load_tokenizer(ModelConfig(path=str(folder)))(text, add_special_tokens=False)["input_ids"]


def test_norms_are_exact_and_inner_products_near(gram):
    with np.load(gram) as found:
        assert (
            found["place"].tolist() == [0] * 6 + [1] * 6
            and found["right"].tolist() == [True] * 2 + [False] * 4 + [True] + [False] * 5
        )
        assert np.diag(found["gram"]) == pytest.approx(found["norm"], rel=1e-5)
        scale = np.sqrt(np.outer(found["norm"][:2], found["norm"][:2]))
        assert np.abs(found["gram"][:2, :2] - found["exact"]).max() < 0.02 * scale.max()
        assert np.diag(found["exact"]) == pytest.approx(found["norm"][:2], rel=1e-5)


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
    tasks = load_tasks([str(recorded)], right=64, wrong=3, seed=0)
    assert [(task.place, task.right) for task in tasks] == [
        (0, [True, True, False, False, False]),
        (1, [True, False, False, False]),
    ]
    assert [task.samples for task in tasks] == [
        task.samples for task in load_tasks([str(recorded)], right=64, wrong=3, seed=0)
    ]


def test_the_command_reports_every_size_that_was_recorded_and_draws(recorded, gram):
    arguments = [
        f"recordings=[{recorded}]",
        f"gradients={gram}",
        "group_sizes=[2,3,6,8]",
        "samples=12",
        "slots=2",
        "prompts=2",
        "json=true",
    ]
    block = (
        "import sys, runpy; [sys.modules.__setitem__(name, None) for name in ('ray', 'hydra', 'omegaconf', "
        "'deepspeed')];"
    )
    code = (
        f"{block} sys.argv[0] = 'x'; sys.path.insert(0, {str(ROOT)!r}); runpy.run_module('benchmarks.group_size', "
        "run_name='__main__')"
    )
    command = [sys.executable, "-c", code, *arguments, f"out={recorded.parent}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [
        ("signal", (2, 3, 6)),
        ("signal", (2, 3, 6, 8)),
        ("sampling", (2, 3, 6, 8)),
        ("gradient", (2, 3, 6)),
        ("gradient", (2, 3, 6, 8)),
    ]
    kinds += [("gradient", (2, 3, 6, 8))] * 2
    assert [(record["what"], record["group_size"]) for record in records] == [
        (what, size) for what, sizes in kinds for size in sizes
    ]
    assert records[2]["signal_share"]["value"] == pytest.approx(2 / 3)  # two of three prompts have a right sample
    assert records[2]["samples_with_signal"] == pytest.approx(8.0) and records[2][
        "update_without_signal"
    ] == pytest.approx(1 / 9)
    assert records[0]["right"] == pytest.approx(3 / 18)
    assert {record["recording"] for record in records[3:7]} == {"all files, fitted Beta"}
    # 2 responses of 8 tokens and a prompt of 5, in pages of 16
    assert [record["kv_tokens"] for record in records[7:11]] == [48] * 4
    assert [record["full_group_kv_tokens"] for record in records[7:11]] == [48, 64, 112, 144]
    assert all(record["within"] >= 0 for record in records[18:])
    assert [record["advantage"] for record in records[11:]] == ["std"] * 3 + ["mean_only"] * 4 + ["std"] * 4 + [
        "mean_only"
    ] * 4
    assert (recorded.parent / "group_size.png").stat().st_size > 10_000


def test_the_recorded_policy_gives_what_the_docs_say():
    """docs/results/group_size.md, from the recordings in tests/data."""
    data, name = ROOT / "tests" / "data", "smollm2_135m_gsm8k_T0.8"
    files = [str(data / "group_size" / f"{name}_n32.jsonl.gz"), str(data / "lengths" / f"{name}_n8.jsonl")]
    gradients = str(data / "group_size" / f"{name}_n32.npz")
    records = group_size.measure(
        GroupSizeOptions(recordings=files, gradients=gradients, group_sizes=[8, 32], simulated=2)
    )
    shares = [round(record["signal_share"]["value"], 3) for record in records if record["what"] == "signal"]
    assert shares == [0.056, 0.118, 0.102, 0.08, 0.184]  # n32 at 8 and 32, n8 at 8, fitted at 8 and 32
    gradients_of = {(r["recording"], r["advantage"], r["group_size"]): r for r in records if r["what"] == "gradient"}
    for kind, variance, gain in (("std", 2.58, 1.01), ("mean_only", 1.12, 1.10)):
        small, large = (gradients_of["all files, fitted Beta", kind, size] for size in (8, 32))
        assert large["within"] / small["within"] == pytest.approx(variance, abs=0.01)
        assert large["gain_equal_samples"] / small["gain_equal_samples"] == pytest.approx(gain, abs=0.01)
        assert large["gain_equal_prompts"] / small["gain_equal_prompts"] == pytest.approx(4 * gain, rel=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [0.5] * 6}, "scores of 0 and 1, got \\[0.5\\]"),
        ({"scores": None}, "scores of 0 and 1, got \\[\\]"),
    ],
)
def test_rewards_beside_0_and_1_are_refused(recorded, tmp_path, change, message):
    line = json.loads(recorded.read_text().splitlines()[0])
    (tmp_path / "bad.jsonl").write_text(json.dumps(line | change) + "\n")
    with pytest.raises(ValueError, match=message):
        group_size.measure(GroupSizeOptions(recordings=[str(tmp_path / "bad.jsonl")]))


def test_gradients_of_other_recordings_are_refused(gram):
    with pytest.raises(ValueError, match=r"no gradients of prompts \[2\]"):
        load_moments(str(gram), [Scored(6, 2), Scored(6, 1), Scored(6, 3)])


def test_a_recording_without_tokens_is_refused(recorded, tmp_path):
    line = json.loads(recorded.read_text().splitlines()[0])
    del line["token_ids"]
    (tmp_path / "first.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="tokens=all"):
        load_tasks([str(tmp_path / "first.jsonl")], 4, 4, 0)


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
    settings = [
        "+experiment=kk_tiny",
        "rollout.group_size=2",
        "rollout.slots=2",
        "rollout.max_new_tokens=40",
        "data.prompts_per_step=1",
    ]
    own = [f"out={out}", "dataset=kk", "tokens=all", "seconds=0.01", "seed=3", "threads=1"]
    command = [sys.executable, str(ROOT / "scripts" / "record_completions.py"), *own, *settings]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    first, line = [json.loads(line) for line in out.read_text().splitlines()]
    assert first == {"prompt_id": "the first"}
    assert [len(ids) for ids in line["token_ids"]] == line["lengths"] and len(line["lengths"]) == 2
    assert [ids[:32] for ids in line["token_ids"]] == line["first_tokens"]

"""`bench.group_size`: its moments against every possible draw, and what it finds in the recordings."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import group_size
from benchmarks.group_size import (
    GroupSizeOptions,
    Prompt,
    load_gradients,
    mean_weight,
    right_counts,
    right_weights,
    second_moment,
    signal_share,
    squared_mean,
)
from infsample_rl.learner.advantage import group_advantages

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


@pytest.fixture
def recorded(tmp_path) -> Path:
    """Three prompts of 6 samples with 2, 1 and 0 right ones."""
    lines = [
        {"dataset": "made", "model": "tiny", "prompt_id": str(index), "lengths": [4] * 6}
        | {"scores": [1.0] * right + [0.0] * (6 - right)}
        for index, right in enumerate((2, 1, 0))
    ]
    path = tmp_path / "made_n6.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_every_size_that_was_recorded_is_reported(recorded, tmp_path, capsys):
    scores = np.random.default_rng(0).normal(size=(12, 3))  # of the samples of the first two prompts
    right = [True] * 2 + [False] * 4 + [True] + [False] * 5
    np.savez(tmp_path / "gram.npz", gram=scores @ scores.T, place=np.array([0] * 6 + [1] * 6), right=np.array(right))
    sizes = ["group_sizes=[2,3,6,8]", "samples=12", "prompts=2"]
    given = [f"recordings=[{recorded}]", f"gradients={tmp_path / 'gram.npz'}", *sizes]
    assert group_size.main([*given, "json=true"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["what"], record.get("advantage"), record["group_size"]) for record in records] == [
        (what, kind, size)
        for what, kind in (("signal", None), ("gradient", "std"), ("gradient", "mean_only"))
        for size in (2, 3, 6)
    ]
    whole = records[2]
    assert whole["signal_share"]["value"] == pytest.approx(2 / 3)  # two of three prompts have a right sample
    assert whole["groups_with_signal"] == pytest.approx(4 / 3) and whole["right"] == pytest.approx(3 / 18)
    for record in records[3:]:  # the mean of samples x weight^2 per variance, whichever way the update is counted
        equal = record["gain_equal_samples"] * 2 / (12 / record["group_size"])
        assert record["gain_equal_prompts"] == pytest.approx(equal)
    counted = [Prompt(samples=6, right=count) for count in (2, 1, 0)]
    found = load_gradients(str(tmp_path / "gram.npz"), counted)
    assert second_moment(found[0], 3, "std") == pytest.approx(second_moment(prompt_of(scores[:6], 2), 3, "std"))
    assert found[2] == counted[2]
    assert group_size.main(given) == 0
    assert "groups with signal" in capsys.readouterr().out


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
    ],
)
def test_bad_input_is_one_line_and_status_2(recorded, tmp_path, refused, change, arguments, message):
    (tmp_path / "bad.jsonl").write_text(json.dumps(json.loads(recorded.read_text().splitlines()[0]) | change) + "\n")
    np.savez(tmp_path / "other.npz", gram=np.eye(1), place=np.array([3]), right=np.array([True]))
    given = [argument.format(npz=tmp_path / "other.npz") for argument in arguments]
    assert message in refused(group_size.main, f"recordings=[{tmp_path / 'bad.jsonl'}]", *given)


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

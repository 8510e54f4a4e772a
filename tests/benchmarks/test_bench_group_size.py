"""`benchmarks.group_size`: its moments against every possible draw, and what it finds in recordings and in runs."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import group_size
from benchmarks.group_moments import (
    Prompt,
    mean_weight,
    moments,
    quality,
    right_counts,
    right_weights,
    second_moment,
    signal_share,
    true_weight,
)
from infsample_rl.learner.advantage import group_advantages
from scripts import record_completions

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"


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
    prompt = Prompt.of(samples, right, scores)
    found = {group: gradient_of(scores, right, group, kind) for group in itertools.combinations(range(samples), size)}
    assert second_moment(prompt, size, kind) == pytest.approx(np.mean([g @ g for g in found.values()]))
    difference = scores[:right].mean(0) - scores[right:].mean(0)
    assert mean_weight(prompt, size, kind) * difference == pytest.approx(np.mean(list(found.values()), 0))


@pytest.mark.parametrize("kind", ["std", "mean_only"])
def test_the_quality_of_an_update_is_that_of_every_pair_of_draws(kind):
    """Of prompts that are all alike, so that two of them are any two of endlessly many."""
    scores = np.random.default_rng(1).normal(size=(6, 4))
    prompt, difference = Prompt.of(6, 2, scores), scores[:2].mean(0) - scores[2:].mean(0)
    one = [gradient_of(scores, 2, group, kind) for group in itertools.combinations(range(6), 3)]
    updates = np.array([(first + second) / 2 for first in one for second in one])
    length = np.sqrt(np.mean(np.sum(updates**2, 1)))
    found = quality(moments([prompt] * 3, 3, kind), np.full((3, 3), difference @ difference), 2)
    mean = updates.mean(0)
    assert found.signal == pytest.approx(mean @ mean / (length**2 - mean @ mean))
    assert found.cosine == pytest.approx(mean @ difference / length / np.linalg.norm(difference))
    assert found.direction == pytest.approx(1)


def test_the_true_gradient_is_that_of_large_groups_and_weighs_prompts_as_they_do():
    scores = np.eye(3)
    prompts = [Prompt.of(64, right, scores[:2]) if right == 1 else Prompt(samples=64, right=right) for right in (1, 0)]
    assert true_weight(prompts[0]) == pytest.approx(1 / 64) and true_weight(prompts[1]) == 0
    assert true_weight(Prompt(samples=1000, right=500)) == pytest.approx(
        mean_weight(Prompt(samples=1000, right=500), 1000, "mean_only"), rel=2e-3
    )
    seldom, often = Prompt(samples=64, right=4), Prompt(samples=64, right=32)
    apart = np.array([[1.0, 0.2], [0.2, 1.0]])  # the mean weighs them otherwise than std does
    of_std, of_mean = (quality(moments([seldom, often], 8, kind), apart, 1).direction for kind in ("std", "mean_only"))
    assert of_mean == pytest.approx(1) and of_std != pytest.approx(1, abs=1e-3)


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


def test_every_size_that_was_recorded_is_reported(recorded, capsys):
    assert group_size.main([f"recordings=[{recorded}]", "group_sizes=[2,3,6,8]"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[1:4] for row in rows] == [[str(size), "3", "0.1667"] for size in (2, 3, 6)]
    assert rows[-1][4] == "0.667"  # two of three prompts have a right sample


def test_recordings_give_what_the_docs_say(capsys):
    """docs/results/group_size.md."""
    files = [f"{DATA}/lengths/smollm2_135m_gsm8k_T0.8_{name}" for name in ("n32.jsonl.gz", "n8.jsonl")]
    assert group_size.main([f"recordings=[{','.join(files)}]"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[1], row[2], row[4][:4]) for row in rows] == [
        ("8", "34", "0.05"),
        ("32", "34", "0.11"),
        ("8", "128", "0.10"),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"scores": [0.5] * 6}, "scores of 0 and 1, got [0.5]"), ({"scores": None}, "scores of 0 and 1, got []")],
)
def test_bad_recordings_are_one_line_and_status_2(recorded, tmp_path, refused, change, message):
    (tmp_path / "bad.jsonl").write_text(json.dumps(json.loads(recorded.read_text().splitlines()[0]) | change) + "\n")
    assert message in refused(group_size.main, f"recordings=[{tmp_path / 'bad.jsonl'}]")


@pytest.fixture
def rare(tmp_path) -> Path:
    """A folder as scripts/build_kk_rare.py writes one, of the default experiment's policy."""
    asset = ROOT / "infsample_rl" / "assets" / "kk_tiny"
    (tmp_path / "policy").symlink_to(asset / "policy")
    for name, source in (("train", "train"), ("tuning", "test"), ("test", "test")):
        (tmp_path / f"{name}.jsonl").write_text("".join((asset / f"{source}.jsonl").open().readlines()[:8]))
    return tmp_path


SMALL = ("group_sizes=[2,4]", "samples=4", "prompts=4", "prompt_samples=8", "wrong=2")


def test_a_policy_is_measured_without_training_it(rare, capsys):
    assert group_size.main([f"rare={rare}", "seeds=[]", *SMALL]) == 0
    signal, gradient = capsys.readouterr().out.split("advantage")
    assert [line.split()[:3] for line in signal.splitlines()[1:]] == [["rare", str(size), "4"] for size in (2, 4)]
    rows = [line.split() for line in gradient.splitlines()[1:]]
    assert [row[:2] for row in rows] == [[kind, str(size)] for kind in ("std", "mean_only") for size in (2, 4)]
    assert all(0 < float(row[5]) < 1 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give recordings=[FILE.jsonl,...] or rare=FOLDER"),
        (("rare=/no/such",), "rare=/no/such has no policy"),
        (("rare={rare}", "group_sizes=[3]"), "group_sizes: 3 must divide samples=128"),
        (("rare={rare}", "prompt_samples=16"), "32 must divide samples=128 and be at most prompt_samples=16"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(rare, refused, arguments, message):
    assert message in refused(group_size.main, *(each.format(rare=rare) for each in arguments))


def test_group_sizes_are_compared_when_the_first_has_ended():
    def record(size, held_out, second):
        return {"side": f"G={size}", "lr": 1e-4, "seed": 0, "held_out": held_out, "seconds": [second] * 2}

    records = [record(8, [[0, 0.1], [1, 0.3], [2, 0.5]], 20.0), record(32, [[0, 0.1], [1, 0.2], [2, 0.6]], 10.0)]
    assert list(group_size.compare(records, ["G=8", "G=32", "G=128"])) == [
        "G=8: last 0.500 [0.500, 0.500] over 1 seeds; over all evaluations 0.300 [0.300, 0.300]; 40 s, "
        "after 20 s 0.300 [0.300, 0.300]",
        "G=32: last 0.600 [0.600, 0.600] over 1 seeds; over all evaluations 0.300 [0.300, 0.300]; 20 s, "
        "after 20 s 0.600 [0.600, 0.600]",
    ]


@pytest.mark.slow  # a policy, and whole runs
def test_every_group_size_trains_the_policy_of_the_script(tmp_path):
    script = [sys.executable, str(ROOT / "scripts" / "build_kk_rare.py"), "--steps", "1", "--batch", "2"]
    subprocess.run([*script, "--out", str(tmp_path / "rare")], cwd=ROOT, timeout=300, check=True)
    rows = {
        name: (tmp_path / "rare" / f"{name}.jsonl").read_text().splitlines() for name in ("train", "tuning", "test")
    }
    parsed = {name: [json.loads(row) for row in own] for name, own in rows.items()}
    assert {name: len(own) for name, own in rows.items()} == {"train": 2000, "tuning": 100, "test": 200}
    assert not any(all(row["solution"]) for own in parsed.values() for row in own)
    forms = [{row["form"] for row in own} for own in parsed.values()]
    assert not any(first & second for first, second in itertools.combinations(forms, 2))
    command = [sys.executable, "-m", "benchmarks.group_size", f"rare={tmp_path / 'rare'}", f"out={tmp_path / 'out'}"]
    command += [*SMALL, "seeds=[0]", "lrs=[1e-4]", "steps=2", "eval_every=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines() if line.startswith("G=")][:4] == [
        [side, "0.0001", seed] for side in ("G=2", "G=4") for seed in ("search", "0")
    ]
    assert (tmp_path / "out" / "group_size.png").is_file()


@pytest.mark.parametrize(
    ("there", "chunks", "left"),
    [
        (None, 0, None),
        ("1\n2\n3\n4\n", 2, "1\n2\n3\n4\n"),
        ("1\n2\n3\n", 1, "1\n2\n"),  # the whole chunk is sampled again
        ("1\n2\n3", 1, "1\n2\n"),
        ("1", 0, ""),
    ],
)
def test_a_recording_that_was_stopped_is_cut_back_to_whole_chunks(there, chunks, left, tmp_path):
    out = tmp_path / "recording.jsonl"
    if there is not None:
        out.write_text(there)
    assert record_completions.whole_chunks(out, 2) == chunks
    assert (out.read_text() if out.exists() else None) == left


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["out=x.jsonl"], "give dataset=NAME"),
        (["dataset=kk"], "give out=FILE.jsonl"),
        (["out=x.jsonl", "dataset=kk", "second=3"], "second is no argument; did you mean seconds=...?"),
        (["out=x.jsonl", "dataset=kk", "rollout.group=2"], "rollout.group is not a setting"),
    ],
)
def test_a_recording_is_refused_in_one_line(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["record_completions.py", *arguments])
    assert record_completions.main() == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


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

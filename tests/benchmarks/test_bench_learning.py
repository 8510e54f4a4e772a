"""benchmarks.learning: the problems apart, both sides on the same prompts, and a command that goes on where it was
cut."""

import json
from itertools import combinations

import pytest

from benchmarks import learning
from benchmarks.learning_reward import last_number


def test_the_reward_is_one_for_the_right_last_number():
    said = ["7 times 8 is 56.", "56, or 54", "", "8 * 7 = 56"]
    assert last_number([], said, ["56"] * 4) == [1.0, 0.0, 0.0, 1.0]


def test_no_pair_of_factors_is_in_two_parts(tmp_path):
    learning.write_problems(tmp_path)
    parts = {}
    for name in ("trained", "held_out", "tuning"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert all(row["answer"] == str(eval(row["question"][8:-1].replace("times", "*"))) for row in rows)
        parts[name] = {frozenset(row["question"][8:-1].split(" times ")) for row in rows}
    assert sum(map(len, parts.values())) == 55
    assert not any(first & second for first, second in combinations(parts.values(), 2))


def record(side, seed, held_out, seconds):
    return {"side": side, "lr": 1e-5, "seed": seed, "held_out": held_out, "seconds": seconds, "rewards": [0.5, 0.6]}


def test_what_is_compared(tmp_path):
    runs = ((0, 0.5, 40.0), (1, 0.7, 50.0), (2, 0.6, 60.0))
    trl = [record("trl", seed, [[0, 0.2], [2, last]], [50.0, last_s]) for seed, last, last_s in runs]
    ours = [
        record("ours", 0, [[0, 0.2], [1, 0.6], [2, 0.8]], [10.0, 12.0]),
        record("ours", 1, [[0, 0.2]], [10.0]),
        record("ours", 2, [[0, 0.2], [1, 0.8]], [100.0]),
    ]
    assert list(learning.compare([*ours, *trl])) == [
        "ours: last 0.600 [0.200, 0.800] over 3 seeds",
        "trl: last 0.600 [0.500, 0.700] over 3 seeds",
        "ours, seed 0: TRL's mean of 0.600 after 10 s, 0.10 [0.09, 0.11] of TRL's 100",
        "ours, seed 1: TRL's mean of 0.600 never",
        "ours, seed 2: TRL's mean of 0.600 after 100 s, not told apart from TRL's 100",
    ]
    assert learning.draw([ours[0], *trl], learning.COLORS, tmp_path / "learning.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("model=nowhere", "model=nowhere: give a folder with a model"),
        ("trl_rows=7", "trl_rows=7 does not divide a step of 64 samples"),
        ("rivals.trl_python=/no/such", "give the path of one that has TRL, or sides=[ours]"),
        ("lrs=[0]", "must be > 0"),
    ],
)
def test_bad_arguments_end_with_one_line_and_status_2(argument, said, refused, tiny_qwen3):
    given = [f"model={tiny_qwen3}", *([] if "trl_python" in argument else ["sides=[ours]"]), argument]
    assert said in refused(learning.main, *given)


@pytest.mark.peers
def test_both_sides_train_on_the_same_and_a_second_command_finds_them_done(tiny_qwen3, tmp_path, monkeypatch, capfd):
    sizes = ["steps=2", "eval_every=1", "eval_samples=1", "prompts_per_step=2", "group_size=4", "max_new_tokens=8"]
    arguments = [f"model={tiny_qwen3}", *sizes, "seeds=[0]", "lrs=[1e-4]", "trl_rows=4", f"out={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["learning", *arguments])
    assert learning.main() == 0, capfd.readouterr().err
    runs = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {name.split("_")[0] for name in runs} == {"ours", "trl"} and len(runs) == 4
    for run in runs.values():
        assert [step for step, _ in run["held_out"]] == [0, 1, 2] and len(run["seconds"]) == len(run["rewards"]) == 2
    said = capfd.readouterr()
    assert "over 1 seeds" in said.out and (tmp_path / "learning.png").is_file()
    assert learning.main() == 0
    assert capfd.readouterr().out == said.out
    monkeypatch.setattr("sys.argv", ["learning", *arguments, "steps=3"])
    assert learning.main() == 2 and "is of other settings or code; give another folder" in capfd.readouterr().err

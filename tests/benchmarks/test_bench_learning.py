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
    run = {"side": side, "lr": 1e-5, "seed": seed}
    return run | {"held_out": held_out, "seconds": seconds, "rewards": [0.5] * len(seconds)}


def curves(side, accuracies, seconds=10.0):
    """A run for every seed, each with an evaluation of each step."""
    return [record(side, seed, list(enumerate(each)), [seconds] * (len(each) - 1)) for seed, each in accuracies.items()]


SAME = dict.fromkeys(range(3), [0.2, 0.5, 0.7, 0.7, 0.7])


@pytest.mark.parametrize(
    ("ours", "trl", "said"),
    [
        (  # the first of several steps at the level counts on both sides
            curves("ours", SAME),
            curves("trl", SAME),
            [
                "ours: last 0.700 [0.700, 0.700] over 3 seeds",
                "trl: last 0.700 [0.700, 0.700] over 3 seeds",
                "ours: first at 0.700 after 20, 20, 20 s, whole runs 40, 40, 40 s",
                "trl: first at 0.700 after 20, 20, 20 s, whole runs 40, 40, 40 s",
                "ours / TRL: seconds to 0.700 not told, of whole runs not told",
            ],
        ),
        (  # the level is where TRL's end
            curves("ours", SAME, 5.0),
            curves("trl", dict.fromkeys(range(3), [0.2, 0.3, 0.4, 0.5, 0.5])),
            [
                "ours: first at 0.500 after 5, 5, 5 s, whole runs 20, 20, 20 s",
                "trl: first at 0.500 after 30, 30, 30 s, whole runs 40, 40, 40 s",
                "ours / TRL: seconds to 0.500 0.17 [0.17, 0.17], of whole runs 0.50 [0.50, 0.50]",
            ],
        ),
        (  # a run never there, and one there before its first step
            curves("ours", {0: [0.2, 0.4], 1: [0.2, 0.6], 2: [0.9, 0.5]}, 5.0),
            curves("trl", dict.fromkeys(range(3), [0.2, 0.7])),
            [
                "ours: first at 0.700 after never, never, 0 s, whole runs 5, 5, 5 s",
                "trl: first at 0.700 after 10, 10, 10 s, whole runs 10, 10, 10 s",
                "ours / TRL: seconds to 0.700 not told, of whole runs 0.50 [0.50, 0.50]",
            ],
        ),
    ],
)
def test_both_sides_are_compared_at_their_first_evaluation_at_one_level(ours, trl, said, tmp_path):
    assert list(learning.compare([*ours, *trl]))[-len(said) :] == said
    assert learning.draw([*ours, *trl], learning.COLORS, tmp_path / "learning.png").stat().st_size > 10_000


def test_no_seed_is_one_of_searches(tmp_path):
    def train(run):
        return {"rewards": [0.5], "seconds": [1.0], "held_out": [[0, 0.1], [1, 0.2]]}

    study = learning.Study(folder=tmp_path, settings={}, train=train)
    found, whole = study.run(["ours"], [1e-5], [99, 100])
    assert whole and [each["seed"] for each in learning.measured(found)] == [99, 100]
    assert [learning.row_of(each)["seed"] for each in found] == ["search", 99, 100]


def test_of_rates_that_end_alike_the_one_that_learns_sooner_is_taken(tmp_path):
    def train(run):
        middle = {1e-5: 0.3, 2e-5: 0.7, 3e-5: 0.6, 4e-5: 0.9}[run.lr]
        end = 0.7 if run.lr == 4e-5 else 0.8
        return {"rewards": [0.5] * 2, "seconds": [1.0] * 2, "held_out": [[0, 0.1], [1, middle], [2, end]]}

    study = learning.Study(folder=tmp_path, settings={}, train=train)
    found, _ = study.run(["ours"], [1e-5, 2e-5, 3e-5, 4e-5], [0])
    assert [each["lr"] for each in learning.measured(found)] == [2e-5]


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


def test_runs_of_other_threads_or_micro_batches_are_not_compared(tiny_qwen3):
    first, *others = (
        learning.settings_of(learning.LearningOptions(model=str(tiny_qwen3), sides=["ours"], **changed))
        for changed in ({"threads": 1}, {"threads": 2}, {"threads": 1, "trl_rows": 4})
    )
    assert first not in others


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

"""benchmarks.turns: our engine and vLLM on the same trajectories, with the waits that are asked for."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from benchmarks import turns, turns_point
from benchmarks.rival_settings import VLLM_BLOCK
from benchmarks.turns import TurnsBenchmark, TurnsOptions
from benchmarks.workload import TINY_POLICY
from infsample_rl.cluster.rollout_interpreter import MADE_HERE


@pytest.fixture
def options(tiny_qwen3) -> TurnsOptions:
    """Four trajectories of a tiny model, which wait 0.2 s at most."""
    sizes = {"num_prompts": 2, "group_size": 2, "max_new_tokens": 96, "prompt_tokens": 20, "scale": 128}
    return TurnsOptions(model=str(tiny_qwen3), threads=1, longest_tool=0.2, repeats=1, device="cpu", **sizes)


def measured_here(monkeypatch) -> None:
    monkeypatch.setattr(turns, "measure", lambda name, spec, **limits: turns_point.main(spec))


def test_turns_and_observations_are_those_of_the_script_and_ends_take_their_time(options, monkeypatch):
    measured_here(monkeypatch)
    benchmark = TurnsBenchmark(options)
    record = benchmark.ours(0)
    followed, script = benchmark._trajectories(), options.script()
    assert [each["prompt"] for each in followed] == [0, 0, 1, 1] and record["trajectories"] == 4
    assert record["tokens"] == sum(sum(each["lengths"]) for each in followed) and record["recomputed_tokens"] == 0
    assert all(sum(each["observed"]) <= 96 + len(each["observed"]) for each in script)
    waited = []
    for each, planned in zip(followed, script, strict=True):
        between = len(each["lengths"]) - 1
        observed = sum(planned["observed"][:between])
        assert each["seconds"] == planned["seconds"] and max(each["seconds"], default=0) <= 0.2
        assert sum(each["lengths"]) + observed <= 96
        assert (
            between == len(planned["observed"]) or sum(each["lengths"]) + sum(planned["observed"][: between + 1]) >= 96
        )
        waited.append(sum(planned["seconds"][:between]))
    assert record["turns"] > 1 and record["seconds"] > max(waited) > 0


def test_observations_are_the_same_ids_everywhere_and_of_the_words_that_are_told():
    class Row:
        group, sample_index, tokens = SimpleNamespace(prompt_index=1), 1, [7, 8]

    script = [{"observed": [], "seconds": []}] * 3 + [{"observed": [3], "seconds": [0.0]}]
    answering = turns_point.ScriptedTurns(script, 2, [50, 60])
    answering.end(Row(), "stop")
    (answer,) = answering.take(wait_s=0.0)
    assert list(answer.observed) == random.Random("3/0").choices(range(50, 60), k=3) and answer.episode is None
    Row.tokens = [7, 8, *answer.observed, 9]
    answering.end(Row(), "stop")
    (answer,) = answering.take(wait_s=0.0)
    assert answer.episode.turns == 2 and answering.lengths[3] == [2, 1]


def test_a_trajectory_whose_observation_has_no_room_ends_with_the_turns_that_it_has():
    class Row:
        group, sample_index, tokens = SimpleNamespace(prompt_index=0), 0, [7, 8]

    answering = turns_point.ScriptedTurns([{"observed": [3, 3], "seconds": [0.0, 0.0]}], 1, [50, 60])
    answering.end(Row(), "stop")
    answering.take(wait_s=0.0)
    answering.end(Row(), "length")
    assert answering.take(wait_s=0.0)[0].episode.turns == 1 and answering.lengths == [[2]]


def test_the_budget_is_whole_blocks_of_vllm():
    budget = TurnsOptions(slots=3, max_new_tokens=1000, num_prompts=2, prompt_tokens=7).kv_budget_tokens()
    assert budget % VLLM_BLOCK == 0 and 0 <= budget - 3014 < VLLM_BLOCK


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("rivals.vllm_python=nowhere/python", "nowhere/python: there is no such interpreter"),
        ("scale=0", "scale=0: must be >= 1"),
        ("rivals.vllm_python=python3 shape=qwen3_1.7b", "rivals.vllm_python needs a model, got shape=qwen3_1.7b"),
        ("max_new_tokens=16 scale=8", "max_new_tokens=16 x scale=8 must be >= 256"),
    ],
)
def test_bad_arguments_are_one_line(refused, argument, said):
    assert said in refused(turns.main, *argument.split())


@pytest.mark.slow
def test_vllm_follows_the_same_trajectories(options, monkeypatch):
    assert MADE_HERE.exists(), "make vllm makes the interpreter, which make test-all does before"
    measured_here(monkeypatch)
    options.vllm_python, options.model = str(MADE_HERE), TINY_POLICY  # the tiny Qwen3's heads of 16 are none for vLLM
    benchmark = TurnsBenchmark(options)
    ours = benchmark.ours(0)
    benchmark._fastest = {"enforce_eager": True, "omp_bind": "nobind"}
    vllm = benchmark.vllm(0)
    assert vllm["tokens"] == ours["tokens"] and vllm["kv_pool_bytes"] == pytest.approx(ours["kv_pool_bytes"], rel=0.1)
    assert vllm["seconds"] > max(sum(each["seconds"][: len(each["lengths"]) - 1]) for each in benchmark._trajectories())
    assert vllm["recomputed_tokens"] > 0

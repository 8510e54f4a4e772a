"""The schedules on recorded lengths, at the KV memory of four slots: steps beside the fixed slots', bounds, recomputed
tokens."""

from pathlib import Path

import pytest

from infsample_rl.commands.schedule_workload import SimulateOptions, calls_of, load, simulate_call
from infsample_rl.rollout.length_prediction.recordings import read_recordings
from infsample_rl.rollout.simulator import simulate, slot_bound, token_bound

LENGTHS = Path(__file__).parents[2] / "data" / "lengths"
LLAMA = ("llama3b_rgrl_step400_aime2024_n50", "llama3b_rgrl_step400_amc23_n50")
CAP = 2048


def groups_of(name, group_size=32):
    return [recording.lengths[:group_size] for recording in read_recordings(LENGTHS / f"{name}.jsonl")]


def mean_steps(groups, schedule, **options):
    return sum(simulate(lengths, schedule, **options).running_steps for lengths in groups) / len(groups)


@pytest.mark.parametrize("name", LLAMA)
def test_longest_first_nearly_reaches_the_bound_and_shortest_first_does_not(name):
    groups = groups_of(name)
    lpt, infinite = mean_steps(groups, "lpt"), mean_steps(groups, "infinite")
    assert lpt <= 1.02 * sum(slot_bound(lengths, 4) for lengths in groups) / len(groups)
    assert lpt <= 0.92 * infinite


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=pytest.mark.slow if "codegen" in path.name else ())
        for path in sorted(LENGTHS.glob("*.jsonl*"))
    ],
)
def test_the_papers_schedule_takes_at_most_a_twentieth_more_than_arrival(name):
    options = SimulateOptions(lengths=[name])
    workload = load(LENGTHS / name, options)
    steps = {
        (schedule, sigma): sum(
            simulate_call(workload, options, call, schedule, sigma).running_steps
            for call in calls_of(workload, options)
        )
        for schedule, sigma in (("arrival", None), ("infinite", 0.0), ("infinite", 0.5), ("infinite", 1.0))
    }
    assert max(steps.values()) <= 1.05 * steps["arrival", None]


def check_steps(groups, ours, cap, recomputed_share):
    """Few beside `infinite` with true lengths and beside the bound, within the memory, and few tokens computed
    again."""
    steps = sum(result.running_steps for result in ours)
    assert steps <= 0.45 * mean_steps(groups, "infinite", max_new_tokens=cap) * len(groups)
    assert steps <= 1.2 * sum(token_bound(lengths, 4 * cap) for lengths in groups)
    assert sum(result.recomputed_tokens for result in ours) <= recomputed_share * sum(map(sum, groups))
    assert max(result.peak_kv_tokens for result in ours) <= 4 * cap


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", LLAMA)
def test_tokens_instead_of_slots_take_less_than_half_the_steps(name, page_size):
    groups = groups_of(name)
    ours = [simulate(lengths, "token_budget", slots=4, page_size=page_size, max_new_tokens=CAP) for lengths in groups]
    check_steps(groups, ours, CAP, 0.2)


PARKED = [
    pytest.param(path, size, marks=pytest.mark.slow if size > 32 else ())
    for path in sorted(LENGTHS.glob("*.jsonl*"))
    for size in (32, 50, 100)
    if len(read_recordings(path)[0].lengths) >= size
]


@pytest.mark.parametrize(("path", "group_size"), PARKED, ids=lambda given: getattr(given, "name", given))
def test_with_parked_kv_every_recording_of_32_samples_stays_near_its_bound(path, group_size):
    groups = [recording.lengths[:group_size] for recording in read_recordings(path)]
    cap = read_recordings(path)[0].max_new_tokens or max(map(max, groups))
    ours = [simulate(lengths, "token_budget", slots=4, max_new_tokens=cap, parks=True) for lengths in groups]
    check_steps(groups, ours, cap, 0.01)
    assert sum(result.parked_tokens for result in ours) > 0

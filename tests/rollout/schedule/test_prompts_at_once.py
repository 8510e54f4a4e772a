"""Prompts that share a pool: it is kept full, and no schedule takes longer for it. Recorded and random lengths, no
model."""

import random
import statistics
from pathlib import Path

import pytest

from infsample_rl.config.fields import kv_pages
from infsample_rl.config.rollout import SCHEDULES
from infsample_rl.rollout.length_prediction.recordings import read_recordings
from infsample_rl.rollout.simulator import simulate_prompts, token_bound

RECORDED = sorted((Path(__file__).resolve().parents[2] / "data" / "lengths").glob("*.jsonl*"))
FEWEST_SAMPLES = 600  # of a stream that is simulated, in whole prompts


@pytest.mark.parametrize("slots", [4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.split(".jsonl")[0])
def test_an_endless_stream_of_prompts_takes_little_more_than_its_memory_allows(path, slots):
    """What a second pass over the prompts adds is free of start and tail; prompts take no part of the budget here."""
    recordings = read_recordings(path)
    cap = max(max(recording.max_new_tokens or 0, *recording.lengths) for recording in recordings)
    prompts, samples = [], 0
    for recording in recordings * FEWEST_SAMPLES:
        prompts.append(recording.lengths[:32])
        samples += len(prompts[-1])
        if samples >= FEWEST_SAMPLES:
            break

    def steps(passes):
        found = simulate_prompts(
            prompts * passes, "token_budget", kv_budget_tokens=slots * cap, max_new_tokens=cap, parks=True
        )
        assert found.peak_kv_tokens <= slots * cap
        return found.running_steps

    bound = token_bound([length for lengths in prompts for length in lengths], slots * cap)
    assert steps(2) - steps(1) <= 1.2 * bound


def random_workload(draw, slots=(1, 6)):
    """Lengths of prompts, and a pool that holds a full response of every slot and one prompt, or a little more."""
    page_size, cap, size = draw.choice([1, 4, 16]), draw.randint(1, 200), draw.choice([1, 2, 3, 8, 16])
    groups = [[draw.choice([1, cap, draw.randint(1, cap)]) for _ in range(size)] for _ in range(draw.randint(2, 6))]
    prompts = [draw.choice([0, draw.randint(1, 60)]) for _ in groups]
    slots = draw.randint(*slots)
    pages = kv_pages(slots, cap, [max(prompts)], page_size) + draw.choice([0, 1, draw.randint(0, 30)])
    predicted = [[draw.uniform(1, cap) for _ in lengths] for lengths in groups]
    sizes = {"slots": slots, "page_size": page_size, "prompt_tokens": prompts, "max_new_tokens": cap}
    return groups, sizes | {"kv_budget_tokens": pages * page_size, "predicted": predicted}


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "token_budget"])
def test_prompts_together_never_take_more_steps_than_one_after_another(schedule):
    for seed in range(150):
        groups, settings = random_workload(random.Random(seed))
        alone = simulate_prompts(groups, schedule, prompts_at_once=1, **settings).running_steps
        for together in (2, None):
            found = simulate_prompts(groups, schedule, prompts_at_once=together, **settings).running_steps
            assert found <= alone, (seed, together)


@pytest.mark.parametrize(
    ("slots", "workloads", "longer"), [((1, 6), 150, 5), pytest.param((4, 8), 2500, 1, marks=pytest.mark.slow)]
)
def test_prompts_together_take_hardly_ever_more_steps_of_token_budget_and_far_fewer_in_the_mean(
    slots, workloads, longer
):
    """Which samples run together follows from which have ended, so a head start may, rarely, make the whole longer."""
    ratios = []
    for seed in range(workloads):
        groups, settings = random_workload(random.Random(seed), slots)
        settings = {name: value for name, value in settings.items() if name not in ("slots", "predicted")}
        alone = simulate_prompts(groups, "token_budget", prompts_at_once=1, parks=True, **settings)
        together = simulate_prompts(groups, "token_budget", parks=True, **settings)
        ratios.append(together.running_steps / alone.running_steps)
    assert max(ratios) <= 1.05 and sum(ratio > 1 for ratio in ratios) <= longer
    assert statistics.mean(ratios) <= 0.7

"""Simulation in strides is simulation step by step: same counts, same ends, on random workloads."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infsample_rl.config.rollout import SCHEDULES
from infsample_rl.rollout import simulator
from infsample_rl.rollout.simulator import simulate_prompts


@st.composite
def workloads(draw, by_budget):
    """Several prompts with samples of random lengths in a pool between the smallest that will do and a roomy one."""
    cap, page_size = draw(st.integers(1, 60)), draw(st.sampled_from([1, 3, 16]))
    group_size = draw(st.integers(1, 9))
    groups = draw(
        st.lists(st.lists(st.integers(1, cap), min_size=group_size, max_size=group_size), min_size=1, max_size=4)
    )
    prompts = draw(st.lists(st.integers(0, 20), min_size=len(groups), max_size=len(groups)))
    smallest = (-(-max(prompts) // page_size) + -(-cap // page_size)) * page_size
    chance = draw(st.sampled_from(["none", "lengths", "again"]))
    numbers = st.floats(0.5, 100)
    predicted = [[draw(numbers) for _ in lengths] for lengths in groups] if chance == "lengths" else None
    moments = st.dictionaries(st.integers(1, cap), numbers, max_size=3)
    again = by_budget and chance == "again"
    repredicted = [[draw(moments) for _ in lengths] for lengths in groups] if again else None
    return groups, {
        "slots": draw(st.integers(1, 5)),
        "prompts_at_once": draw(st.integers(1, 3)),
        "kv_budget_tokens": smallest + draw(st.sampled_from([0, 0, 1, page_size, 50, 150])),
        "page_size": page_size,
        "prompt_tokens": prompts,
        "max_rows": draw(st.sampled_from([None, None, 2])) if by_budget else None,
        "max_new_tokens": cap,
        "predicted": predicted,
        "repredicted": repredicted,
        "parks": by_budget and draw(st.booleans()),
        "record_rows": True,
    }


def step_by_step(monkeypatch, groups, schedule, arguments):
    with monkeypatch.context() as patch:
        patch.setattr(simulator, "repeat_steps", lambda planner, most: 0)
        return simulate_prompts(groups, schedule, **arguments)


@pytest.mark.parametrize("schedule", ["token_budget", "other"])
def test_strides_change_nothing(schedule, monkeypatch):
    @settings(max_examples=250 if schedule == "token_budget" else 150, deadline=None, derandomize=True)
    @given(
        workloads(schedule == "token_budget"), st.sampled_from([name for name in SCHEDULES if name != "token_budget"])
    )
    def check(workload, other):
        groups, arguments = workload
        name = other if schedule == "other" else schedule
        assert simulate_prompts(groups, name, **arguments) == step_by_step(monkeypatch, groups, name, arguments)

    check()


def test_strides_change_nothing_where_many_are_preempted(monkeypatch):
    draw, preempted = random.Random(0), 0
    for page_size, num_groups in ((1, 1), (16, 2), (1, 2), (16, 1), (3, 3)) * 3:
        groups = [[min(200, round(draw.lognormvariate(4.5, 0.8)) + 1) for _ in range(24)] for _ in range(num_groups)]
        for parks in (False, True):
            arguments = {
                "slots": 3,
                "page_size": page_size,
                "max_new_tokens": 200,
                "parks": parks,
                "record_rows": True,
            }
            fast = simulate_prompts(groups, "token_budget", **arguments)
            assert fast == step_by_step(monkeypatch, groups, "token_budget", arguments)
            preempted += fast.preemptions
    assert preempted > 100

"""Schedules over known lengths, and the engine's steps beside the simulator's."""

import warnings

import pytest

from infsample_rl.config import RolloutConfig
from infsample_rl.rollout.engine import SamplingEngine
from infsample_rl.rollout.simulator import simulate

LENGTHS = [6, 1, 4, 2, 5, 3]


def test_a_worked_example():
    result = simulate(LENGTHS, "arrival", slots=2)
    # slot 0: sample 0 to step 6, then 4 to 11; slot 1: sample 1 to step 1, 2 to 5, 3 to 7, 5 to 10
    assert result.running_steps == 11 and result.busy_row_steps == sum(LENGTHS)
    assert result.completed == [1, 2, 0, 3, 5, 4]
    assert result.finish_steps == [1, 5, 6, 7, 10, 11]
    assert result.peak_kv_tokens <= 2 * 6 and (result.preemptions, result.recomputed_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [("full_group", 6), ("naive", 6 + 4 + 5), ("fixed_slot", 6 + 4 + 5), ("lpt", 11), ("sjf", 12), ("fptas", 11)],
)
def test_running_steps_of_two_slots(schedule, steps):
    assert simulate(LENGTHS, schedule, slots=2).running_steps == steps


def test_orders_take_the_predictions_where_there_are_some():
    longest_last = [-length + 10 for length in LENGTHS]
    assert simulate(LENGTHS, "lpt", slots=2, predicted=longest_last).running_steps == simulate(LENGTHS, "sjf", slots=2).running_steps


def test_dynamic_slot_stops_at_the_group_size_th_finish():
    result = simulate(LENGTHS, "dynamic_slot", slots=3, group_size=3)
    assert result.completed == [1, 3, 2]  # 1 ends at step 1; slot 1 goes on with 3, which ends at 3; 2 ends at 4
    assert result.running_steps == 4


def test_token_budget_runs_as_many_rows_as_pages_allow():
    result = simulate([8] * 8, "token_budget", slots=2)
    assert result.peak_kv_tokens <= 16
    assert result.busy_row_steps == 64
    assert result.running_steps < simulate([8] * 8, "arrival", slots=2).running_steps == 32
    assert simulate([8] * 8, "token_budget", slots=8, max_rows=3).running_steps == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": []}, "lengths must be positive"),
        ({"lengths": [3, 0]}, "lengths must be positive"),
        ({"schedule": "fastest"}, "schedule must be one of token_budget"),
        ({"kv_budget_tokens": 5}, "kv_budget_tokens must be >= 6"),
        ({"kv_budget_tokens": 15, "prompt_tokens": 10}, "kv_budget_tokens must be >= 16"),
        ({"predicted": [1.0]}, "predicted must have one length"),
        ({"slots": 0}, "slots must be >= 1"),
        ({"group_size": 7}, "group_size must be <= the 6 given lengths"),
        ({"max_new_tokens": 5}, "max_new_tokens must be >= the longest"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate(**({"lengths": LENGTHS, "schedule": "arrival", "slots": 2} | arguments))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("schedule", ["token_budget", "arrival", "naive", "fixed_slot", "full_group", "lpt", "sjf", "infinite", "fptas"])
def test_the_engine_takes_as_many_steps_as_the_simulator(make_model, tokenizer, schedule, page_size):
    config = RolloutConfig(group_size=12, slots=2, max_new_tokens=24, schedule=schedule, page_size=page_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = SamplingEngine(make_model(), tokenizer, config, stop_token_ids={3, 17, 40})
    prompt = [5, 9, 7, 30, 2]
    group = engine.generate([prompt], seed=4)[0]
    lengths = [len(completion.token_ids) for completion in group]
    assert len(set(lengths)) > 3
    equal = None if schedule == "token_budget" else [1.0] * 12  # without a predictor
    result = simulate(lengths, schedule, slots=2, predicted=equal, page_size=page_size, prompt_tokens=5, max_new_tokens=24)
    stats = engine.stats
    assert (stats.running_steps, stats.preemptions, stats.recomputed_tokens) == (result.running_steps, result.preemptions, result.recomputed_tokens)
    assert stats.peak_kv_bytes == result.peak_kv_tokens * 2 * 2 * 2 * 16 * 4

"""Schedules over known lengths, and the engine's steps beside the simulator's."""

import math
import random
import warnings

import numpy as np
import pytest

from infsample_rl.config.rollout import SCHEDULES, RolloutConfig
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine
from infsample_rl.rollout.simulator import Stay, simulate, simulate_prompts

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
    assert (
        simulate(LENGTHS, "lpt", slots=2, predicted=longest_last).running_steps
        == simulate(LENGTHS, "sjf", slots=2).running_steps
    )


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


def test_rows_are_recorded_from_first_to_last_step():
    # as in the worked example: slot 0 decodes samples 0 and 4, slot 1 samples 1, 2, 3 and 5
    stays = simulate(LENGTHS, "arrival", slots=2, record_rows=True).stays
    assert stays == [
        Stay(0, 1, 0, 1, 1),
        Stay(0, 2, 1, 5, 1),
        Stay(0, 0, 0, 6, 0),
        Stay(0, 3, 5, 7, 1),
        Stay(0, 5, 7, 10, 1),
        Stay(0, 4, 6, 11, 0),
    ]
    assert simulate(LENGTHS, "arrival", slots=2).stays == []


def test_a_preempted_sample_has_two_stays_and_a_rebuild_takes_a_step_between():
    # 8 tokens of KV: three rows hold 2 each in step 3, two 4 each in step 5, one 7 in step 8; then a rebuild step and
    # the rest of 2 and of 1
    result = simulate([8, 8, 8], "token_budget", kv_budget_tokens=8, record_rows=True)
    assert [(stay.sample, stay.start, stay.end) for stay in result.stays] == [
        (2, 0, 3),
        (1, 0, 5),
        (0, 0, 8),
        (2, 9, 14),
        (1, 15, 18),
    ]
    assert (result.running_steps, result.preemptions, result.busy_row_steps, result.most_rows) == (18, 2, 24, 3)


def test_several_prompts_fill_the_rows_that_one_leaves_idle():
    groups = [[6, 1], [3, 3]]
    alone = [simulate(lengths, "arrival", slots=2).running_steps for lengths in groups]
    assert alone == [6, 3]
    together = simulate_prompts(groups, "arrival", slots=2, prompts_at_once=2)
    # sample 1 of prompt 0 ends at 1, prompt 1's samples follow in its slot until 4 and, in slot 1 again, until 7
    assert (together.completed_prompts, together.completed, together.finish_steps) == (
        [0, 1, 0, 1],
        [1, 0, 0, 1],
        [1, 4, 6, 7],
    )
    assert simulate_prompts(groups, "arrival", slots=2, prompts_at_once=1).running_steps == 9


def test_pages_are_kept_back_while_another_prompt_has_samples_left(monkeypatch):
    draw = random.Random(3)
    groups = [[min(300, 1 + int(draw.expovariate(1 / 60))) for _ in range(60)] for _ in range(8)]

    def both():
        alone = sum(simulate(lengths, "token_budget", max_new_tokens=300).recomputed_tokens for lengths in groups)
        return alone, simulate_prompts(groups, "token_budget", max_new_tokens=300).recomputed_tokens

    alone, together = both()
    monkeypatch.setattr("infsample_rl.rollout.schedule.token_budget.SHARE_WHILE_OTHERS_WAIT", 1.0)
    all_alone, all_together = both()
    assert alone == all_alone and together < 0.8 * all_together


def test_prompts_share_one_pool_and_their_own_tokens_count():
    result = simulate_prompts(
        [[4, 4], [4, 4]], "arrival", slots=2, prompts_at_once=2, prompt_tokens=[3, 5], page_size=2
    )
    assert result.kv_pool_tokens == 2 * 4 + 4 + 6
    # two rows of 3 tokens in 2 pages each beside the second prompt; the first has left
    assert result.peak_kv_tokens == 2 * 4 + 6
    with pytest.raises(ValueError, match="prompt_tokens must be >= 0, one number or one for each of the 2 prompts"):
        simulate_prompts([[4], [4]], "arrival", prompt_tokens=[3])


def test_predictions_while_decoding_change_who_gives_way():
    # 3 rows and 20 tokens: when pages run out, one of the last two must go; with predictions it is the one about to end
    lengths = [9, 9, 9]
    keeps_1 = [{1: 9.0}, {1: 90.0}, {1: 2.0}]
    keeps_2 = [{1: 9.0}, {1: 2.0}, {1: 90.0}]
    options = {"kv_budget_tokens": 18, "max_new_tokens": 9}
    ends = [simulate(lengths, "token_budget", repredicted=moments, **options) for moments in (keeps_1, keeps_2)]
    assert [result.completed[-1] for result in ends] == [2, 1] and all(result.preemptions for result in ends)


def test_orders_take_the_first_prediction_while_decoding_where_no_other_is_given():
    moments = [{2: 10.0, 4: 1.0}, {}, {2: 30.0}, {2: 20.0}, {5: 15.0}, {2: 25.0}]
    first = [10.0, 1.0, 30.0, 20.0, 15.0, 25.0]  # sample 1 ended before it had one: its own length
    assert simulate(LENGTHS, "lpt", slots=2, repredicted=moments) == simulate(LENGTHS, "lpt", slots=2, predicted=first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": []}, "lengths must be positive"),
        ({"lengths": [3, 0]}, "lengths must be positive"),
        ({"schedule": "fastest"}, "schedule must be one of token_budget"),
        ({"kv_budget_tokens": 5}, "kv_budget_tokens must be >= 6"),
        ({"kv_budget_tokens": 15, "prompt_tokens": 10}, "kv_budget_tokens must be >= 16"),
        ({"predicted": [1.0]}, "predicted must have one length"),
        ({"repredicted": [{1: 2.0}]}, "repredicted must have one length"),
        ({"repredicted": [{0: 2.0}] * 6}, "repredicted must be made at 1 token or later, got 0"),
        ({"slots": 0}, "slots must be >= 1"),
        ({"group_size": 7}, "group_size must be <= the 6 given lengths"),
        ({"group_size": 4}, "group_size=4 is not read by schedule arrival, which decodes all 6 lengths"),
        ({"max_rows": 4}, "max_rows=4 is not read by schedule arrival"),
        (
            {"lengths": [3, 2.5]},
            "lengths must be positive whole numbers of at most 2147483648 tokens, got 2.5 for sample 1",
        ),
        ({"lengths": [math.nan, 2]}, "got nan for sample 0"),
        ({"lengths": [3, 2**31 + 1]}, "got 2147483649 for sample 1"),
        (
            {"predicted": [1.0, None, 1.0, 1.0, 1.0, 1.0]},
            "predicted must be finite and > 0 tokens, got None for sample 1",
        ),
        ({"slots": 2.5}, "slots must be >= 1 and whole, got 2.5"),
        ({"kv_budget_tokens": math.nan}, "kv_budget_tokens must be >= 1 and whole, got nan"),
        ({"max_new_tokens": 5}, "max_new_tokens must be >= the longest"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate(**({"lengths": LENGTHS, "schedule": "arrival", "slots": 2} | arguments))


def test_numpy_arrays_are_taken_for_lengths_and_predictions():
    predicted = np.array([4.0, 9, 6, 8, 5, 7], np.float32)
    for schedule in ("lpt", "infinite", "token_budget"):
        assert simulate(np.array(LENGTHS), schedule, slots=2, predicted=predicted) == simulate(
            LENGTHS, schedule, slots=2, predicted=list(predicted)
        )


def test_each_prompt_of_a_dynamic_slot_call_keeps_its_own_size():
    result = simulate_prompts([[3, 1, 2, 4], [2, 2]], "dynamic_slot", slots=1, group_size=[2, 1])
    assert list(zip(result.completed_prompts, result.completed, strict=True)) == [(0, 0), (0, 1), (1, 0)]
    with pytest.raises(ValueError, match="group_size must be one number or one for each of the 2 prompts"):
        simulate_prompts([[3], [2]], "dynamic_slot", group_size=[1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_hundred_million_slots_are_as_good_as_one_per_sample(schedule):
    found = simulate(LENGTHS, schedule, slots=100_000_000)
    assert found.running_steps == (1 if schedule == "dynamic_slot" else 6)  # six times the sample of one token
    assert found.kv_pool_tokens == 6 * (6 if schedule == "full_group" else 100_000_000)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("parks", [False, True])
def test_the_engine_takes_as_many_steps_and_parks_as_much_as_the_simulator(
    make_model, tokenizer, disk_folder, parks, page_size
):
    placed = {"preemption": str(disk_folder)} if parks else {"preemption": "recompute"}
    config = RolloutConfig(group_size=12, slots=2, max_new_tokens=24, page_size=page_size, **placed)
    engine = SamplingEngine(make_model(), tokenizer, config, stop_token_ids={3, 17, 40})
    prompts = [[5, 9, 7, 30, 2], [8, 1, 4]]
    lengths = [[len(completion.token_ids) for completion in group] for group in engine.generate(prompts, seed=4)]
    result = simulate_prompts(
        lengths, "token_budget", slots=2, page_size=page_size, prompt_tokens=[5, 3], max_new_tokens=24, parks=parks
    )
    found, stats = (
        (result.running_steps, result.preemptions, result.recomputed_tokens, result.parked_tokens),
        engine.stats,
    )
    assert (stats.running_steps, stats.preemptions, stats.recomputed_tokens, stats.parked_tokens) == found
    assert result.preemptions > 5 and (result.parked_tokens > 0) == parks


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    "schedule", ["arrival", "naive", "fixed_slot", "full_group", "lpt", "sjf", "infinite", "fptas"]
)
def test_the_engine_takes_as_many_steps_as_the_simulator(make_model, tokenizer, schedule, page_size):
    config = RolloutConfig(group_size=12, slots=2, max_new_tokens=24, schedule=schedule, page_size=page_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = SamplingEngine(make_model(), tokenizer, config, stop_token_ids={3, 17, 40})
    prompt = [5, 9, 7, 30, 2]
    group = engine.generate([prompt], seed=4)[0]
    lengths = [len(completion.token_ids) for completion in group]
    assert len(set(lengths)) > 3
    result = simulate(
        lengths, schedule, slots=2, predicted=[1.0] * 12, page_size=page_size, prompt_tokens=5, max_new_tokens=24
    )
    stats = engine.stats
    assert (stats.running_steps, stats.preemptions, stats.recomputed_tokens) == (
        result.running_steps,
        result.preemptions,
        result.recomputed_tokens,
    )
    assert stats.peak_kv_bytes == result.peak_kv_tokens * 2 * 2 * 2 * 16 * 4

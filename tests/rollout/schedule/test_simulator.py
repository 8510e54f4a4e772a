"""Schedules over known lengths, and the engine's steps beside the simulator's."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infsample_rl.config.fields import kv_pages
from infsample_rl.rollout.simulator import Stay, _Run, simulate, simulate_prompts, slot_bound, token_bound
from infsample_rl.rollout.simulator_drafts import Text

LENGTHS = [6, 1, 4, 2, 5, 3]


def test_a_worked_example():
    result = simulate(LENGTHS, "arrival", slots=2)
    # slot 0: sample 0 to step 6, then 4 to 11; slot 1: sample 1 to step 1, 2 to 5, 3 to 7, 5 to 10
    assert result.running_steps == 11 and result.busy_row_steps == sum(LENGTHS)
    assert result.completed == [1, 2, 0, 3, 5, 4]
    assert result.finish_steps == [1, 5, 6, 7, 10, 11]
    assert result.peak_kv_tokens <= 2 * 6 and (result.preemptions, result.recomputed_tokens) == (0, 0)


def least_makespan(lengths, slots):
    """Over all assignments of samples to slots."""
    best = sum(lengths)
    for slots_of in itertools.product(range(slots), repeat=len(lengths) - 1):  # the first sample in slot 0
        loads = [0] * slots
        for length, slot in zip(lengths, (0, *slots_of), strict=True):
            loads[slot] += length
        best = min(best, max(loads))
    return best


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 3))
def test_lpt_with_true_lengths_is_within_graham_s_bounds_of_the_optimum(lengths, slots):
    best = least_makespan(lengths, slots)
    assert slot_bound(lengths, slots) <= best
    assert best <= simulate(lengths, "lpt", slots=slots).running_steps <= (4 / 3 - 1 / (3 * slots)) * best
    for schedule in ("arrival", "sjf", "infinite"):  # list schedules, whatever their order
        assert best <= simulate(lengths, schedule, slots=slots).running_steps <= (2 - 1 / slots) * best
    for schedule in ("naive", "fixed_slot", "fptas"):
        assert best <= simulate(lengths, schedule, slots=slots).running_steps


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(0, 60))
def test_token_budget_never_takes_fewer_steps_than_its_bound(lengths, more):
    budget = max(lengths) + more
    steps = simulate(lengths, "token_budget", kv_budget_tokens=budget).running_steps
    assert steps >= token_bound(lengths, budget) - sum(lengths) / budget  # a token's KV is taken one step after it


def test_bounds_by_hand():
    assert slot_bound([4, 1, 2, 6, 3, 1, 5, 2], 4) == 6 and slot_bound([1, 1, 1], 2) == 1.5
    assert token_bound([3, 2], 4) == 3 and token_bound([3, 2, 2], 3) == (6 + 3 + 3) / 3
    # the newest token is not yet held
    assert simulate([2] * 100, "token_budget", slots=1).running_steps / token_bound([2] * 100, 2) == 100 / 150


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


def test_prompts_share_one_pool_and_their_own_tokens_count():
    result = simulate_prompts(
        [[4, 4], [4, 4]], "arrival", slots=2, prompts_at_once=2, prompt_tokens=[3, 5], page_size=2
    )
    assert result.kv_pool_tokens == 2 * 4 + 4 + 6
    # two rows of 3 tokens in 2 pages each beside the second prompt; the first has left
    assert result.peak_kv_tokens == 2 * 4 + 6
    with pytest.raises(ValueError, match="prompt_tokens must be >= 0 and whole, one number or one for each of"):
        simulate_prompts([[4], [4]], "arrival", prompt_tokens=[3])


def test_predictions_while_decoding_change_who_gives_way():
    # 3 rows and 20 tokens: when pages run out, one of the last two must go; with predictions it is the one about to end
    lengths = [9, 9, 9]
    keeps_1 = [{1: 9.0}, {1: 90.0}, {1: 2.0}]
    keeps_2 = [{1: 9.0}, {1: 2.0}, {1: 90.0}]
    options = {"kv_budget_tokens": 18, "max_new_tokens": 9}
    ends = [simulate(lengths, "token_budget", repredicted=moments, **options) for moments in (keeps_1, keeps_2)]
    assert [result.completed[-1] for result in ends] == [2, 1] and all(result.preemptions for result in ends)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": []}, "lengths must be positive"),
        ({"lengths": [3, 0]}, "lengths must be positive"),
        ({"schedule": "fastest"}, "schedule must be one of token_budget"),
        ({"kv_budget_tokens": 5}, "kv_budget_tokens must be >= 6"),
        ({"kv_budget_tokens": 15, "prompt_tokens": 10}, "kv_budget_tokens must be >= 16"),
        ({"predicted": [1.0]}, "predicted must have one length"),
        ({"repredicted": [{1: 2.0}]}, "repredicted is not read by schedule arrival"),
        ({"schedule": "token_budget", "repredicted": [{1: 2.0}]}, "repredicted must have one length"),
        ({"schedule": "token_budget", "repredicted": [{0: 2.0}] * 6}, "made at 1 token or later, got 0"),
        ({"slots": 0}, "slots must be >= 1"),
        ({"group_size": 7}, "group_size must be >= 1 and <= the 6 given lengths"),
        ({"group_size": 4}, "group_size=4 is not read by schedule arrival: give 4 of 6 lengths"),
        ({"max_rows": 4}, "max_rows is not read by schedule arrival"),
        ({"lengths": [3, 2.5]}, "lengths must be positive whole numbers of at most 2147483648 tokens, got 2.5"),
        ({"lengths": [math.nan, 2]}, "tokens, got nan"),
        ({"lengths": [3, 2**31 + 1]}, "tokens, got 2147483649"),
        ({"predicted": [1.0, None] * 3}, "predicted must be finite and > 0 tokens, got None for sample 1"),
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
    with pytest.raises(ValueError, match="group_size must be .* one number or one for each of the 2 prompts"):
        simulate_prompts([[3], [2]], "dynamic_slot", group_size=[1])


def test_vllms_rule_lets_in_whom_it_can_and_takes_back_the_last():
    """Two prompts' worth of pages: the third sample starts when the first two have room no more."""
    lengths, cap = [8, 8, 8], 8
    found = simulate_prompts([lengths], "first_come", kv_budget_tokens=16, max_new_tokens=cap, record_rows=True)
    assert found.recomputed_tokens > 0 == found.parked_tokens and found.preemptions > 0
    assert found.completed == [0, 1, 2], "who came first ends first"
    bound = token_bound(lengths, 16)
    assert bound <= found.running_steps + sum(lengths) / 16 and found.peak_kv_tokens <= 16
    roomy = simulate_prompts([lengths], "first_come", kv_budget_tokens=64, max_new_tokens=cap)
    assert (roomy.running_steps, roomy.preemptions, roomy.recomputed_tokens) == (8, 0, 0)


@pytest.mark.parametrize("seed", range(30))
def test_vllms_rule_ends_every_sample_within_its_memory(seed):
    draw = random.Random(seed)
    cap, page_size = draw.randint(4, 60), draw.choice([1, 4, 16])
    groups = [[draw.randint(1, cap) for _ in range(draw.randint(1, 12))] for _ in range(draw.randint(1, 4))]
    prompts = [draw.randint(0, 30) for _ in groups]
    budget = page_size * (kv_pages(1, cap, [max(prompts)], page_size) + draw.randint(0, 20))
    sizes = {"page_size": page_size, "prompt_tokens": prompts, "max_new_tokens": cap}
    found = simulate_prompts(groups, "first_come", kv_budget_tokens=budget, **sizes)
    assert sorted(zip(found.completed_prompts, found.completed, strict=True)) == [
        (prompt, sample) for prompt, lengths in enumerate(groups) for sample in range(len(lengths))
    ]
    assert found.tokens == sum(map(sum, groups)) and found.peak_kv_tokens <= budget


def test_a_prediction_that_drafted_tokens_lead_past_counts(monkeypatch):
    seen, end = {}, _Run._end

    def watch(self, ended):
        seen.update({sample.sample_index: sample.predicted for sample in ended})
        end(self, ended)

    monkeypatch.setattr(_Run, "_end", watch)
    moments = [{6: 50.0, 20: 45.0}, {6: 51.0, 20: 44.0}]
    found = simulate_prompts(
        [[40, 40]],
        "token_budget",
        max_rows=1,
        repredicted=[moments],
        texts=[Text([1, 2, 3, 4, 5], [list(range(40))] * 2)],
        drafts=7,
    )
    assert found.running_steps < 60, "the second sample is the first, of which seven tokens are drafted at a time"
    assert seen == {0: 45.0, 1: 44.0}

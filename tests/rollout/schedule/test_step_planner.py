"""The planner alone: memory is never exceeded, nothing is lost, every sample finishes. Random workloads, no model."""

import random

import pytest

from infsample_rl.config.fields import kv_pages
from infsample_rl.config.rollout import PREDICTED_SCHEDULES, SCHEDULES
from infsample_rl.rollout.schedule.kv_pool import KVPool, Parking
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy


def random_workload(seed):
    """Prompts with samples of random lengths, and a pool between the smallest that will do and a roomy one."""
    draw = random.Random(seed)
    page_size, cap = draw.choice([1, 2, 4, 16]), draw.randint(1, 40)
    group_size = draw.choice([1, 2, 5, 16])
    prompts = [draw.randint(1, 30) for _ in range(draw.randint(1, 4))]
    lengths = [[draw.choice([1, cap, draw.randint(1, cap)]) for _ in range(group_size)] for _ in prompts]
    pages = kv_pages(1, cap, [max(prompts)], page_size) + draw.choice([0, 0, 1, 3, draw.randint(0, 60)])
    return draw, page_size, cap, prompts, lengths, pages


def make_planner(schedule, draw, page_size, cap, prompts, lengths, pages, predict=None):
    slots = min(draw.randint(1, 6), len(lengths[0]))
    by_budget = schedule == "token_budget"
    settings = GroupSettings(
        schedule, len(lengths[0]) if schedule == "full_group" else slots, len(lengths[0]), prefix_tokens=3
    )
    samples = list(range(len(lengths[0])))
    groups = [
        PromptGroup(index, [0] * tokens, samples, settings, lambda _: 0, predict=predict)
        for index, tokens in enumerate(prompts)
    ]
    planner = StepPlanner(
        groups,
        KVPool(pages, page_size),
        num_slots=draw.randint(1, 20) if by_budget else settings.slots,
        prompts_at_once=draw.randint(1, 3),
        max_new_tokens=cap,
        policy=TokenBudgetPolicy(page_size, cap) if by_budget else None,
        parking=draw.choice([None, None, Parking(draw.choice([1, 4, 1000]))]),
    )
    return planner, groups


def run(planner, lengths):
    """Drive a planner to the end, checking every step; samples finished per group."""
    pool, done = planner.pool, []
    while not planner.is_done:
        plan = planner.next_step()
        rows = plan.rows
        assert {*plan.restored, *plan.rebuilt, *plan.prefills} <= {*rows, *(sample.group for sample in rows)}, (
            "whose KV comes back decodes"
        )
        assert len({sample.slot for sample in rows}) == len(rows) <= planner.num_slots
        for sample in rows:
            assert len(sample.pages) == pool.pages_for(sample.num_tokens - 1), (
                "a row has the pages of what it holds, no more"
            )
            assert sample.group.pages is not None
        held = [page for sample in rows for page in sample.pages] + [
            page for group in {sample.group for sample in rows} for page in group.pages
        ]
        assert len(set(held)) == len(held) <= pool.num_pages, "no page belongs to two"
        ended = [
            sample
            for sample in rows
            if sample.num_tokens == lengths[sample.group.prompt_index][sample.sample_index % len(lengths[0])]
        ]
        done += ended
        planner.end_step(ended)
    assert pool.num_free == pool.num_pages, "all pages came back"
    assert pool.peak_pages <= pool.num_pages
    assert planner.parking is None or planner.parking.num_taken == 0
    return done


@pytest.mark.parametrize(
    ("schedule", "with_prefixes"),
    [(name, False) for name in SCHEDULES] + [(name, True) for name in PREDICTED_SCHEDULES],
)
def test_memory_is_set_and_every_sample_finishes(schedule, with_prefixes):
    for seed in range(60):
        draw, *workload = random_workload(seed)
        predict = (lambda _, prefixes, d=draw: [d.uniform(1, 40) for _ in prefixes]) if with_prefixes else None
        planner, groups = make_planner(schedule, draw, *workload, predict=predict)
        lengths = workload[3]
        done = run(planner, lengths)
        finished = sorted(
            (sample.group.prompt_index, sample.sample_index) for group in groups for sample in group.finished
        )
        if schedule != "dynamic_slot":
            assert finished == [(prompt, index) for prompt in range(len(lengths)) for index in range(len(lengths[0]))]
            assert len(done) == len(finished)
        else:
            assert [len(group.finished) for group in groups] == [len(lengths[0])] * len(lengths)


def test_preemption_keeps_tokens_and_no_sample_waits_beyond_a_bound():
    """The first started of the unfinished is never preempted, so it ends within its length; one rebuild may come before
    it."""
    preempted = 0
    for seed in range(100):
        draw, *workload = random_workload(seed)
        planner, _ = make_planner("token_budget", draw, *workload)
        total = sum(map(sum, workload[3]))
        run(planner, workload[3])
        preempted += planner.num_preemptions
        assert planner.num_tokens == total, "every token is sampled once"
        if planner.num_preemptions == 0 or planner.parking is not None:
            assert planner.running_steps <= total + planner.recomputed_tokens
        assert planner.running_steps <= total + 2 * planner.num_preemptions + sum(map(len, workload[3]))
    assert preempted > 100


@pytest.mark.parametrize("parks", [False, True])
def test_who_comes_back_is_not_preempted_for_the_prompt_of_another(parks):
    """Preempted samples of one token hold no KV: their prompt loses its pages, and must find them free to come back."""
    for seed in range(40):
        draw = random.Random(seed)
        page_size, count, prompts = draw.choice([1, 4]), draw.randint(4, 12), [draw.randint(5, 20) for _ in range(3)]
        lengths = [[draw.randint(1, 24) for _ in range(count)] for _ in prompts]
        pages = 2 * -(-24 // page_size) + sum(sorted(-(-tokens // page_size) for tokens in prompts)[-2:])
        settings = GroupSettings("token_budget", count, count)
        groups = [
            PromptGroup(place, [0] * tokens, list(range(count)), settings, lambda _: 0)
            for place, tokens in enumerate(prompts)
        ]
        policy, parking = TokenBudgetPolicy(page_size, 24, parks=parks), Parking(1000) if parks else None
        pool = KVPool(pages, page_size)
        planner = StepPlanner(
            groups, pool, num_slots=100, prompts_at_once=2, max_new_tokens=24, policy=policy, parking=parking
        )
        run(planner, lengths)
        assert not (parks and planner.recomputed_tokens), "prompts that give way are parked as samples are"


@pytest.mark.parametrize(("places", "first"), [(None, 0), (0, 0), (10, 0), (1000, 1)])
def test_of_two_that_come_back_the_shorter_one_goes_first_while_places_outside_the_pool_are_free(places, first):
    """Two prompts of one sample, one row; the first sample has 30 tokens, the second 6, and 6 places are taken."""
    settings = GroupSettings("arrival", 1, 1)
    groups = [PromptGroup(index, [0] * 4, [0], settings, lambda _: 0) for index in range(2)]
    planner = StepPlanner(
        groups,
        KVPool(40, 4),
        num_slots=1,
        prompts_at_once=2,
        max_new_tokens=100,
        policy=TokenBudgetPolicy(4, 100, parks=True),
        parking=None if places is None else Parking(places),
    )
    for tokens in (30, 6):
        for _ in range(tokens):
            (sample,) = planner.next_step().rows
            planner.end_step([])
        planner.send_away(sample)
        planner.end_step([])
    if planner.parking is not None:
        assert planner.parking.take(min(6, places))
    for sample in list(planner.away):
        planner.take_back(sample, 1)
    (sample,) = planner.next_step().rows
    assert sample.group is groups[first]

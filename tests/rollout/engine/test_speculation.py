"""Drafted tokens: every bit of every sample as without, in fewer steps, within the pool."""

from __future__ import annotations

import random
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from infsample_rl.config import RolloutConfig
from infsample_rl.rollout.engine import speculation as speculation_module
from infsample_rl.rollout.engine.model_runner import ModelRunner
from infsample_rl.rollout.engine.speculation import Found, Record, Speculation, StepCost
from infsample_rl.rollout.kernels import cpu_kernels
from infsample_rl.rollout.schedule import drafter as drafter_module
from infsample_rl.rollout.schedule.drafter import Drafter, shared_out
from infsample_rl.rollout.schedule.kv_pool import KVPool
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup, Sample
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from tests.engines import PROMPTS, bits_of, ends_of, make_engine

SETTINGS = [
    {},
    {"schedule": "token_budget", "slots": None},
    {"schedule": "token_budget", "slots": None, "kv_budget_tokens": 80, "page_size": 4, "preemption": "park"},
    {"schedule": "token_budget", "slots": None, "kv_budget_tokens": 90, "page_size": 1, "preemption": "recompute"},
    {"schedule": "lpt", "predictor": "bert", "prefix_tokens": 5, "page_size": 3},
    {"schedule": "naive", "prompts_at_once": 2},
    {"schedule": "infinite", "prefix_tokens": 4},
    {"top_p": 0.9, "temperature": 0.5},
    {"temperature": 0.0},
    {"micro_group_size": 1, "slots": 1},
]


@pytest.mark.parametrize(
    "drafts", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(7, marks=pytest.mark.slow), "auto"]
)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_draft_changes_a_bit_of_a_sample(make_model, make_tokenizer, monkeypatch, settings, drafts):
    monkeypatch.setattr(StepCost, "of_each", lambda self, queries: [1.0 for _ in queries])  # auto: all that is found
    settings = {"schedule": "arrival", "group_size": 12, "max_new_tokens": 40} | settings
    found, steps = [], []
    for speculate in (0, drafts):
        engine = make_engine(make_model(), make_tokenizer(), speculate=speculate, **settings)
        groups = [engine.generate(PROMPTS, seed=3, step=step) for step in (0, 0)]  # the second drafts by the first
        found.append([(ends_of(each), bits_of(each)) for each in groups])
        steps.append(engine.stats.running_steps)
        pool = engine.runner.kv
        assert engine.pages_now() == (pool.num_pages, 0)
    assert found[0] == found[1]
    assert engine.stats.accepted_tokens > 0
    if drafts in (3, 7):
        assert steps[1] < 0.7 * steps[0]  # the very samples have been seen
    assert engine.stats.accepted_tokens <= engine.stats.drafted_tokens


def test_drafts_follow_the_longest_match_and_among_equal_ones_the_most():
    drafter = Drafter(cpu_kernels.load())
    group = PromptGroup(0, [1, 2, 3, 4], [0, 1, 2, 3], GroupSettings("arrival", 4, 4), lambda index: index)
    texts = [[9, 5, 6, 7], [9, 5, 6, 8], [9, 5, 6, 8]]
    for index, tokens in enumerate(texts):
        sample = Sample(group, index, index, 0)
        sample.tokens.extend(tokens)
        assert drafter.draft(sample, 1)[0] == []  # nobody has said more
        drafter.end(sample)
    last = Sample(group, 3, 3, 0)
    last.tokens.extend([9])
    assert drafter.draft(last, 3) == ([5, 6, 8], [5, 6, 7])  # with the prompt's four
    last.tokens.extend([3, 5, 6])
    assert drafter.draft(last, 1) == ([8], [2])
    drafter.close()
    again = PromptGroup(0, [1, 2, 3, 4], [0], GroupSettings("arrival", 1, 1), lambda index: index)
    first = Sample(again, 0, 0, 0)
    first.tokens.append(9)
    assert drafter.draft(first, 2)[0] == [5, 6]


def test_the_cost_of_a_step_is_fitted_and_one_that_was_disturbed_is_left_out():
    cost = StepCost()
    assert cost.of_query() > 0
    cost.add(8, 10.0)  # a compilation
    for turn in range(60):
        queries = 4 + turn % 13
        cost.add(queries, 0.01 + 0.002 * queries)
    cost.add(8, 5.0)
    assert cost.of_query() == pytest.approx(0.002, rel=0.1) and cost.of(40) == pytest.approx(0.09, rel=0.1)


def test_steps_that_take_whole_tiles_are_known_beside_the_line():
    cost, chance = StepCost(), random.Random(0)
    for _ in range(600):
        queries = chance.randrange(1, 13)
        cost.add(queries, 0.01 + 0.01 * -(-queries // 6))
    assert cost.of(6) < 1.1 * cost.of(4) and cost.of(7) > 1.3 * cost.of(6) and cost.of(12) < 1.1 * cost.of(8)


class Lender:
    """A planner with pages for all."""

    def lend_pages(self, sample, drafts):
        return drafts


@pytest.fixture
def decode(monkeypatch):
    """Decodes four rows, of which a share repeats itself, on a clock of its own; queries and seconds of every step."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(speculation_module, "time", clock)

    def run(speculation, seconds, *, right, looking=0.0, steps=400):
        group = PromptGroup(0, [1, 2, 3], [0, 1, 2, 3], GroupSettings("arrival", 4, 4), lambda index: index)
        rows = [Sample(group, index, index, 0) for index in range(4)]
        chance, queries, took = random.Random(0), [], []
        found = speculation.drafter.draft

        def draft(*given):
            clock.now += looking / len(rows)
            return found(*given)

        speculation.drafter.draft = draft
        for _ in range(steps):
            began, rests = clock.now, speculation.rest()
            drafts = (not rests and speculation.drafts_of(rows, Lender())) or [[] for _ in rows]
            tokens = 0
            for sample, drafted in zip(rows, drafts, strict=True):
                for token in [*drafted, None]:
                    usual = 10 + len(sample.tokens) % 5
                    sample.tokens.append(usual if chance.random() < right else chance.randrange(20, 10**6))
                    tokens += 1
                    if token != sample.tokens[-1]:
                        break
            queries.append(sum(map(len, drafts)) + len(rows))
            clock.now += seconds(queries[-1])
            if not rests:
                speculation.end_step(len(rows), queries[-1], tokens)
            took.append(clock.now - began)
        return queries, took

    return run


@pytest.mark.parametrize(
    ("seconds", "right", "fewest", "most"),
    [
        (lambda queries: 0.1 + 0.001 * queries, 0.95, 20, 32),  # drafts cost little and are right
        (lambda queries: 0.1 + 0.001 * queries, 0.0, 4, 4.2),  # they never are
        (lambda queries: 0.001 + 0.1 * queries, 0.5, 4, 4.2),  # they cost as much as they give
        (lambda queries: 0.05 + 0.05 * -(-queries // 6), 0.6, 5.3, 6.4),  # a tile of six takes as long as one of four
    ],
)
def test_as_many_are_drafted_as_pay(decode, seconds, right, fewest, most):
    queries, _ = decode(Speculation(cpu_kernels.load(), None), seconds, right=right)
    assert fewest <= sum(queries[100:]) / len(queries[100:]) <= most


@pytest.mark.parametrize("holds_up", [False, True])
@pytest.mark.parametrize(("looking", "judging"), [(0.0, 0.0), (0.03, 0.0), (0.0, 0.03)])
def test_looking_and_drafting_lose_little_where_they_do_not_pay(decode, monkeypatch, holds_up, looking, judging):
    """At most 2 % of the seconds, whatever was gained before; steps that could be launched ahead take 0.9 of them."""
    speculation = Speculation(cpu_kernels.load(), None, holds_up=holds_up)
    judge = speculation._judge

    def judge_slowly():
        speculation_module.time.now += judging
        judge()

    monkeypatch.setattr(speculation, "_judge", judge_slowly)
    decode(speculation, lambda queries: 0.1 + 0.001 * queries, right=0.95, steps=100)
    _, took = decode(speculation, lambda queries: 0.1 + 0.001 * queries, right=0.0, looking=looking, steps=1000)
    rested = sum(each == pytest.approx(0.104) for each in took)
    lost = sum(took) - 0.104 * len(took) + (0.0104 * (len(took) - rested) if holds_up else 0.0)
    assert lost < 0.02 * 0.104 * len(took)


def test_a_row_that_is_expected_to_be_long_gets_more():
    group = PromptGroup(0, [1, 2, 3], [0, 1], GroupSettings("arrival", 2, 2), lambda index: index)
    rows = [Sample(group, index, index, 0) for index in range(2)]
    rows[0].predicted, rows[1].predicted = 20.0, 400.0
    speculation = Speculation(cpu_kernels.load(), None)
    for queries in (2, 6, 10) * 20:
        speculation._cost.add(queries, 0.1 + 0.01 * queries)
    counts = speculation._paying([Found(row, 0, [4] * 7, [3] * 7) for row in rows], 62)
    assert 0 < counts[0] < counts[1]


def test_what_was_found_is_judged_though_it_was_not_run(decode, monkeypatch):
    monkeypatch.setattr(Lender, "lend_pages", lambda self, sample, drafts: 0)
    speculation = Speculation(cpu_kernels.load(), None)
    queries, _ = decode(speculation, lambda queries: 0.1, right=0.9, steps=200)
    assert set(queries) == {4}
    assert max(record.chance(0.0) for record in speculation._by_match.values()) > 0.8


@pytest.mark.parametrize("is_right", [False, True])
def test_no_record_says_never_or_always(is_right):
    record = Record()
    assert record.chance(0.0) == 0.5
    for _ in range(100_000):
        record.add(is_right)
    assert 0.003 < record.chance(0.0) < 0.997 and abs(record.chance(0.0) - is_right) < 0.01


def test_where_steps_could_be_launched_ahead_drafts_rest_when_none_are_found():
    speculation = Speculation(cpu_kernels.load(), None, holds_up=True)
    group = PromptGroup(0, [1, 2, 3], [0], GroupSettings("arrival", 1, 1), lambda index: index)
    sample, asked = Sample(group, 0, 0, 0), 0
    for token in range(1000):  # never repeats itself
        sample.tokens.append(token)
        if not speculation.rest():
            asked += 1
            assert speculation.drafts_of([sample], Lender()) is None
            speculation.end_step(1, 1, 1)
    assert asked < 100


def test_a_fixed_number_is_drafted_up_to_the_queries_of_a_step(decode):
    queries, _ = decode(Speculation(cpu_kernels.load(), 7), lambda queries: 0.1, right=1.0, steps=40)
    assert set(queries[20:]) == {32}
    assert shared_out([7, 0, 2, 7], 8) == [3, 0, 2, 3] and shared_out([1, 1], 8) == [1, 1] and shared_out([2], 0) == [0]


def test_groups_with_the_same_prompt_draft_for_one_another():
    drafter = Drafter(cpu_kernels.load())
    settings = GroupSettings("arrival", 1, 1)
    groups = [PromptGroup(place, [1, 2, 3, 4, 6], [0], settings, lambda index: index) for place in (0, 1)]
    first, second = (Sample(group, 0, 0, 0) for group in groups)
    for sample in (first, second):
        sample.tokens.append(8)
        drafter.draft(sample, 1)
    first.tokens.extend([9, 5])
    drafter.end(first)
    drafter.leave(groups[0])
    before = drafter._texts[next(iter(drafter._texts))].known[second][1]
    second.tokens.append(9)
    assert drafter.draft(second, 1)[0] == [5] and before == 1, "its own tokens are known once"


def test_what_a_prompts_own_texts_lack_is_found_in_other_prompts_samples():
    drafter, settings = Drafter(cpu_kernels.load()), GroupSettings("arrival", 3, 3)
    one, other = (PromptGroup(prompt, [prompt], [0, 1], settings, lambda index: index) for prompt in (1, 2))
    before, sibling, sample = Sample(one, 0, 0, 0), Sample(other, 0, 0, 0), Sample(other, 1, 1, 0)
    before.tokens.extend(range(20, 40))
    drafter.end(before)
    sample.tokens.append(20)
    assert drafter.draft(sample, 3) == ([21, 22, 23], [-1, -2, -3])
    sample.tokens.extend(range(21, 28))
    assert drafter.draft(sample, 3) == ([28, 29, 30], [-8, -9, -10])
    for own, found in (
        ([0, 0, 0, 0, 0, 26, 27, 98], ([28], [-8])),
        ([0, 0, 0, 0, 0, *range(23, 28), 99], ([99], [5])),
    ):
        sibling = Sample(other, 2, 2, 0)
        sibling.tokens.extend(own)
        drafter.end(sibling)
        assert drafter.draft(sample, 1) == found
    assert [len(samples) for _, samples in drafter.ended()] == [1, 2], "a sample is kept once"


def test_samples_of_all_prompts_stay_within_their_bytes_and_are_gathered_anew(monkeypatch):
    monkeypatch.setattr(drafter_module, "OTHERS_BYTES", 100_000)
    drafter, sizes = Drafter(cpu_kernels.load()), []
    settings, numbers = GroupSettings("arrival", 1, 1), random.Random(0)
    for prompt in range(40):
        sample = Sample(PromptGroup(prompt, [prompt], [0], settings, lambda index: index), 0, 0, 0)
        for _ in range(300):
            sample.tokens.append(numbers.randrange(10_000))
            drafter.draft(sample, 3)
        drafter.end(sample)
        sizes.append(drafter._of_all.num_bytes)
    assert any(after < before for before, after in zip(sizes, sizes[1:], strict=False))
    assert 50_000 < max(sizes) <= 100_000


@pytest.mark.parametrize("tokens", [65, 1025, 4096, 4097, 32769])
def test_a_token_takes_no_more_bytes_than_the_plan_counts(tokens):
    drafter, numbers = Drafter(cpu_kernels.load()), random.Random(0)
    sample = Sample(PromptGroup(0, [1], [0], GroupSettings("arrival", 1, 1), lambda index: index), 0, 0, 0)
    sample.tokens.extend(numbers.randrange(50_000) for _ in range(tokens))
    drafter.end(sample)
    (kept,) = drafter._texts.values()
    assert max(kept.num_bytes, drafter._of_all.num_bytes) <= drafter_module.BYTES_PER_TOKEN * tokens + 1000


@pytest.mark.parametrize("drafts", [True, False])
def test_texts_stay_within_their_bytes(monkeypatch, drafts):
    monkeypatch.setattr(drafter_module, "MOST_BYTES", 200_000)
    monkeypatch.setattr(drafter_module, "TRIM_EVERY", 3000)
    drafter = Drafter(cpu_kernels.load())
    for prompt in range(8):
        group = PromptGroup(prompt, [prompt], [0], GroupSettings("arrival", 1, 1), lambda index: index)
        sample = Sample(group, 0, 0, 0)
        for token in range(1500):
            sample.tokens.append(token)
            if drafts:
                drafter.draft(sample, 3)
        drafter.end(sample)
        drafter.leave(group)
    kept = [texts.num_bytes for texts in drafter._texts.values()]
    assert sum(kept) <= 200_000 + drafter_module.BYTES_PER_TOKEN * 3000
    drafter.close()
    kept = [texts.num_bytes for texts in drafter._texts.values()]
    assert 1 <= len(kept) < 8 and sum(kept) <= 200_000


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"speculate": "8"}, "rollout.speculate must be auto or a whole number from 0 to 7, got '8'"),
        ({"speculate": 3, "schedule": "dynamic_slot", "slots": 2}, "does not go with rollout.schedule=dynamic_slot"),
        ({"speculate": 3, "kv_dtype": "int8"}, "does not go with rollout.kv_dtype=int8"),
    ],
)
def test_what_cannot_be_drafted_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        RolloutConfig(**settings)


def test_a_model_without_a_compiled_decoder_drafts_nothing_and_refuses_a_number(make_model, make_tokenizer):
    model = make_model().to(torch.bfloat16)
    assert make_engine(model, make_tokenizer()).generate(PROMPTS, seed=1)
    with pytest.raises(ValueError, match="rollout.speculate=3 needs the compiled decoder"):
        make_engine(model, make_tokenizer(), speculate=3)


def test_on_a_gpu_without_a_c_compiler_nothing_is_drafted_and_that_is_what_is_said(monkeypatch, make_model):
    def without_compiler():
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(cpu_kernels, "_compile_command", without_compiler)
    monkeypatch.setattr(cpu_kernels, "load", cache(cpu_kernels.load.__wrapped__))
    runner = ModelRunner(make_model().to(torch.bfloat16))
    runner.device = torch.device("cuda")
    with pytest.warns(UserWarning, match=r"\(no C\+\+ compiler\): no tokens are drafted$"):
        assert speculation_module.speculation_of(RolloutConfig(), runner) is None
    with pytest.raises(ValueError, match=r"rollout.speculate=3 needs a C\+\+ compiler.*rollout.speculate=0$"):
        speculation_module.speculation_of(RolloutConfig(speculate=3), runner)


def test_drafts_take_pages_that_nobody_holds_and_give_them_back():
    pool = KVPool(5, 4)
    group = PromptGroup(0, [1], [0, 1], GroupSettings("arrival", 2, 2), lambda index: index)
    planner = StepPlanner([group], pool, num_slots=2, prompts_at_once=1, max_new_tokens=8)
    first = planner.next_step().rows[0]
    while first.num_tokens < 5:  # the KV of four tokens, a page for each row, and one for the prompt
        planner.end_step([])
        first, _ = planner.next_step().rows
    free = pool.num_free
    assert free == 5 - sum(len(sample.pages) for sample in planner.running) - 1
    lent = planner.lend_pages(first, 7)
    assert lent == min(8 - 5, len(first.pages) * 4 - 4) and planner.num_preemptions == 0  # max_new_tokens, and pages
    planner.accept(first, 0)
    assert pool.num_free == free and first.num_tokens == 5
    planner.lend_pages(first, 7)
    planner.accept(first, 1)
    assert first.num_tokens == 6 and len(first.pages) == pool.pages_for(5)

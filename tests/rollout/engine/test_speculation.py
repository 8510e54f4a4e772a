"""Drafted tokens: every bit of every sample as without, in fewer steps, within the pool."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from infsample_rl.config import RolloutConfig
from infsample_rl.controller.start_table import derived_table
from infsample_rl.rollout.engine import speculation as speculation_module
from infsample_rl.rollout.engine.decoder import drafts_tokens
from infsample_rl.rollout.engine.model_runner import ModelRunner
from infsample_rl.rollout.engine.speculation import Found, Record, Speculation, StepCost
from infsample_rl.rollout.kernels import cpu_kernels
from infsample_rl.rollout.schedule.drafter import shared_out
from infsample_rl.rollout.schedule.kv_pool import KVPool
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup, Sample
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from tests.drafting import Lender, decode_on
from tests.engines import PROMPTS, STOP, bits_of, ends_of, make_engine

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
    {"stop_strings": ["5 w1", "0 w2"]},
    {"bad_token_ids": [1, 2, 5, 9]},
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
    if "stop_strings" in settings:
        ends = [(tokens[-1], reason) for each, _ in found[0] for group in each for tokens, reason in group]
        assert any(reason == "stop" and last not in STOP for last, reason in ends)
    assert engine.stats.accepted_tokens > 0
    if drafts in (3, 7):
        assert steps[1] < 0.7 * steps[0]  # the very samples have been seen
    assert engine.stats.accepted_tokens <= engine.stats.drafted_tokens


def test_no_draft_changes_a_bit_of_an_evaluation(make_model, make_tokenizer):
    found = []
    for speculate in (0, 3):
        engine = make_engine(make_model(), make_tokenizer(), speculate=speculate, group_size=12, max_new_tokens=40)
        engine.generate(PROMPTS, seed=3)  # whose samples drafts are found in
        groups = [engine.generate(PROMPTS, seed=3, evaluation=True, temperature=0.5) for _ in range(2)]
        found.append([(ends_of(each), bits_of(each)) for each in groups])
    assert found[0] == found[1] and engine.stats.accepted_tokens > 0


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


@pytest.fixture
def decode(monkeypatch):
    """Decodes four rows on a clock of its own (tests/drafting.py)."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(speculation_module, "time", clock)
    return lambda *given, **options: decode_on(clock, *given, **options)


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
@pytest.mark.parametrize(("looking", "judging"), [(0.0, 0.0), (0.03, 0.0), (0.0, 0.03), (0.312, 0.0), (0.0, 0.312)])
def test_looking_and_drafting_lose_little_where_they_do_not_pay(decode, monkeypatch, holds_up, looking, judging):
    """At most 2 % of the seconds, whatever was gained before; steps that could be launched ahead take 0.9 of them."""
    speculation = Speculation(cpu_kernels.load(), None, holds_up=holds_up)
    judge = speculation._judge

    def judge_slowly():
        speculation_module.time.now += judging
        judge()

    monkeypatch.setattr(speculation, "_judge", judge_slowly)
    decode(speculation, lambda queries: 0.1 + 0.001 * queries, right=0.95, steps=100)
    _, took = decode(speculation, lambda queries: 0.1 + 0.001 * queries, right=0.0, looking=looking, steps=2000)
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


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "rope_theta": 100.0}


@pytest.mark.parametrize("speculate", ["auto", "0"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": DYNAMIC}),
        ("llama", {"rope_parameters": LONG | {"original_max_position_embeddings": 16}}),
        ("opt", {}),
    ],
    ids=str,
)
def test_a_plan_and_a_start_say_of_drafts_what_the_engine_does(make_model, worker_config, family, changes, speculate):
    model = make_model(family, **changes)
    for dtype in ("float32", "bfloat16"):
        own = replace(worker_config.rollout, speculate=speculate)
        config = replace(worker_config, rollout=own, model=replace(worker_config.model, dtype=dtype))
        does = speculation_module.speculation_of(own, ModelRunner(model.to(getattr(torch, dtype)))) is not None
        drafts = (family, changes, speculate, dtype) == ("llama", {}, "auto", "float32")
        assert drafts_tokens(config, model.config) == does == drafts
        table = dict(derived_table(config, model.config, total_steps=1, step=0, num_rows={"": 8}))
        assert ("drafts tokens" in table["schedule"]) == does
    model.float()


def test_without_a_c_compiler_no_drafts_are_announced(make_model, worker_config, monkeypatch):
    architecture = make_model().config
    assert drafts_tokens(worker_config, architecture)
    monkeypatch.setattr(cpu_kernels, "has_compiler", lambda: False)
    for gpus in (0, 1):
        config = replace(worker_config, cluster=replace(worker_config.cluster, rollout_gpus=gpus))
        assert not drafts_tokens(config, architecture)


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

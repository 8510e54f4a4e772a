"""What drafts may lose: no call more than 2 % of its steps, whatever the calls before it gained, and where they pay
they are drafted in the shortest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from infsample_rl.rollout.engine import speculation as speculation_module
from infsample_rl.rollout.engine.speculation import Speculation, StepCost
from infsample_rl.rollout.kernels import cpu_kernels
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup, Sample
from tests.drafting import decode_on


def cheap(queries):
    return 0.1 + 0.001 * queries


def dear(queries):
    return 0.05 + 0.02 * queries


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=0.0, perf_counter=lambda: made.now)
    monkeypatch.setattr(speculation_module, "time", made)
    return made


@pytest.fixture
def speculation(clock):
    return Speculation(cpu_kernels.load(), None)


@pytest.fixture
def call(clock, speculation):
    """One call: the queries of its steps, and the steps that it lost beside one that drafts nothing; < 0: gained."""

    def run(seconds=cheap, **options):
        queries, took, tokens = decode_on(clock, speculation, seconds, **options)
        speculation.close()
        return queries, sum(took) / seconds(4) - sum(tokens) / 4

    return run


@pytest.mark.parametrize("steps", [30, 60, 100, 300])
@pytest.mark.parametrize(
    ("seconds", "right", "looking"),
    [(cheap, 0.0, 0.0), (cheap, 0.0, 0.01), (cheap, 0.0, 0.03), (dear, 0.3, 0.0), (dear, 0.3, 0.01), (dear, 0.5, 0.0)],
)
def test_a_call_in_which_drafts_do_not_pay_loses_little_whatever_was_gained_before(
    call, seconds, right, looking, steps
):
    for seed, share in enumerate((0.95, right, right, 0.95, right)):
        _, lost = call(seconds, right=share, looking=looking, steps=steps, seed=seed)
        assert lost < 0.02 * steps


@pytest.mark.parametrize("steps", [30, 60])
@pytest.mark.parametrize("looking", [0.0, 0.01, 0.03])
def test_short_calls_draft_where_that_saves_two_thirds_of_the_steps(call, looking, steps):
    call(right=0.95, looking=looking, steps=steps)
    for seed, right in enumerate((0.95, 0.0, 0.95, 0.95), 1):
        queries, lost = call(right=right, looking=looking, steps=steps, seed=seed)
        if right:
            assert sum(queries) > 12 * steps and lost < -steps


def test_looks_of_three_steps_are_seen_and_hardly_repeated(call):
    """Two of them are not foreseen: the first of all, and the next, which shows that nothing else ran."""
    lost = [call(right=0.0, looking=3 * cheap(4), steps=100, seed=seed)[1] for seed in range(20)]
    assert sum(lost) < 0.01 * 2000 and max(lost[2:10]) < 0.02 * 100


def test_one_long_look_does_not_end_drafts_that_pay(call, clock, speculation, monkeypatch):
    judge = speculation._judge
    call(right=0.95, steps=60)
    looks = iter(range(10**6))

    def judge_once_slowly():
        clock.now += 5.0 * (next(looks) == 20)
        judge()

    monkeypatch.setattr(speculation, "_judge", judge_once_slowly)
    queries, _ = call(right=0.95, steps=60, seed=1)
    assert sum(queries) > 20 * 60


def test_a_step_left_out_counts_where_it_was_the_first_of_so_many_queries():
    cost = StepCost()
    assert all(cost.add(4, 0.1) == pytest.approx(0.1) for _ in range(20))
    assert cost.add(4, 3.0) == pytest.approx(0.1), "something else ran"
    assert cost.add(9, 3.0) == 3.0, "captured for nine"
    assert cost.add(9, 0.11) < 0.2 and cost.add(9, 3.0) < 0.2


def test_a_call_pays_for_what_is_compiled_for_its_drafts(call):
    compiled = set()  # of what is run for every eight queries more than the rows'

    def seconds(queries):
        tiles = -(-queries // 8) if queries > 4 else 0
        is_new = tiles not in compiled and tiles > 0
        compiled.add(tiles)
        return cheap(queries) + 3.0 * is_new

    call(seconds, right=0.0, steps=100)
    for seed in range(1, 8):
        before = len(compiled)
        queries, _ = call(seconds, right=0.95, steps=100, seed=seed)
        assert len(compiled) <= before + 1
    assert sum(queries) > 12 * 100, "where all is compiled they are drafted"


def test_keeping_samples_that_have_ended_is_counted(call, clock, speculation, monkeypatch):
    decode_on(clock, speculation, cheap, right=0.0, steps=3)
    assert not speculation.rest()

    def end_slowly(sample):
        clock.now += 0.06

    monkeypatch.setattr(speculation.drafter, "end", end_slowly)
    group = PromptGroup(0, [1, 2, 3], [0], GroupSettings("arrival", 1, 1), lambda index: index)
    assert speculation.end([Sample(group, 0, 0, 0)]) == pytest.approx(0.06)
    assert speculation.rest()

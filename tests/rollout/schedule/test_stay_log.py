"""Who decoded when: stays by hand, and those of a real engine under every schedule."""

from __future__ import annotations

import pytest

from infsample_rl.config import ModelConfig
from infsample_rl.config.rollout import RolloutConfig
from infsample_rl.model.loading import load_model
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine
from infsample_rl.rollout.length_prediction import watch
from infsample_rl.rollout.schedule.prompt_group import Sample
from infsample_rl.rollout.schedule.stay_log import MOST_SPANS, StayLog

PROMPTS = [[1, 2, 3], [4, 5]]


def sample_in(slot: int) -> Sample:
    return Sample(group=None, index=0, sample_index=0, key=0, slot=slot)


def test_a_preempted_sample_has_a_stay_for_each_row_it_was_in():
    log, first, second = StayLog(), sample_in(0), sample_in(1)
    log.arrange([first, second], 0, 0)
    second.tokens.extend([7, 7, 7, 7, 7])
    log.accept(second, 1, 1)
    log.accept(second, 2, 1)
    second.slot = -1
    log.arrange([first], 4, 3)  # step 3 computes KV again
    second.slot = 2
    log.arrange([first, second], 5, 5)
    second.tokens.append(7)
    first.tokens.extend([7] * 6)
    log.end([first, second], 6)
    stays = [(stay.row, stay.start, stay.end, stay.tokens, stay.accepted) for stay in log.take(second)]
    assert stays == [(1, 0, 3, 5, ((1, 3, 2),)), (2, 5, 6, 1, ())]
    assert [(stay.row, stay.start, stay.end, stay.tokens) for stay in log.take(first)] == [(0, 0, 6, 6)]
    assert log.take(first) == []


def test_many_spans_of_a_stay_are_joined_over_the_shortest_gaps():
    log, sample = StayLog(), sample_in(0)
    log.arrange([sample], 0, 0)
    steps = [step for part in range(MOST_SPANS) for step in (10 * part, 10 * part + 2, 10 * part + 3)]
    for step in steps:
        log.accept(sample, step, 2)
    sample.tokens.extend([7] * 300)
    log.end([sample], 200)
    (stay,) = log.take(sample)
    assert stay.accepted == tuple((10 * part, 10 * part + 4, 6) for part in range(MOST_SPANS))


@pytest.fixture(scope="module")
def model(tiny_qwen3):
    config = ModelConfig(path=str(tiny_qwen3))
    return load_model(config), load_tokenizer(config)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_budget_tokens": 176},  # token_budget, so little that samples are preempted
        {"schedule": "infinite", "predictor": "probe", "slots": 3},
        {"schedule": "arrival", "slots": 3},
        {"schedule": "dynamic_slot", "slots": 3},
        {"speculate": 3, "temperature": 0.1},
    ],
    ids=lambda settings: settings.get("schedule", "token_budget") + "-drafts" * ("speculate" in settings),
)
@pytest.mark.filterwarnings("ignore:rollout.schedule=dynamic_slot")
def test_stays_of_an_engine_hold_every_token_once_and_no_row_twice(model, settings):
    shared = {"group_size": 10, "max_new_tokens": 48, "prompts_at_once": 2, "speculate": 0}  # auto goes by the clock
    engine = SamplingEngine(*model, RolloutConfig(**(shared | settings)))
    for seed in (0, 1):  # the probe has learnt before the second call
        groups = engine.generate(PROMPTS, seed=seed)
        stays = [stay for group in groups for completion in group for stay in completion.stays]
        for group in groups:
            for completion in group:
                assert sum(stay.tokens for stay in completion.stays) == len(completion.token_ids)
                assert all(
                    before.end <= after.start
                    for before, after in zip(completion.stays, completion.stays[1:], strict=False)
                )
        for stay in stays:
            drafted = sum(span.tokens for span in stay.accepted)
            assert 0 < stay.tokens - drafted <= stay.end - stay.start
            assert stay.started <= stay.ended and stay.end <= engine.stats.running_steps
            spans = [step for span in stay.accepted for step in (span.start, span.end)]
            assert spans == sorted(set(spans)) and all(stay.start <= step <= stay.end for step in spans)
            assert all(span.end - span.start <= span.tokens <= 3 * (span.end - span.start) for span in stay.accepted)
        for row in {stay.row for stay in stays}:
            there = sorted((stay.start, stay.end) for stay in stays if stay.row == row)
            assert all(before[1] <= after[0] for before, after in zip(there, there[1:], strict=False))
    accepted = sum(span.tokens for stay in stays for span in stay.accepted)
    assert accepted == engine.stats.accepted_tokens and (accepted > 0) == ("speculate" in settings)
    if "kv_budget_tokens" in settings:
        assert engine.stats.preemptions > 0 and len(stays) > 20


def test_the_first_prediction_of_a_sample_is_kept(model, monkeypatch):
    monkeypatch.setattr(watch, "PREDICT_EVERY", 4)
    engine = SamplingEngine(*model, RolloutConfig(group_size=16, max_new_tokens=48, prompts_at_once=2))
    # nothing was learnt yet
    assert all(completion.forecast is None for group in engine.generate(PROMPTS, seed=0) for completion in group)
    for seed in range(1, 4):
        groups = engine.generate(PROMPTS, seed=seed)
    forecasts = [completion.forecast for group in groups for completion in group if completion.forecast is not None]
    # the next for who was just preempted
    assert forecasts and all(1 <= forecast.known <= 8 and forecast.tokens > 0 for forecast in forecasts)

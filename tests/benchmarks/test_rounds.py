"""Measurements in rounds: their order, failures, medians and ratios."""

from __future__ import annotations

import pytest

from benchmarks import engine_point, rounds


def test_the_order_turns_round_after_each_and_one_that_fails_is_left_out():
    taken = []

    def point(name, fails_in=None):
        def measure(number):
            taken.append((number, name))
            if number == fails_in:
                raise RuntimeError("no memory")
            return {"n": number}

        return name, measure

    found = []
    failed = rounds.measure_rounds([point("a"), point("b", fails_in=1), point("c")], 3, found)
    assert taken == [(0, "a"), (0, "b"), (0, "c"), (1, "c"), (1, "b"), (1, "a"), (2, "a"), (2, "c")]
    assert failed and [len(records) for records in found] == [3, 0, 3]


def test_a_process_that_is_ended_has_what_was_measured():
    def measure(number):
        if number == 1:
            raise SystemExit(143)
        return {"n": number}

    found = []
    with pytest.raises(SystemExit):
        rounds.measure_rounds([("a", measure), ("b", lambda number: {"n": number})], 2, found)
    assert found == [[{"n": 0}], [{"n": 0}, {"n": 1}]]


def test_the_median_rounds_record_has_the_peak_of_all():
    records = [{"seconds": each, "peak_memory_bytes": 10 - each, "tokens": each} for each in (5, 1, 2)]
    assert rounds.median_round(records, "seconds") == {"seconds": 2, "peak_memory_bytes": 9, "tokens": 2}


@pytest.mark.parametrize(
    ("first", "these", "said"),
    [
        ([1.0, 1.2, 0.9], [2.0, 2.0, 3.0], "0.50 [0.30, 0.60]"),
        ([1.0, 1.2, 50.0], [2.0, 2.0, 3.0], "not told apart"),  # one wild round
        ([3.0, 3.0, 3.0], [2.0, 1.0, 1.0], "3.00 [1.50, 3.00]"),
        ([1.0, 1.0], [2.0, 2.0], "3 rounds are needed"),
    ],
)
def test_a_ratio_is_said_only_where_every_round_agrees_who_is_faster(first, these, said):
    found = rounds.beside(first, these)
    assert found["ratio_said"] == said and (found["ratio"] is None) == ("[" not in said)
    assert rounds.beside(first, first) == {"ratio": None, "ratio_said": ""}


def test_a_step_that_seems_to_take_no_time_is_an_error_and_no_figure(monkeypatch, tiny_qwen3):
    class Engine:
        def __init__(self, model, tokenizer, config, stop_token_ids):
            self.tokens = config.max_new_tokens

        def generate(self, prompts, seed):
            clock[0] += 10.0 if self.tokens == min(engine_point.STEP_TOKENS) and len(calls) == 4 else self.tokens
            calls.append(self.tokens)

    clock, calls = [0.0], []
    monkeypatch.setattr(engine_point, "SamplingEngine", Engine)
    monkeypatch.setattr(engine_point.time, "perf_counter", lambda: clock[0])
    given = engine_point.Loaded(model=None, tokenizer=None, prompts=[], stop_ids=[], workload={"seed": 0})
    assert engine_point.step_seconds(given, 4) == 1.0
    clock[0], calls[:] = 0.0, []
    monkeypatch.setattr(
        Engine, "generate", lambda self, *_, **__: clock.__setitem__(0, clock[0] + 1 / (1 + self.tokens))
    )
    with pytest.raises(RuntimeError, match="too noisy to time a step"):
        engine_point.step_seconds(given, 4)

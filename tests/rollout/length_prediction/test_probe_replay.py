"""Replays and the gate: predictions that cost steps are not used, and it is said. No model."""

import random

import numpy as np
import pytest
import torch

from infsample_rl.rollout.length_prediction.probe import LengthProbe
from infsample_rl.rollout.length_prediction.replay import (
    RECENT,
    ReplayedGroup,
    ReplayedSample,
    ReplayGate,
    ReplaySettings,
    replay,
)
from infsample_rl.rollout.length_prediction.run_probe import FILE, RunProbe
from infsample_rl.types import ProbeReport, ProbeStatistics

SETTINGS = {
    "slots": 3,
    "prompts_at_once": 1,
    "max_rows": None,
    "max_new_tokens": 64,
    "page_size": 4,
    "kv_budget_tokens": 208,
    "prefix_tokens": 2,
}
LENGTHS = [[40, 3, 9, 27, 60, 5, 14, 33], [8, 50, 21, 2, 44, 17, 30, 6]]


def groups_with(predict):
    """Both groups, every sample predicted at 2, 10, 18, ... tokens by predict(length, tokens)."""
    return [
        ReplayedGroup(
            7,
            [
                ReplayedSample(
                    index, length, {tokens: float(predict(length, tokens)) for tokens in range(2, length, 8)}
                )
                for index, length in enumerate(lengths)
            ],
        )
        for lengths in LENGTHS
    ]


def test_longest_first_gains_by_true_lengths_and_loses_by_reversed_ones():
    settings = ReplaySettings(schedule="lpt", **SETTINGS)
    right, without = replay(groups_with(lambda length, _: length), settings)
    wrong, again = replay(groups_with(lambda length, _: 100 - length), settings)
    assert without == again
    assert right < without < wrong
    assert right >= sum(map(sum, LENGTHS)) / 3  # slots


@pytest.mark.parametrize("schedule", ["token_budget", "lpt", "sjf", "fptas", "infinite"])
def test_a_replay_ends_whatever_was_predicted(schedule):
    draw = random.Random(3)
    for predict in (
        lambda *_: 1.0,
        lambda *_: 64.0,
        lambda *_: 1e30,
        lambda *_: 1e-30,
        lambda *_: draw.uniform(0.5, 100),
    ):
        steps = replay(groups_with(predict), ReplaySettings(schedule=schedule, **SETTINGS))
        assert min(steps) >= 60
        assert max(steps) <= 2 * sum(map(sum, LENGTHS))


def test_a_group_none_of_which_was_kept_is_left_out():
    settings = ReplaySettings(schedule="lpt", **SETTINGS)
    assert replay([*groups_with(lambda length, _: length), ReplayedGroup(3)], settings) == replay(
        groups_with(lambda length, _: length), settings
    )


def test_the_gate_opens_when_replays_take_no_more_steps_and_shuts_when_they_do():
    gate = ReplayGate()
    assert gate.enter(0, 0) is None and not gate.is_open
    assert (
        "are used from the next step on: recent groups, replayed, take 1,900 steps with them and 2,000 without"
        in gate.enter(1900, 2000)
    )
    assert gate.enter(2050, 2000) is None and gate.is_open  # 3,950 of 4,000
    assert (
        "are not used in the next step, it goes on learning: recent groups, replayed, take 6,150 steps with"
        in gate.enter(2200, 2000)
    )
    assert not gate.is_open and gate.enter(0, 0) is None
    for _ in range(RECENT):
        gate.enter(100, 100)
    assert gate.is_open and gate.steps == (100 * RECENT, 100 * RECENT)  # older ones are forgotten; equal steps: no harm


def test_predictions_that_never_pay_are_said_not_to_be_used_once():
    gate = ReplayGate()
    assert (
        "are not used in the next step, it goes on learning: recent groups, replayed, take 120 steps with them and 100 "
        "without" in gate.enter(120, 100)
    )
    assert gate.enter(110, 100) is None and gate.enter(0, 0) is None and not gate.is_open


def report_of(seed, steps=(0, 0), hidden_size=6):
    probe = LengthProbe(hidden_size, max_new_tokens=64)
    draw = np.random.default_rng(seed)
    for fold in (0, 1):
        hidden = torch.from_numpy(draw.normal(size=(40, hidden_size))).float()
        left = (3 + hidden[:, 0]).exp().clamp(1, 60)
        probe.observe(probe.features(hidden, torch.full((40,), 4)), left, torch.zeros(40, dtype=torch.bool), fold)
    return ProbeReport(statistics=probe.take_statistics(), steps_with=steps[0], steps_without=steps[1])


def test_reports_of_two_workers_merge_to_what_one_worker_would_say():
    both, one = RunProbe(6, max_new_tokens=64), RunProbe(6, max_new_tokens=64)
    reports = [report_of(1), report_of(2)]
    both.enter(reports)
    one.enter([ProbeReport(statistics=reports[0].statistics + reports[1].statistics, steps_with=0, steps_without=0)])
    np.testing.assert_allclose(both.published().fit.weights, one.published().fit.weights, rtol=1e-9)
    assert both.statistics.counts.tolist() == [80, 80]
    both.enter([])
    assert both.statistics.counts.tolist() == [72, 72]  # older steps count less


def test_a_run_probe_is_restored_from_its_checkpoint_fit_and_gate_included(tmp_path):
    probe, other = RunProbe(6, max_new_tokens=64), RunProbe(6, max_new_tokens=64)
    assert "are used" in probe.enter([report_of(1, steps=(90, 100))])
    assert probe.steps_saved == 10
    probe.save(tmp_path)
    assert other.load(tmp_path) is None
    assert (
        other.published().is_used and other.published().fit.weights.tolist() == probe.published().fit.weights.tolist()
    )
    following = report_of(2, steps=(120, 100))
    assert probe.enter([following]) == other.enter([following]) is not None
    assert probe.published().fit.weights.tolist() == other.published().fit.weights.tolist()


def test_a_checkpoint_without_a_probe_or_of_another_model_begins_anew_and_says_so(tmp_path):
    assert f"{tmp_path / FILE} is not there: the length probe starts anew" == RunProbe(6, max_new_tokens=64).load(
        tmp_path
    )
    RunProbe(6, max_new_tokens=64).save(tmp_path)
    assert (
        "has 14 features, this policy's has 16: it belongs to another model; the length probe starts anew"
        in RunProbe(7, max_new_tokens=64).load(tmp_path)
    )


def test_a_step_without_samples_publishes_what_was_known():
    probe = RunProbe(6, max_new_tokens=64)
    probe.enter([ProbeReport(statistics=ProbeStatistics.zeros(14), steps_with=0, steps_without=0)])
    assert probe.published().fit is None and not probe.published().is_used and probe.steps_saved is None

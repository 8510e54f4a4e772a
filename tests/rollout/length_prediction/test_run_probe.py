"""A run's length probe: what workers report adds up, the gate follows replays, and a checkpoint restores it whole or
not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infsample_rl.rollout.length_prediction.probe import LengthProbe
from infsample_rl.rollout.length_prediction.run_probe import FILE, RECENT, RunProbe
from infsample_rl.types import ProbeReport, ProbeStatistics

EMPTY = ProbeStatistics.zeros(14)


def new_probe() -> RunProbe:
    return RunProbe(6, max_new_tokens=64)


def report_of(seed, steps=(0, 0)):
    probe = LengthProbe(6, max_new_tokens=64)
    draw = np.random.default_rng(seed)
    for fold in (0, 1):
        hidden = torch.from_numpy(draw.normal(size=(40, 6))).float()
        left = (3 + hidden[:, 0]).exp().clamp(1, 60)
        probe.observe(probe.features(hidden, torch.full((40,), 4)), left, torch.zeros(40, dtype=torch.bool), fold)
    return ProbeReport(statistics=probe.take_statistics(), steps_with=steps[0], steps_without=steps[1])


def test_the_gate_opens_when_replays_take_no_more_steps_and_shuts_when_they_do():
    probe = new_probe()

    def enter(with_them, without):
        return probe.enter([ProbeReport(statistics=EMPTY, steps_with=with_them, steps_without=without)])

    assert enter(0, 0) is None and not probe.published().is_used and probe.steps_saved is None
    took = "recent groups, replayed, take"
    assert f"are used from the next step on: {took} 1,900 steps with them and 2,000 without" in enter(1900, 2000)
    assert probe.steps_saved == 100
    assert enter(2050, 2000) is None and probe.published().is_used  # 3,950 of 4,000
    assert f"are not used in the next step, it goes on learning: {took} 6,150 steps with" in enter(2200, 2000)
    assert not probe.published().is_used and enter(0, 0) is None
    for _ in range(RECENT):
        enter(100, 100)
    assert probe.published().is_used  # older ones are forgotten; equal steps: no harm
    first = new_probe().enter([ProbeReport(statistics=EMPTY, steps_with=120, steps_without=100)])
    assert f"are not used in the next step, it goes on learning: {took} 120 steps with them and 100 without" in first


def test_reports_of_two_workers_merge_to_what_one_worker_would_say():
    both, one = new_probe(), new_probe()
    reports = [report_of(1), report_of(2)]
    both.enter(reports)
    one.enter([ProbeReport(statistics=reports[0].statistics + reports[1].statistics, steps_with=0, steps_without=0)])
    np.testing.assert_allclose(both.published().fit.weights, one.published().fit.weights, rtol=1e-9)
    assert both._probe.statistics.counts.tolist() == [80, 80]
    both.enter([])
    assert both._probe.statistics.counts.tolist() == [72, 72]  # older steps count less


def test_a_run_probe_is_restored_from_its_checkpoint_fit_and_gate_included(tmp_path):
    probe, other = new_probe(), new_probe()
    assert "are used" in probe.enter([report_of(1, steps=(90, 100))])
    probe.save(tmp_path)
    assert other.load(tmp_path) is None
    following = report_of(2, steps=(120, 100))
    for _ in range(2):
        ours, theirs = probe.published(), other.published()
        assert ours.is_used == theirs.is_used and ours.fit.weights.tobytes() == theirs.fit.weights.tobytes()
        assert probe.enter([following]) == other.enter([following])
    probe.reset(tmp_path)
    assert probe.published().is_used
    probe.reset(None)
    assert probe.published().fit is None


def test_a_checkpoint_without_a_probe_or_of_another_model_begins_anew_and_says_so(tmp_path):
    assert f"{tmp_path / FILE} is not there: the length probe starts anew" == new_probe().load(tmp_path)
    new_probe().save(tmp_path)
    assert (
        "has 14 features, this policy's has 16: it belongs to another model); the length probe starts anew"
        in RunProbe(7, max_new_tokens=64).load(tmp_path)
    )


def changed(change):
    def damage(path):
        with np.load(path) as file:
            arrays = dict(file)
        change(arrays)
        np.savez(path, **arrays)

    return damage


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b""), "EOFError"),
        (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), "BadZipFile"),
        (flip, "BadZipFile"),
        (changed(lambda arrays: arrays.pop("replays")), "KeyError: 'replays'"),
        (changed(lambda arrays: arrays.pop("yy")), "KeyError: 'yy'"),
        (changed(lambda arrays: arrays.update(replays=np.arange(3))), "cannot reshape"),
        (lambda path: path.write_text("no archive"), FILE),
    ],
    ids=["empty", "truncated", "a bit", "replays", "yy", "replays' shape", "text"],
)
def test_a_damaged_file_is_a_sentence_and_a_fresh_probe(tmp_path, damage, reason):
    probe = new_probe()
    probe.enter([report_of(1, steps=(90, 100))])
    probe.save(tmp_path)
    damage(tmp_path / FILE)
    fresh = new_probe()
    sentence = fresh.load(tmp_path)
    assert sentence.startswith(f"{tmp_path / FILE} is of no use (") and reason in sentence
    assert sentence.endswith("; the length probe starts anew")
    assert fresh._probe.statistics.counts.tolist() == [0, 0] and not fresh.published().is_used
    assert fresh.published().fit is None

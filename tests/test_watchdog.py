"""Silence is told from work, whoever else has come and gone meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from infsample_rl import ray_calls, watchdog
from infsample_rl.config_loading import load_config
from infsample_rl.watchdog import Watchdog


@pytest.fixture
def watch(monkeypatch):
    """watch(seconds, {stream number: steps}): what the watchdog says when that time has passed and the streams tell these running steps."""
    clock, told = SimpleNamespace(now=0.0), {}
    monkeypatch.setattr(ray_calls, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(watchdog, "_running_steps", lambda streams: {stream.number: told[stream.number] for stream in streams})
    monkeypatch.setattr(watchdog, "standing", lambda handle: "silent")
    dog = Watchdog(load_config(["cluster.progress_timeout_s=60"]), lambda text: None)

    def after(seconds, steps):
        clock.now += seconds
        told.update(steps)
        return dog.silence([SimpleNamespace(number=number, index=number, handle=None) for number in steps], [], [])

    return after


def test_a_worker_that_decodes_on_after_another_has_ended_is_not_silent(watch):
    assert watch(11, {0: 50_000, 1: 50_000}) is None
    for second in range(1, 31):  # five minutes, one stream ended: the sum is far below what it was
        assert watch(11, {1: 50_000 + 300 * second}) is None


def test_a_new_worker_begins_at_zero_and_is_not_silent(watch):
    assert watch(11, {0: 50_000}) is None
    assert all(watch(11, {2: 100 * number}) is None for number in range(20))


def test_those_that_stand_still_are_given_up(watch):
    assert watch(11, {0: 7, 1: 9}) is None
    said = [watch(11, {0: 7, 1: 9}) for _ in range(6)]
    assert said[:4] == [None] * 4 and "nothing has moved for" in next(text for text in said if text)

"""Silence is told from work for each worker by itself, whatever others do meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from infsample_rl.cluster import watchdog
from infsample_rl.cluster.arrivals import PendingCall, Return, Stream
from infsample_rl.cluster.watchdog import Watchdog
from infsample_rl.config.loading import load_config
from tests.fakes import STATUS, Handle, Method, Ref


class Worker(Handle):
    """A worker that has done so many running steps, and answers unless it hangs."""

    def __init__(self, steps=0, hangs=False):
        answer = lambda: Ref(self.steps, is_there=not hangs)  # noqa: E731
        super().__init__(progress=Method(answer), status=Method(lambda: Ref(STATUS, is_there=not hangs)), steps=steps)


class Watch:
    """A watchdog, the time, and what is in flight."""

    def __init__(self, settings):
        self.now, self.notes, self.streams, self.calls, self.returns = 0.0, [], [], [], []
        self.dog, self.settings, self.starting = None, settings, set()

    def begin(self):
        config = load_config(
            [
                "cluster.progress_timeout_s=60",
                "rollout.micro_group_size=2",
                *self.settings,
            ]
        )
        workers = SimpleNamespace(has_started=lambda *worker: worker not in self.starting)
        self.dog = Watchdog(config, SimpleNamespace(note=self.notes.append, workers=workers))

    def stream(self, index, worker):
        self.streams.append(Stream(index, worker, 0, {}, since=self.now))
        return worker

    def call(self, role, index, worker=None):
        worker = worker or Worker(hangs=True)
        self.calls.append(PendingCall(role, index, worker, [], since=self.now))
        return worker

    def after(self, seconds, *, arrived=(), working=()):
        """Who is given up when so much time has passed, half a second at a time."""
        given_up = {}
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for worker in working:
                worker.steps += 10
            for role, index in arrived:
                self.dog.moved(role, index)
            given_up |= self.dog.silent([*self.streams, *self.calls, *self.returns])
        return given_up


@pytest.fixture
def watch(monkeypatch, request, fake_ray):
    made = Watch(getattr(request, "param", []))
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: made.now))
    made.begin()
    return made


def test_a_worker_that_decodes_is_never_silent_however_long_nothing_arrives(watch):
    decoding = [watch.stream(0, Worker()), watch.stream(1, Worker(50_000))]
    assert watch.after(900, working=decoding) == {}
    assert watch.notes == []


def test_one_that_hangs_is_given_up_in_its_time_while_others_go_on(watch):
    decoding, hanging = watch.stream(0, Worker()), watch.stream(1, Worker(hangs=True))
    watch.call("reward", 0)
    assert watch.after(55, arrived=[("reward", 0)], working=[decoding]) == {}
    ((worker, said),) = watch.after(30, arrived=[("reward", 0)], working=[decoding]).items()
    assert (
        worker == ("rollout", 1)
        and said == "it has not moved for 80 s (cluster.progress_timeout_s=60)"
        and len(hanging.progress.calls) == 1
    )
    assert watch.notes[-1] == f"rollout worker 1: {said}; its process does not answer"
    assert watch.notes[0] == "waiting: rollout worker 1 has not moved for 40 s" and not any(
        "worker 0" in note for note in watch.notes
    )


def test_one_that_answers_but_stands_still_is_given_up_too(watch):
    decoding = watch.stream(0, Worker())
    watch.stream(1, Worker(7))
    assert watch.after(75, working=[decoding]) == {}, "its first answer shows that it moved until then"
    assert list(watch.after(30, working=[decoding])) == [("rollout", 1)]
    assert "; in phase decode for 1 s, process 7 on here; last log line: none" in watch.notes[-1]


LIMITS = {"reward": 60 + load_config([]).reward.timeout_s, "reference": 60, "learner": 60}


@pytest.mark.parametrize("role", LIMITS)
def test_a_call_has_the_time_since_its_worker_last_answered(watch, role):
    watch.after(300)  # nothing was asked of it
    watch.call(role, 0)
    limit = LIMITS[role]
    assert watch.after(limit) == {}
    watch.dog.moved(role, 0)  # another of its calls
    assert watch.after(limit) == {}
    assert list(watch.after(21)) == [(role, 0)]


@pytest.mark.parametrize("role", LIMITS)
def test_a_long_call_that_gets_on_is_not_given_up_and_one_that_does_not_is(watch, role):
    worker = watch.call(role, 0, Worker())
    assert watch.after(900, working=[worker]) == {} and watch.notes == []
    assert list(watch.after(LIMITS[role] + 41)) == [(role, 0)]


@pytest.mark.parametrize("watch", [["environment.factory=a.py:A", "environment.timeout_s=90"]], indirect=True)
def test_a_worker_whose_samples_wait_for_an_environment_has_the_time_of_a_call_too(watch):
    waiting = watch.stream(0, Worker(hangs=True))
    assert watch.after(149) == {} and waiting.progress.calls
    assert list(watch.after(41)) == [("rollout", 0)]


def test_a_worker_on_its_way_has_the_time_since_anything_moved(watch):
    """It may wait for a place, or for a learner that has rows to do."""
    decoding = watch.stream(0, Worker())
    watch.returns.append(Return(1, Worker(), [], since=watch.now))
    assert watch.after(300, working=[decoding]) == {}
    watch.streams.clear()
    assert watch.after(49) == {}
    assert list(watch.after(41)) == [("rollout", 1)]


@pytest.mark.parametrize("role", ["rollout", "reference"])
def test_a_worker_that_starts_has_the_time_to_start(watch, role):
    watch.starting.add((role, 1))
    if role == "rollout":
        watch.returns.append(Return(1, Worker(), [], since=watch.now))
    else:
        watch.call(role, 1)
    assert watch.after(295) == {}
    watch.starting.clear()
    assert watch.after(60) == {}, "from now on that of any other"
    assert list(watch.after(31)) == [(role, 1)]
    watch.starting.add((role, 1))
    watch.dog.moved(role, 1)
    assert list(watch.after(321)) == [(role, 1)]


def test_a_new_worker_in_the_place_of_a_lost_one_has_a_time_of_its_own(watch):
    watch.stream(1, Worker(hangs=True))
    assert list(watch.after(80)) == [("rollout", 1)]
    watch.streams.clear()
    watch.returns.append(Return(1, Worker(), [], since=watch.now))
    assert watch.after(55) == {}
    watch.returns.clear()
    decoding = watch.stream(1, Worker())
    assert watch.after(300, working=[decoding]) == {}


@pytest.mark.parametrize(
    "watch", [["cluster.colocate=true", "cluster.rollout_workers=1", "cluster.learner_ranks=1"]], indirect=True
)
def test_a_process_that_samples_and_learns_by_turns_is_one(watch):
    both = watch.stream(0, Worker())
    watch.call("learner", 0, both)
    assert watch.after(300, working=[both]) == {}
    assert watch.after(300, arrived=[("learner", 0)]) == {}
    assert list(watch.after(100)) == [("learner", 0)]


def test_a_driver_that_was_stopped_has_seen_nobody_move_and_gives_nobody_up(watch):
    decoding = watch.stream(0, Worker())
    watch.call("learner", 0)
    watch.after(30, working=[decoding])
    watch.now += 3600
    assert watch.after(50, working=[decoding]) == {}
    assert list(watch.after(40, working=[decoding])) == [("learner", 0)]


@pytest.mark.parametrize("watch", [["cluster.progress_timeout_s=6"]], indirect=True)
def test_a_short_limit_still_asks_before_it_gives_up(watch):
    decoding = watch.stream(0, Worker())
    watch.stream(1, Worker(hangs=True))
    assert list(watch.after(11, working=[decoding])) == [("rollout", 1)]

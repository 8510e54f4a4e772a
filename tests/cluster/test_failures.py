"""Restarts are bounded and spaced out; SIGTERM ends a run where it waits."""

from __future__ import annotations

import os
import signal
import sys
from types import SimpleNamespace

import pytest
import ray

from infsample_rl.cluster import connection
from infsample_rl.cluster.connection import connect
from infsample_rl.cluster.interruption import Interruption, Terminated
from infsample_rl.cluster.workers import Restarts, WorkerLost, worker_name
from infsample_rl.config.loading import load_config
from tests.fakes import Handle, Ref, make_workers


def test_restarts_are_bounded_between_two_finished_steps_and_spaced_out():
    said, slept = [], []
    restarts = Restarts(20, said.append, slept.append, str)
    for _ in range(20):
        restarts.begin("rollout worker 1", "its process died")
    with pytest.raises(
        RuntimeError, match=r"rollout worker 1: its process died; cluster.max_restarts=20: 20 restarts since the run"
    ):
        restarts.begin("rollout worker 1", "its process died")
    assert slept[:3] == [0.0, 0.5, 1.0] and slept == sorted(slept) and slept[-1] == slept[-2] <= 60
    restarts.step_finished()
    restarts.begin("the learner", "rank 0 is gone")
    assert slept[-1] == 0.0 and restarts.total == 21 and len(said) == 21


def test_a_node_that_takes_many_workers_with_it_is_one_restart_of_each_at_once():
    slept = []
    restarts = Restarts(3, lambda text: None, slept.append, str)
    for index in range(64):
        restarts.begin(worker_name("rollout", index), "its node is gone")
    assert set(slept) == {0.0} and restarts.total == 64


def test_workers_that_do_the_calls_of_another_role_have_started_under_both_names(fake_ray):
    workers = make_workers(learner=[Handle(), Handle(started=Ref(is_there=False))])
    workers.share("learner", "rollout")
    started = [workers.has_started(role, index) for role in ("learner", "rollout") for index in (0, 1)]
    assert started == [True, False, True, False]


def test_a_worker_in_the_place_of_one_that_had_started_has_not(fake_ray):
    first, spare = Handle(), Handle(started=Ref(is_there=False))
    workers = make_workers(rollout=[first], spares=[spare])
    assert workers.has_started("rollout", 0)
    assert workers.replace(WorkerLost("rollout", 0, "its process died")) is spare
    assert fake_ray.killed == [first] and not workers.has_started("rollout", 0)
    assert workers.is_current("rollout", 0, spare) and not workers.is_current("rollout", 0, first)
    spare.started.is_there = True
    assert workers.has_started("rollout", 0)


@pytest.fixture
def sigterm_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_waits_for_what_must_not_be_left_half_done(sigterm_is_put_back):
    (interruption := Interruption()).install()
    interruption.check()
    with interruption.held(30.0):
        os.kill(os.getpid(), signal.SIGTERM)
        interruption.check()
    with pytest.raises(Terminated):
        interruption.check()
    assert 0 < interruption.seconds_left(30.0) <= 30.0


def test_sigterm_ends_the_wait_for_a_cluster_that_is_still_to_come(tmp_path, sigterm_is_put_back):
    (interruption := Interruption()).install()
    said: list[str] = []

    def note(line: str) -> None:
        said.append(line)
        os.kill(os.getpid(), signal.SIGTERM)

    config = load_config([f"run.dir={tmp_path}", "cluster.address=127.0.0.1:1", "cluster.wait_for_nodes_s=600"])
    with pytest.raises(Terminated):
        connect(config, note, interruption)
    assert len(said) == 1 and "waiting for the Ray cluster at 127.0.0.1:1" in said[0]


@pytest.mark.parametrize("address", [None, "127.0.0.1:1"])
def test_rays_own_sigterm_handler_never_takes_the_signal(tmp_path, monkeypatch, sigterm_is_put_back, address):
    """It raises SystemExit wherever it is; where an import swallows that, the run goes on or hangs."""
    reached = []

    def init(*_, **__):
        ray._private.utils.set_sigterm_handler(lambda number, _: sys.exit(number))  # as ray.init() does
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("the end of ray.init()")
        return SimpleNamespace(address_info={"session_dir": str(tmp_path / "session")})

    (interruption := Interruption()).install()
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connection, "_admitting_address", lambda *_: address)
    settings = [] if address is None else [f"cluster.address={address}"]
    with pytest.raises(Terminated):
        connect(load_config([f"run.dir={tmp_path}", *settings]), print, interruption)
    assert reached == ["the end of ray.init()"] and signal.getsignal(signal.SIGTERM) == handler

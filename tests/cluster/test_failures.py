"""Restarts are bounded and spaced out; SIGTERM ends a run where it waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from infsample_rl.cluster import connection as ray_connection
from infsample_rl.cluster.connection import connect
from infsample_rl.cluster.failures import Restarts, WorkerLost, worker_name
from infsample_rl.cluster.interruption import Interruption, Terminated
from infsample_rl.cluster.workers import Crew
from infsample_rl.config.loading import load_config


def test_restarts_are_bounded_between_two_finished_steps_and_spaced_out():
    said, slept = [], []
    restarts = Restarts(3, said.append, slept.append)
    for _ in range(3):
        restarts.begin("rollout worker 1", "its process died")
    with pytest.raises(
        RuntimeError, match=r"rollout worker 1: its process died; cluster.max_restarts=3: 3 restarts since the run last"
    ):
        restarts.begin("rollout worker 1", "its process died")
    assert slept == [0.0, 0.5, 1.0]
    restarts.step_finished()
    restarts.begin("the learner", "rank 0 is gone")
    assert slept[-1] == 0.0 and restarts.total == 4 and len(said) == 4


def test_a_node_that_takes_many_workers_with_it_is_one_restart_of_each_at_once():
    slept = []
    restarts = Restarts(3, lambda text: None, slept.append)
    for index in range(64):
        restarts.begin(worker_name("rollout", index), "its node is gone")
    assert set(slept) == {0.0} and restarts.total == 64


def test_no_pause_is_longer_than_half_a_minute():
    slept = []
    restarts = Restarts(100, lambda text: None, slept.append)
    for _ in range(20):
        restarts.begin("reward worker 0", "its process died")
    assert max(slept) == 30.0 == slept[-1]


def test_workers_that_do_the_calls_of_another_role_have_started_under_both_names():
    crew = Crew(
        lambda role, index: (f"{role} {index}", f"answer {index}"), print, lambda answer: answer == "answer 0", None
    )
    crew.start("learner", 2)
    crew.share("learner", "rollout")
    assert [crew.has_started(role, index) for role in ("learner", "rollout") for index in (0, 1)] == [
        True,
        False,
        True,
        False,
    ]


def test_a_worker_that_has_started_is_not_asked_again_and_one_in_its_place_is():
    asked, there = [], {"answer 0"}
    numbers = iter(range(3))
    crew = Crew(
        lambda role, index: ("handle", f"answer {next(numbers)}"),
        print,
        lambda answer: asked.append(answer) or answer in there,
        None,
    )
    crew.start("rollout", 2)
    assert [crew.has_started("rollout", 0) for _ in range(3)] == [True, True, True] and asked == ["answer 0"]
    assert [crew.has_started("rollout", 1) for _ in range(2)] == [False, False]
    crew.add("rollout", 0)
    assert not crew.has_started("rollout", 0) and asked[-1] == "answer 2"
    there.add("answer 2")
    assert crew.has_started("rollout", 0)


def test_workers_have_the_names_of_the_field():
    assert (
        worker_name("learner", 0) == "learner rank 0"
        and str(WorkerLost("reward", 2, "gone")) == "reward worker 2: gone"
    )


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


def test_sigterm_before_the_run_begins_ends_the_command_in_order(tmp_path):
    """Also where an exception would be lost: in a callback of the interpreter."""
    script = (
        "import os, signal, weakref, infsample_rl.main as main\n"
        "class Kept: pass\n"
        "def train(config):\n"
        "    kept = Kept()\n"
        "    weakref.finalize(kept, os.kill, os.getpid(), signal.SIGTERM)\n"
        "    print('so far')\n"
        "    del kept\n"
        "    raise SystemExit('it went on')\n"
        "main.train = train\n"
        f"raise SystemExit(main.main(['run.dir={tmp_path}']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("so far\nSIGTERM: ended before the run began"), done


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


def test_sigterm_that_rays_own_handler_took_ends_the_run_too(tmp_path, monkeypatch, sigterm_is_put_back):
    def init(*_, **__):
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as ray.init() does
        os.kill(os.getpid(), signal.SIGTERM)

    (interruption := Interruption()).install()
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray_connection, "_start_local", init)
    with pytest.raises(Terminated):
        connect(load_config([f"run.dir={tmp_path}"]), print, interruption)
    assert signal.getsignal(signal.SIGTERM) == handler

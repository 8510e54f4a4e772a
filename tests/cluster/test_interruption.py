"""What ends a run in order, and when."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from infsample_rl.cluster import connection
from infsample_rl.cluster import interruption as interruption_module
from infsample_rl.cluster.connection import RayProcesses
from infsample_rl.cluster.interruption import LOOK_S, Interruption, Terminated


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr(interruption_module.time, "monotonic", lambda: now[0])
    return now


def test_what_is_gone_ends_the_run_at_the_next_look(clock):
    interruption, gone, looks = Interruption(), [None], []

    def find_failure():
        looks.append(clock[0])
        return gone[0]

    interruption.end_when(find_failure)
    interruption.check()
    gone[0] = "Ray's raylet has not answered"
    interruption.check()  # too soon for another look
    clock[0] += LOOK_S
    with pytest.raises(Terminated):
        interruption.check()
    assert interruption.failure == interruption.reason == "Ray's raylet has not answered" and looks == [
        100.0,
        100.0 + LOOK_S,
    ]
    clock[0] += 5
    assert interruption.seconds_left(30) == 25.0


def test_what_must_not_be_left_half_done_holds_a_failure_back_as_it_does_sigterm(clock):
    interruption = Interruption()
    interruption.end_when(lambda: "gone")
    with interruption.held(10):
        interruption.check()
        clock[0] += 9
        interruption.check()
        clock[0] += 1
        with pytest.raises(Terminated):
            interruption.check()


def test_after_sigterm_nothing_else_is_the_reason(clock):
    interruption = Interruption()
    interruption.end_when(lambda: "gone")
    interruption._request()
    with pytest.raises(Terminated):
        interruption.check()
    assert interruption.reason == "SIGTERM" and interruption.failure is None


def test_a_process_of_ray_is_gone_once_it_takes_no_connection_for_its_time(monkeypatch):
    control, now = socket.create_server(("127.0.0.1", 0)), [0.0]
    host, port = control.getsockname()
    processes = RayProcesses.__new__(RayProcesses)
    processes._silent_since, processes._processes = {}, [("the control service", (host, port), 20.0)]
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert processes.failure() is None
    control.close()
    assert processes.failure() is None
    now[0] = 19.0
    assert processes.failure() is None
    again = socket.create_server((host, port))  # it was started again: its time begins anew
    assert processes.failure() is None
    again.close()
    now[0] = 30.0
    assert processes.failure() is None
    now[0] = 50.0
    assert processes.failure() == f"the control service has not answered at 127.0.0.1:{port} for 20 s"

"""What a reference that holds no value is taken for."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ray

from infsample_rl.cluster import asking
from infsample_rl.cluster import calls as ray_calls
from infsample_rl.cluster import workers as crew_module
from infsample_rl.cluster.asking import Asking
from infsample_rl.cluster.calls import PayloadLost, Waiting, learner_failure, value_of
from infsample_rl.cluster.failures import StepLost, WorkerLost
from infsample_rl.cluster.interruption import Interruption
from infsample_rl.cluster.weight_delivery import WeightDelivery
from infsample_rl.cluster.workers import Crew
from infsample_rl.config.loading import load_config


@pytest.fixture(scope="module")
def here():
    """Ray on this machine, with room for a few actors."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the home folder
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


@ray.remote
class Rollout:
    def stream(self):
        yield os.getpid()
        time.sleep(600)
        yield "payload"


@ray.remote
class Reward:
    def score(self, *payloads):
        return len(payloads)

    def refuse(self):
        raise ValueError("reward.functions is wrong")


@pytest.mark.slow
def test_what_a_worker_died_before_sending_is_a_lost_payload_not_a_failure_of_its_reader(here):
    stream, reward = Rollout.remote().stream.options(num_returns="streaming").remote(), Reward.remote()
    os.kill(value_of(next(stream), "rollout", 0), signal.SIGKILL)  # between a header and its payload
    payload = next(stream)
    with pytest.raises(PayloadLost, match="reward worker 0"):
        value_of(reward.score.remote(payload), "reward", 0)
    with pytest.raises(PayloadLost):
        value_of(reward.score.remote(ray.put([1]), payload), "reward", 0)  # one of several
    assert value_of(reward.score.remote(ray.put([1])), "reward", 0) == 1  # it lives
    with pytest.raises(WorkerLost):
        value_of(payload, "rollout", 0)


@pytest.mark.slow
def test_a_refused_setting_stays_a_value_error(here):
    with pytest.raises(ValueError, match=r"reward worker 0: reward.functions is wrong"):
        value_of(Reward.remote().refuse.remote(), "reward", 0)


HANGS = [
    "[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 300000ms for recv operation to complete",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 300012 milliseconds "
    "before timing out.",
]


@pytest.mark.parametrize("said", HANGS)
def test_a_collective_to_which_a_rank_does_not_come_loses_the_step(monkeypatch, said):
    monkeypatch.setattr(ray_calls, "status_of", lambda handle: "it answers")
    found = learner_failure({0: "a", 1: "b"}, RuntimeError(f"learner rank 0: {said}"))
    assert isinstance(found, StepLost) and "half of cluster.progress_timeout_s" in str(found) and said in str(found)
    raised = RuntimeError("learner rank 0: loss is nan")
    assert learner_failure({0: "a", 1: "b"}, raised) is raised


@pytest.mark.parametrize("hangs", [True, False])
def test_a_rollout_worker_that_hangs_while_weights_come_is_lost_not_the_run(monkeypatch, hangs):
    """The learner, which has waited for it, says so; only the worker itself shows by its silence that it is meant."""
    crew = Crew(lambda role, index: (f"{role} {index}", True), lambda handle: None, bool, None)
    crew.start("rollout", 2)
    monkeypatch.setattr(asking, "status_of", lambda handle: None if hangs and handle == "rollout 1" else "it answers")
    asks = Asking(crew, print, Interruption(), Waiting())
    delivery = WeightDelivery(
        load_config(["cluster.weight_sync=broadcast"]), crew, asks, print, Interruption(), lambda role, index: True
    )

    def gather(*arguments):
        raise RuntimeError(
            "learner rank 0: weights version 3: rollout worker 1 died or hangs (it did not send 'loaded' within 300 s)"
        )

    monkeypatch.setattr(delivery, "_link", lambda rollout: None)
    monkeypatch.setattr(asks, "gather", gather)
    with pytest.raises(WorkerLost if hangs else RuntimeError, match="rollout worker 1") as raised:
        delivery._send({})
    assert isinstance(raised.value, WorkerLost) == hangs


@pytest.mark.parametrize("has_place", [True, False])
def test_a_rollout_worker_that_hangs_as_it_starts_is_lost_once_it_has_had_its_place_for_its_time(
    monkeypatch, has_place
):
    """Also while enough others have started; one that still waits for a place is waited for."""
    now = [0.0]
    monkeypatch.setattr(crew_module.time, "monotonic", lambda: now[0])
    crew = Crew(lambda role, index: (f"{role} {index}", index != 1), lambda handle: None, bool, None)
    crew.start("rollout", 3)
    config = load_config(["cluster.progress_timeout_s=400"])
    delivery = WeightDelivery(
        config,
        crew,
        Asking(crew, print, Interruption(), Waiting()),
        print,
        Interruption(),
        lambda role, index: has_place,
    )
    now[0] = 400.0
    assert sorted(delivery._those_that_started()) == [0, 2]
    now[0] = 401.0
    if has_place:
        with pytest.raises(WorkerLost, match="rollout worker 1: it has not started within 400 s"):
            delivery._those_that_started()
    else:
        assert sorted(delivery._those_that_started()) == [0, 2] and crew.starting_s("rollout", 1) == 0.0

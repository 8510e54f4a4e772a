"""What a reference that holds no value is taken for."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ray

from infsample_rl.failures import WorkerLost
from infsample_rl.ray_calls import PayloadLost, value_of


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

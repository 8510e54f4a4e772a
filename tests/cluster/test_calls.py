"""What an answer is taken for that holds no value, and who is lost when the learner fails."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest
import ray

from infsample_rl.cluster.calls import Calls, PayloadLost, value_of
from infsample_rl.cluster.cluster import LearnerRanks
from infsample_rl.cluster.interruption import Interruption
from infsample_rl.cluster.workers import StepLost, WorkerLost
from infsample_rl.config.loading import load_config
from infsample_rl.types import EngineFailed, LossTotals
from tests.fakes import DIED, Handle, Method, Ref, make_workers, raised


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

    def fail(self):
        raise EngineFailed("weights did not all reach vLLM")


@pytest.mark.slow
def test_a_worker_whose_engine_has_failed_is_lost_though_its_process_lives(here):
    with pytest.raises(WorkerLost, match="weights did not all reach vLLM"):
        value_of(Reward.remote().fail.remote(), "rollout", 0)


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


def make_calls(**roles):
    return Calls(make_workers(**roles), print, Interruption())


def test_answers_come_in_the_workers_order_and_the_first_that_is_silent_is_lost(fake_ray):
    silent, notes = Handle(score=Method(lambda *_: Ref(is_there=False)), status=Method(DIED)), []
    calls = Calls(make_workers(reward=[Handle(score=Method(1)), silent]), notes.append, Interruption())
    assert calls.ask("reward", "to score", lambda worker: worker.score.remote(), 1.0, only=[0]) == [1]
    with pytest.raises(WorkerLost, match="reward worker 1: to score: no answer within 0.05 s"):
        calls.ask("reward", "to score", lambda worker: worker.score.remote(), 0.05)
    assert notes == ["to score: reward worker 1 has not answered within 0.05 s; its process does not answer"]


HANGS = [
    "[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 300000ms for recv operation to complete",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 300012 milliseconds "
    "before timing out.",
]


@pytest.mark.parametrize("said", [*HANGS, "loss is nan"])
def test_a_collective_to_which_a_rank_does_not_come_loses_the_step_and_what_a_rank_raises_ends_the_run(fake_ray, said):
    ranks = [Handle(step=Method(raised(RuntimeError(said)))), Handle(step=Method(raised(RuntimeError(said))))]
    with pytest.raises(RuntimeError) as found:
        make_calls(learner=ranks).ask("learner", "optimizer step", lambda rank: rank.step.remote(), 1.0)
    assert isinstance(found.value, StepLost) == (said in HANGS) and said in str(found.value)
    assert ("half of cluster.progress_timeout_s" in str(found.value)) == (said in HANGS)


def test_a_rank_that_is_gone_loses_the_step_whatever_the_others_raise(fake_ray):
    ranks = [Handle(step=Method(raised(RuntimeError("Connection reset by peer")))), Handle(status=Method(DIED))]
    with pytest.raises(StepLost, match="learner rank 1: gone, and so learner rank 0: Connection reset by peer"):
        make_calls(learner=ranks).ask("learner", "optimizer step", lambda rank: rank.step.remote(), 1.0, only=[0])


def test_of_the_ranks_metrics_the_memory_is_the_fullest_ranks(fake_ray):
    ranks = [Handle(step=Method({"learner/lr": 0.1, "memory/learner_peak_bytes": peak})) for peak in (3.0, 7.0, 5.0)]
    learner = LearnerRanks(load_config([]), make_calls(learner=ranks), None, SimpleNamespace())
    totals = LossTotals(num_sequences=1, num_tokens=1, length_normalizer=1)
    assert learner.step(totals, is_last=True) == {"learner/lr": 0.1, "memory/learner_peak_bytes": 7.0}

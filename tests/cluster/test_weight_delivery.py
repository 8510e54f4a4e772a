"""Versions of the weights on their way: who gets them, who is lost meanwhile, and who is still waited for."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from infsample_rl.cluster import workers as workers_module
from infsample_rl.cluster.calls import Calls
from infsample_rl.cluster.cluster import Cluster
from infsample_rl.cluster.interruption import Interruption
from infsample_rl.cluster.weight_delivery import WeightDelivery
from infsample_rl.config.loading import load_config
from infsample_rl.model.weight_sync.store import StoreAddress
from infsample_rl.types import EngineFailed, WeightSyncReport
from tests.fakes import DIED, Handle, Method, Ref, make_workers, raised


def report(version):
    return WeightSyncReport(version=version, num_bytes=8, seconds=0.0)


def make(settings, *, spares=(), has_place=True, **roles):
    calls = Calls(make_workers(spares=spares, **roles), print, Interruption())
    return WeightDelivery(load_config(settings), calls, lambda role, index: has_place)


class Linked(Handle):
    """A rollout worker that takes weights by broadcast."""

    def __init__(self, **methods):
        super().__init__(join_weight_link=Method(None), receive_weights=Method(report(3)), **methods)


@pytest.mark.parametrize("hangs", [True, False])
def test_a_rollout_worker_that_hangs_while_weights_come_is_lost_not_the_run(fake_ray, hangs):
    """The learner, which has waited for it, says so; only the worker itself shows by its silence that it is meant."""
    said = raised(RuntimeError("weights version 3: rollout worker 1 died or hangs (it did not send 'loaded')"))
    learner = Handle(
        host_weight_link=Method(StoreAddress("here", 1, b"")),
        join_weight_link=Method(None),
        send_weights=Method(said, report(3)),
    )
    silent, spare = Linked(status=Method(DIED) if hangs else Method("it lives")), Linked()
    delivery = make(["cluster.weight_sync=broadcast"], spares=[spare], rollout=[Linked(), silent], learner=[learner])
    if hangs:
        assert delivery.publish(3, None).version == 3
        assert fake_ray.killed == [silent] and len(spare.receive_weights.calls) == 1 and delivery.holders == {0, 1}
    else:
        with pytest.raises(RuntimeError, match="learner rank 0: weights version 3: rollout worker 1 died or hangs"):
            delivery.publish(3, None)
        assert fake_ray.killed == []


@pytest.mark.parametrize("has_place", [True, False])
def test_a_rollout_worker_that_hangs_as_it_starts_is_lost_once_it_has_had_its_place_for_its_time(
    monkeypatch, fake_ray, has_place
):
    """Also while enough others have started; one that still waits for a place is waited for."""
    now = [0.0]
    monkeypatch.setattr(workers_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    first, late, third, spare = (Handle(load_weights=Method(lambda *_: Ref(report(1)))) for _ in range(4))
    late.started = Ref(is_there=False)
    delivery = make(
        ["cluster.progress_timeout_s=400", "cluster.weight_sync=object_store"],
        spares=[spare],
        has_place=has_place,
        rollout=[first, late, third],
        learner=[Handle(publish=Method(lambda *_: Ref("weights")))],
    )
    now[0] = 400.0
    assert delivery.publish(1, None).num_bytes == 8 and delivery.holders == {0, 2} and fake_ray.killed == []
    now[0] = 401.0
    delivery.publish(1, None)
    assert fake_ray.killed == [late] * has_place and delivery.holders == ({0, 1, 2} if has_place else {0, 2})


def test_weights_that_no_engine_takes_end_the_run_at_the_second(fake_ray):
    said = raised(EngineFailed("weights did not all reach vLLM: no such layer"))

    def engine(*answers) -> Handle:
        return Handle(load_weights=Method(*answers))

    learner = [Handle(publish=Method(lambda *_: Ref("weights")))]
    settings = ["cluster.weight_sync=object_store"]
    spares = [engine(report(3), said), engine(report(4))]
    delivery = make(settings, spares=spares, rollout=[engine(said)], learner=learner)
    assert [delivery.publish(version, None).version for version in (3, 4)] == [3, 4]  # each may fail once
    delivery = make(settings, spares=[engine(said), engine(said)], rollout=[engine(said)], learner=learner)
    with pytest.raises(RuntimeError, match="rollout worker 0: weights did not .* no such layer, in a new engine too"):
        delivery.publish(3, None)
    assert len(fake_ray.killed) == 3


def test_an_engine_that_holds_another_version_ends_the_run(fake_ray):
    delivery = make(
        ["cluster.weight_sync=object_store"],
        rollout=[Handle(load_weights=Method(report(2)))],
        learner=[Handle(publish=Method("weights"))],
    )
    with pytest.raises(RuntimeError, match="hold weights version 2, version 3 was published"):
        delivery.publish(3, None)


def test_engines_that_take_turns_rest_before_the_learner_works_and_hold_no_version_until_the_next(fake_ray):
    """One that is lost is replaced, and rests too, so that nothing of it comes in the learner's way."""
    loads = {"load_weights": Method(lambda *_: Ref(report(3)))}
    first, gone, spare = (
        Handle(rest=Method(None), **loads),
        Handle(rest=Method(DIED)),
        Handle(rest=Method(None), **loads),
    )
    learner = [Handle(publish=Method(lambda *_: Ref("weights"))) for _ in range(2)]
    settings = ["rollout.engine=vllm", "cluster.colocate=true"]
    delivery = make(settings, spares=[spare], rollout=[first, gone], learner=learner)
    delivery.holders.update([0, 1])
    delivery.release()
    assert fake_ray.killed == [gone] and len(spare.rest.calls) == 1 and delivery.holders == set()
    assert delivery.publish(3, None).version == 3 and delivery.holders == {0, 1}


def test_engines_that_take_turns_rest_before_new_learner_ranks_load():
    said: list[str] = []
    parts = {
        "traffic": SimpleNamespace(abandon=lambda: said.append("abandon")),
        "weights": SimpleNamespace(release=lambda: said.append("release")),
        "_calls": SimpleNamespace(workers=SimpleNamespace(replace_all=lambda role, why: said.append(role))),
        "learner": SimpleNamespace(start=lambda checkpoint: said.append("start")),
    }
    config = load_config(["rollout.engine=vllm", "cluster.colocate=true"])
    Cluster.return_to(SimpleNamespace(_config=config, **parts), None, "a rank died")
    assert said == ["abandon", "release", "learner", "start"]


@pytest.mark.parametrize("publish", ["merged", "adapters"])
def test_an_object_store_has_to_hold_what_travels_alone(tiny_qwen3, publish):
    adapters = ["learner.lora_rank=1", "learner.lora_targets=[q_proj]", f"learner.lora_publish={publish}"]
    config = load_config([f"model.path={tiny_qwen3}", "cluster.weight_sync=object_store", *adapters])
    room = SimpleNamespace(object_store_bytes=lambda: 2**26 + 2**12)  # beside what is kept for samples
    refused = pytest.raises(ValueError, match="object store must have") if publish == "merged" else nullcontext()
    with refused:
        Cluster._check_object_store(SimpleNamespace(_config=config, _session=room))

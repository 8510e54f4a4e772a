"""Which way the weights go follows from who has a GPU; what cannot work is refused in one line before anything
starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from infsample_rl.config import ClusterConfig
from infsample_rl.model.weight_sync.transport import broadcast_backend, check_object_store, choose_transport


def config(engine: str = "native", **settings) -> SimpleNamespace:
    """What of a Config the transport follows from."""
    made = cluster(**settings)
    together = {"shares_process": engine == "native", "takes_turns": engine == "vllm"} if made.colocate else {}
    return SimpleNamespace(cluster=made, **{"shares_process": False, "takes_turns": False} | together)


def cluster(**settings) -> ClusterConfig:
    """Settings that __post_init__ may still refuse, as fractions of a GPU for the learner, are set after it."""
    made = ClusterConfig()
    for name, value in settings.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("settings", "transport"),
    [
        ({}, "object_store"),
        ({"colocate": True}, "local"),
        ({"colocate": True, "engine": "vllm", "learner_gpus": 1, "rollout_gpus": 1}, "object_store"),
        ({"learner_gpus": 1, "rollout_gpus": 1}, "broadcast"),
        ({"learner_gpus": 1, "rollout_gpus": 0.5}, "object_store"),
        ({"learner_gpus": 1}, "object_store"),
        ({"weight_sync": "broadcast"}, "broadcast"),
        ({"weight_sync": "object_store", "learner_gpus": 1, "rollout_gpus": 1}, "object_store"),
        ({"weight_sync": "cuda_ipc", "learner_gpus": 0.5, "rollout_gpus": 0.5}, "cuda_ipc"),
    ],
)
def test_the_transport_follows_from_the_settings(settings, transport):
    assert choose_transport(config(**settings)) == transport


def test_nccl_only_among_whole_gpus():
    assert broadcast_backend(cluster(learner_gpus=1, rollout_gpus=1)) == "nccl"
    assert broadcast_backend(cluster(learner_gpus=1, rollout_gpus=0.5)) == broadcast_backend(cluster()) == "gloo"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_gpus": 1}, "cluster.learner_gpus must be > 0 with cluster.weight_sync=cuda_ipc, got 0"),
        ({"learner_gpus": 1}, "cluster.rollout_gpus must be > 0 with cluster.weight_sync=cuda_ipc, got 0"),
        (
            {"learner_gpus": 1, "rollout_gpus": 0.5, "rollout_workers": 2},
            "<= 1, got 1 x 1 \\+ 2 x 0.5; the nearest .* cluster.weight_sync=broadcast",
        ),
    ],
)
def test_cuda_ipc_without_a_shared_gpu_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        choose_transport(config(weight_sync="cuda_ipc", **settings))


def test_an_object_store_too_small_for_one_version_is_refused_with_the_smallest_that_works():
    needed = 1_000_000_000 + 100_000_000 + 67_108_864
    check_object_store(1_000_000_000, needed)
    with pytest.raises(
        ValueError, match=r"must have >= 1,167,108,864 bytes .* got 1,167,108,863: run `ray start .*=1167108864`"
    ):
        check_object_store(1_000_000_000, needed - 1)

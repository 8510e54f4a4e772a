"""Which processes a run has and which nodes take them: table tests of pure arithmetic."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from infsample_rl.config.cluster import ClusterConfig
from infsample_rl.config.loading import load_config
from infsample_rl.plan.placement import (
    Node,
    WorkerGroup,
    bundle_of,
    plan,
    refusal,
    reservations,
    total_cpus,
    total_gpus,
    worker_groups,
)


def layout(*overrides: str) -> list[tuple[str, int, float]]:
    return [(group.role, group.count, group.gpus) for group in worker_groups(load_config(list(overrides)))]


def node(name: str, cpus: float, gpus: float = 0, *, of: tuple[float, float] | None = None) -> Node:
    all_cpus, all_gpus = of or (cpus, gpus)
    return Node(name=name, cpus=cpus, gpus=gpus, all_cpus=all_cpus, all_gpus=all_gpus)


def on_nodes(places: dict, role: str) -> list[int]:
    return [place for (name, _), place in sorted(places.items()) if name == role]


def test_reference_workers_with_a_kl_in_loss_or_reward_and_none_without():
    plain = [("rollout", 3, 0.0), ("reward", 1, 0.0), ("learner", 2, 0.0)]
    assert layout("objective=no_kl", "cluster.rollout_workers=3") == plain
    assert ("reference", 1, 0.0) in layout("objective=default")
    assert ("reference", 1, 0.0) in layout("objective=no_kl", "objective.kl_reward_coef=0.1")


def test_every_worker_has_its_cpus():
    config = load_config(["cluster.cpus_per_worker=2"])
    assert {group.role: group.cpus for group in worker_groups(config)} == {"rollout": 2, "reward": 2, "learner": 2}
    assert WorkerGroup(role="reward", count=1, cpus=0, gpus=0).bundle == {"CPU": 0.001}, "Ray reserves no empty bundle"


def test_learner_ranks_are_packed_and_the_others_spread_in_reservations_of_their_own():
    config = load_config(["objective=default", "cluster.rollout_workers=3"])
    asked = [(item.name, item.strategy, len(item.workers)) for item in reservations(config)]
    assert asked == [
        ("learner", "PACK", 2),
        ("reference", "SPREAD", 1),
        ("rollout", "SPREAD", 3),
        ("reward", "SPREAD", 1),
    ]
    colocated = load_config(["objective=no_kl", "cluster.colocate=true"])
    assert [(item.name, item.strategy) for item in reservations(colocated)] == [
        ("learner", "PACK"),
        ("reward", "SPREAD"),
    ]


def test_learner_and_engine_that_share_a_gpu_are_one_reservation_on_one_node():
    config = load_config(
        [
            "cluster.weight_sync=cuda_ipc",
            "cluster.learner_ranks=1",
            "cluster.learner_gpus=0.5",
            "cluster.rollout_gpus=0.25",
        ]
    )
    assert reservations(config)[0].strategy == "STRICT_PACK"
    assert reservations(config)[0].workers == [("learner", 0), ("rollout", 0), ("rollout", 1)]


def test_an_engine_that_takes_turns_has_the_seat_of_its_learner_rank_and_half_of_the_gpu_in_rays_books():
    gpus = ["cluster.learner_gpus=1", "cluster.rollout_gpus=1"]
    turns = ["objective=no_kl", "cluster.colocate=true", "rollout.engine=vllm", *gpus]
    config = load_config(turns)
    groups = {group.role: group for group in worker_groups(config)}
    learner = reservations(config)[0]
    assert learner.strategy == "PACK"
    assert learner.seats == [(("learner", rank), ("rollout", rank)) for rank in range(2)]
    assert bundle_of(learner.seats[0], groups) == {"CPU": 2.0, "GPU": 1.0} and total_gpus(config) == 2
    assert len(plan(config, [node("a", 8, 2)])) == 5 and refusal(config, [node("a", 8, 2)]) is None
    assert "cluster.learner_ranks=1 cluster.rollout_workers=1" in refusal(config, [node("a", 8, 1)])


def test_eight_gpus_on_two_nodes_and_a_head_without_one():
    config = load_config(["+experiment=math_qwen3_8b"])  # 3 rollout, 4 learner, 1 reference
    assert (total_gpus(config), total_cpus(config)) == (8, 9)
    places = plan(config, [node("head", 4), node("a", 16, 4), node("b", 16, 4)])
    assert len(set(on_nodes(places, "learner"))) == 1, "packed"
    learner = on_nodes(places, "learner")[0]
    assert 0 not in on_nodes(places, "rollout") + on_nodes(places, "reference") and learner != 0
    assert set(on_nodes(places, "rollout") + on_nodes(places, "reference")) == {3 - learner}


def test_rollout_workers_are_spread_over_unequal_nodes():
    config = load_config(["objective=no_kl", "cluster.rollout_workers=4", "cluster.learner_ranks=1"])
    assert Counter(on_nodes(plan(config, [node("a", 2), node("b", 64), node("c", 4)]), "rollout")) == {0: 1, 1: 2, 2: 1}


def test_packing_takes_a_second_node_when_one_does_not_hold_all_ranks():
    config = load_config(
        ["cluster.learner_ranks=6", "cluster.learner_gpus=1", "objective=no_kl", "cluster.rollout_workers=1"]
    )
    assert Counter(on_nodes(plan(config, [node("a", 16, 4), node("b", 16, 8)]), "learner")) == {1: 6}
    assert Counter(on_nodes(plan(config, [node("a", 16, 4), node("b", 16, 4)]), "learner")) == {0: 4, 1: 2}


def test_too_few_gpus_name_what_is_wanted_there_missing_and_the_way_without():
    config = load_config(["+experiment=kk_qwen3_1.7b"])
    assert refusal(config, [node("this machine", 4, 1)]) == (
        "1 rollout worker (1 CPU and 1 GPU) + 1 reward worker (1 CPU) + 1 learner rank (1 CPU and 1 GPU) + 1 reference "
        "worker (1 CPU and 1 GPU) want "
        "4 CPUs and 3 GPUs, but there are 4 CPUs and 1 GPU free (this machine: 4 of 4 CPUs, 1 of 1 GPUs); no place for "
        "1 rollout worker (1 CPU and 1 "
        "GPU), 1 reference worker (1 CPU and 1 GPU); without a GPU: cluster.rollout_gpus=0 cluster.learner_gpus=0 "
        "cluster.reference_gpus=0"
    )
    assert refusal(config, [node("this machine", 4, 3)]) is None


def test_the_way_without_gpus_is_one_that_can_be_gone_also_where_processes_are_shared():
    shared = ["objective=no_kl", "cluster.colocate=true"]
    gpus = ["cluster.learner_gpus=1", "cluster.rollout_gpus=1"]
    said = refusal(load_config([*shared, *gpus]), [node("a", 16)])
    assert said.endswith("without a GPU: cluster.rollout_gpus=0 cluster.learner_gpus=0")
    load_config([*shared, *gpus, "cluster.rollout_gpus=0", "cluster.learner_gpus=0"])


def test_fewer_workers_are_proposed_where_some_fit():
    config = load_config(["objective=no_kl", "cluster.rollout_workers=8", "cluster.learner_ranks=1"])
    problem = refusal(config, [node("a", 2), node("b", 4)])
    assert (
        "no place for 3 rollout workers (1 CPU each), 1 reward worker (1 CPU); what fits: cluster.rollout_workers=4"
        in problem
    )
    colocated = load_config(
        ["objective=no_kl", "cluster.learner_ranks=4", "cluster.rollout_workers=4", "cluster.colocate=true"]
    )
    assert refusal(colocated, [node("a", 4)]).endswith("; what fits: cluster.learner_ranks=3 cluster.rollout_workers=3")


def test_what_other_work_holds_is_told_apart_from_what_is_not_there():
    config = load_config(["objective=no_kl"])  # 5 CPUs
    busy, small = refusal(config, [node("a", 3, of=(8, 0))]), refusal(config, [node("a", 3)])
    assert "a: 3 of 8 CPUs" in busy and "it fits once other work on these nodes has ended" in busy
    assert "other work" not in small


def test_a_worker_larger_than_every_node_names_what_sets_its_size():
    config = load_config(["objective=no_kl", "cluster.learner_ranks=1", "cluster.cpus_per_worker=32"])
    problem = refusal(config, [node("a", 16), node("b", 24)])
    assert (
        "no place for 2 rollout workers (32 CPUs each), 1 reward worker (32 CPUs), 1 learner rank (32 CPUs)" in problem
        and "what one takes is set by cluster.cpus_per_worker" in problem
    )


def test_halves_of_two_gpus_are_no_whole_one():
    whole = WorkerGroup(role="learner", count=1, cpus=1, gpus=1)
    half = WorkerGroup(role="rollout", count=1, cpus=1, gpus=0.5)
    assert not node("a", 4, 0.5).holds(whole) and node("a", 4, 0.5).holds(half) and node("a", 4, 1.5).holds(whole)
    assert not node("a", 4, 0.25).holds(half) and node("a", 4, 1.25).holds(half)


def test_many_nodes_are_told_in_one_line():
    config = load_config(["cluster.learner_gpus=1", "cluster.learner_ranks=64"])
    problem = refusal(config, [node(f"n{i}", 16, 4) for i in range(12)])
    assert (
        "48 GPUs free (12 nodes like n0: 16 of 16 CPUs, 4 of 4 GPUs)" in problem
        and "what fits: cluster.learner_ranks=48" in problem
    )


KK_TINY = load_config([])
amounts = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(nodes=amounts, rollout=st.integers(1, 6), ranks=st.integers(1, 4), gpus=st.sampled_from([0.0, 1.0]))
def test_no_node_takes_more_than_it_has_and_no_refusal_means_everyone_has_a_place(nodes, rollout, ranks, gpus):
    cluster = ClusterConfig(rollout_workers=rollout, learner_ranks=ranks, learner_gpus=gpus)
    config = dataclasses.replace(KK_TINY, cluster=cluster)
    places = plan(config, [node(str(index), cpus, gpus) for index, (cpus, gpus) in enumerate(nodes)])
    groups = {group.role: group for group in worker_groups(config)}
    for index, (cpus, gpus_there) in enumerate(nodes):
        here = [groups[role] for (role, _), place in places.items() if place == index]
        assert sum(group.cpus for group in here) <= cpus and sum(group.gpus for group in here) <= gpus_there
    everyone = {(group.role, number) for group in groups.values() for number in range(group.count)}
    refused = refusal(config, [node(str(index), cpus, gpus) for index, (cpus, gpus) in enumerate(nodes)])
    assert (refused is None) == (set(places) == everyone)


def test_a_pair_that_shares_a_gpu_is_placed_on_one_node_or_refused():
    cpus = ["cluster.cpus_per_worker=8"]
    pair = ["objective=no_kl", "cluster.weight_sync=cuda_ipc", "cluster.learner_ranks=1", "cluster.rollout_workers=1"]
    config = load_config([*pair, *cpus, "cluster.learner_gpus=0.5", "cluster.rollout_gpus=0.5"])
    apart = [node("a", 9, 1), node("b", 9, 1)]
    assert ("rollout", 0) not in plan(config, apart) and refusal(config, apart) is not None
    assert len(set(plan(config, [node("a", 9, 1), node("b", 17, 1)])[role, 0] for role in ("learner", "rollout"))) == 1

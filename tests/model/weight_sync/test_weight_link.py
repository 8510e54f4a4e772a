"""Weights over a link between real processes: bitwise the learner's, refused everywhere together, never a hang."""

from __future__ import annotations

import re
import signal
import threading
import time

import pytest
import torch
from link_members import Plan

from infsample_rl.model.weight_sync.link import Mailbox, WeightLink, formed
from infsample_rl.model.weight_sync.store import host_store, open_store
from tests.gpu import GPU

TRANSPORTS = ("broadcast", "cuda_ipc")  # on the CPU: gloo, and shared host memory


@pytest.mark.parametrize(("tied", "dtype"), [(True, "float32"), (False, "bfloat16")])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_engines_hold_the_learners_weights_bitwise_at_every_version(start_members, transport, tied, dtype):
    results = start_members(Plan(transport, tied=tied, dtype=dtype)).finish()
    elements = 320 * 32 * (1 if tied else 2) + 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 16 + 3 * 32
    assert [len(results[member]) for member in range(3)] == [3, 3, 3]
    for number in range(3):
        reports = [results[member][number] for member in range(3)]
        assert all(is_equal for _, is_equal in reports), reports
        assert {(report.version, report.num_bytes) for report, _ in reports} == {
            (number + 1, elements * (4 if dtype == "float32" else 2))
        }


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (
            "shape",
            r"rollout worker 1: weights version 1: model.embed_tokens.weight has shape \(320, 32\), the engine's model "
            r"has \(320, 64\)",
        ),
        ("version 1", r"rollout worker 1: weights version 1 came where version 99 was to come"),
    ],
)
def test_what_one_engine_refuses_is_refused_everywhere_and_said_everywhere(start_members, fault, reason):
    results = start_members(Plan("broadcast", versions=2, spoiled={2: fault})).finish()
    for member in range(3):
        assert re.search(reason, str(results[member][0][0])), results[member][0]
    if fault == "version 1":
        assert all(results[member][1][1] for member in range(3)), "the link still works after a refusal"


@pytest.mark.parametrize(
    ("transport", "how"),
    [
        ("broadcast", signal.SIGKILL),
        pytest.param("broadcast", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("cuda_ipc", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_dead_or_hanging_engine_is_named_within_the_limit(start_members, transport, how):
    members = start_members(Plan(transport, versions=2, pause_in=2, timeout_s=2.5))
    members.kill(2, how)
    results = members.finish(members=(0, 1))
    message, seconds = results[0][1]
    assert "weights version 2: rollout worker 1 died or hangs" in message, message
    assert seconds < 2.5 + 2.5 + 2.0, "the limit, and the grace the others get"
    assert results[0][0][1] and results[1][0][1], "version 1 went well"
    assert len(results[1]) == 2, "the other engine ends too: it may have all buckets already"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engines_whose_learner_dies_say_so_at_once(start_members, transport):
    members = start_members(Plan(transport, versions=1, pause_in=1, timeout_s=30.0))
    members.kill(0)
    results = members.finish(members=(1, 2))
    for member in (1, 2):
        message, seconds = results[member][0]
        assert "learner rank 0 is gone" in message and seconds < 10.0, (message, seconds)


@pytest.mark.gpu
def test_two_processes_on_one_gpu_hold_the_same_weights_through_cuda_ipc(start_members):
    results = start_members(Plan("cuda_ipc", dtype="bfloat16", device=GPU), count=2).finish(limit_s=120.0)
    assert all(is_equal for member in (0, 1) for _, is_equal in results[member])


def test_a_group_that_does_not_form_is_said_at_the_limit_and_an_error_at_once():
    store, _ = host_store("127.0.0.1", 20.0)
    mail, started = Mailbox(store, 0, 2, 0.5), time.monotonic()
    with pytest.raises(RuntimeError, match=r"did not form within 0.5 s"):
        formed(mail, lambda plain: plain.get("never"))  # so does NCCL wait for what rank 0 has to say
    assert time.monotonic() - started < 3.0
    with pytest.raises(RuntimeError, match="no such card"):
        formed(mail, lambda plain: (_ for _ in ()).throw(RuntimeError("no such card")))
    assert formed(mail, lambda plain: "a group") == "a group"


def test_a_member_that_fails_while_a_group_forms_is_heard():
    store, address = host_store("127.0.0.1", 20.0)
    other = Mailbox(open_store(address, 20.0), 1, 2, 10.0)
    started = time.monotonic()
    threading.Timer(0.2, other.fail, ["out of memory"]).start()
    with pytest.raises(RuntimeError, match="rollout worker 0: out of memory"):
        formed(Mailbox(store, 0, 2, 10.0), lambda plain: plain.get("never"))
    assert time.monotonic() - started < 5.0


@pytest.mark.gpu
def test_buckets_go_through_nccl():
    store, _ = host_store("127.0.0.1", 60.0)
    device = torch.device(GPU)
    link = WeightLink(store, "broadcast", member=0, members=1, device=device, timeout_s=60.0, bucket_bytes=1000)
    for number, buffer in zip(range(4), link.free_buffers(), strict=False):
        buffer.fill_(number)
        link.give(number, buffer)
    link.taken(2)
    link.taken(3)
    assert buffer.tolist() == [3] * 1000
    link.close()

"""The store that a run's processes meet at: it listens at one address, and believes nobody else."""

from __future__ import annotations

import datetime
import pickle
import socket
import subprocess

import pytest
import torch
import torch.distributed as dist

from infsample_rl.model.weight_sync.link import Mailbox, WeightLink
from infsample_rl.model.weight_sync.store import StoreAddress, host_store, open_store


def other_address() -> str:
    """An address of this machine beside the loopback ones."""
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    usable = [address for address in found if ":" not in address and not address.startswith("127.")]
    if not usable:
        pytest.skip("this machine has the loopback address alone")
    return usable[0]


def test_the_store_is_reached_at_its_own_address_alone():
    beside = other_address()
    store, address = host_store("127.0.0.1", 5.0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((beside, address.port), timeout=5.0)
    outer, at_outer = host_store(beside, 5.0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", at_outer.port), timeout=5.0)
    assert not store.check(["word"]) and not outer.check(["word"])


def test_only_who_has_the_secret_is_believed():
    store, address = host_store("127.0.0.1", 5.0)
    friend = open_store(address, 5.0)
    friend.set("word", "true")
    assert store.get("word") == b"true"
    assert str(address) == f"StoreAddress(127.0.0.1:{address.port})", "the secret would come into logs"
    stranger = dist.TCPStore("127.0.0.1", address.port, is_master=False)
    impostor = open_store(StoreAddress(*address[:2], b"guessed"), 5.0)
    for write in (
        lambda: stranger.set("word", "false"),
        lambda: stranger.set("word", ""),
        lambda: impostor.set("word", "false"),
        lambda: stranger.set("word", store.plain.get("other")),  # signed, but as another word
    ):
        friend.set("other", "false")
        write()
        with pytest.raises(RuntimeError, match="holds a value of 'word' that no process of the run has written"):
            store.get("word")


class Harmful:
    """Shows that it was unpickled."""

    def __reduce__(self):
        return pytest.fail, ("it ran",)


def test_a_strangers_pickle_is_not_opened():
    _, address = host_store("127.0.0.1", 5.0)
    stranger = dist.TCPStore("127.0.0.1", address.port, is_master=False)
    stranger.set("place/1", "host memory")
    stranger.set("buffers/1", pickle.dumps(Harmful()))
    with pytest.raises(RuntimeError, match="no process of the run has written"):
        WeightLink(open_store(address, 5.0), "cuda_ipc", member=1, members=2, device=torch.device("cpu"), timeout_s=5.0)
    mail = Mailbox(open_store(address, 5.0), 1, 2, 5.0)
    stranger.set("0/offer", "[1, [], 0]")
    with pytest.raises(RuntimeError, match="no process of the run has written"):
        mail.hear("offer")


def test_ranks_believe_no_strangers_address():
    store, address = host_store("127.0.0.1", 20.0)
    stranger = dist.TCPStore("127.0.0.1", address.port, is_master=False)
    limit = datetime.timedelta(seconds=5)
    stranger.set("/0/1", "somewhere else")  # gloo's key of rank 1's address
    with pytest.raises(RuntimeError, match="no process of the run has written"):
        dist.ProcessGroupGloo(dist.PrefixStore("", store), 0, 2, limit)


def test_what_holds_the_store_in_cpp_may_clone_it():
    store, _ = host_store("127.0.0.1", 5.0)
    held = dist.PrefixStore("group", store).clone()
    held.set("word", "true")
    assert store.get("group/word") == b"true" == held.get("word")

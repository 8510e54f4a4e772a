"""Buckets from learner rank 0 to all rollout workers, by broadcast or through memory they share, and words between them
through a store that rank 0 hosts.

The group is apart from the learner's own, and a rollout worker needs no default group. Every wait has an end: at the
time limit, when another member says that it failed, or when the store's host is gone; the error names whom it waited
for.
"""

from __future__ import annotations

import datetime
import itertools
import json
import multiprocessing.reduction
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing  # noqa: F401  teaches ForkingPickler to hand over where a tensor lies instead of its values
from torch import Tensor

from infsample_rl.config import ClusterConfig
from infsample_rl.model.weight_sync.buckets import BUCKET_BYTES
from infsample_rl.model.weight_sync.store import SignedStore
from infsample_rl.model.weight_sync.transport import broadcast_backend

_LOOK_S = 0.1  # how often a waiting member looks whether another one failed


def _member_name(member: int) -> str:
    return "learner rank 0" if member == 0 else f"rollout worker {member - 1}"


class Mailbox:
    """One member's end: 0 is learner rank 0, 1 to members - 1 are the rollout workers. Every word belongs to one
    transfer."""

    def __init__(self, store: SignedStore, member: int, members: int, timeout_s: float) -> None:
        self.store, self.member, self.members, self.timeout_s = store, member, members, timeout_s
        self.name = _member_name(member)
        self._transfer = 0
        self._read: list[str] = []

    def begin(self) -> None:
        """Begin a transfer; member 0 drops the words of the one before, which all have read."""
        for key in self._read if self.member == 0 else []:
            self.store.delete_key(key)
        self._transfer, self._read = self._transfer + 1, []

    def tell(self, what: str, value: Any) -> None:
        """Say something that JSON can hold, to all members."""
        self._read.append(self._key(what))
        self.store.set(self._key(what), json.dumps(value))

    def hear(self, what: str, member: int = 0) -> Any:
        """Wait for what `member` tells. RuntimeError at the time limit, when a member failed, when the learner is
        gone."""
        key = self._key(what)
        self.until(lambda: self.store.check([key]), lambda: f"{_member_name(member)} did not send '{what}'")
        self._read.append(key)
        return json.loads(self.store.get(key))

    def hear_all(self, what: str) -> list[Any]:
        """What every rollout worker tells under its own number; RuntimeError names those that do not."""
        members = range(1, self.members)
        keys = [self._key(f"{what}/{member}") for member in members]
        self.until(lambda: self.store.check(keys), lambda: f"{', '.join(self.silent(what))} did not send '{what}'")
        return [self.hear(f"{what}/{member}", member) for member in members]

    def silent(self, what: str) -> list[str]:
        """The rollout workers that have not told this."""
        return [
            _member_name(member)
            for member in range(1, self.members)
            if not self.store.check([self._key(f"{what}/{member}")])
        ]

    def fail(self, reason: str) -> None:
        """Tell every member that waits that this transfer failed."""
        self.store.set(self._key("failed"), json.dumps(f"{self.name}: {reason}"))

    def until(self, is_done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait. RuntimeError at the time limit, with `what` did not happen, or with what another member failed with."""
        started = looked = time.monotonic()
        failed, pause = self._key("failed"), 0.0002
        try:
            while not is_done():
                now = time.monotonic()
                if now - looked > _LOOK_S:
                    looked = now
                    if self.store.check([failed]):
                        raise RuntimeError(json.loads(self.store.get(failed)))
                if now - started > self.timeout_s:
                    limit = f"{self.timeout_s:g} s (a quarter of cluster.progress_timeout_s)"
                    raise RuntimeError(f"{what()} within {limit}")
                time.sleep(pause)
                pause = min(0.02, pause * 1.1)
        except dist.DistNetworkError as error:
            raise RuntimeError(f"learner rank 0 is gone: {what()}") from error

    def has_learner(self) -> bool:
        """Whether learner rank 0, which hosts the store, can still be reached."""
        try:
            self.store.check(["any"])
        except dist.DistNetworkError:
            return False
        return True

    def _key(self, what: str) -> str:
        return f"{self._transfer}/{what}"


class WeightLink:
    """One member's end of the line, made by all members at once.

    broadcast: NCCL when `device` is a GPU, of which every member has its own, else gloo. cuda_ipc: member 0's buffers
    are mapped by the others, once; on the CPU the same code shares host memory. Two buffers of `bucket_bytes` on
    `device` live as long as the link.
    """

    def __init__(
        self,
        store: SignedStore,
        transport: str,
        *,
        member: int,
        members: int,
        device: torch.device,
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.mail = Mailbox(store, member, members, timeout_s)
        self.device, self.bucket_bytes = device, bucket_bytes
        self._group: Any = None
        self._works: dict[int, Any] = {}
        if transport == "broadcast":
            self._buffers = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
            self._group = _process_group(self.mail, device)
        else:
            self._buffers = _shared_buffers(self.mail, device, bucket_bytes)

    def free_buffers(self) -> Iterator[Tensor]:
        """Member 0: a buffer to fill for bucket 0, 1, 2, ..., each when the bucket before the last has been taken."""
        for number in itertools.count():
            if number >= 2:
                self.taken(number - 2)
            yield self._buffers[number % 2]

    def give(self, number: int, bucket: Tensor) -> None:
        """Member 0: send a filled buffer; does not wait. Of a broadcast also every other member's part of it."""
        if self._group is not None:
            self._works[number] = self._group.broadcast([bucket], dist.BroadcastOptions())
        else:
            self._synchronize()
            self.mail.tell(f"bucket/{number}", bucket.numel())

    def taken(self, number: int) -> None:
        """Member 0: wait until everyone has this bucket."""
        if self._group is not None:
            self._finish(number)
        else:
            self.mail.hear_all(f"taken/{number}")

    def take(self, sizes: list[int]) -> Iterator[Tensor]:
        """A rollout worker: every bucket in order, each valid until the next is asked for; the next one comes in
        meanwhile."""
        for number, size in enumerate(sizes):
            if self._group is not None:
                for ahead in range(number + (number > 0), min(number + 2, len(sizes))):
                    self.give(ahead, self._buffers[ahead % 2][: sizes[ahead]])
                self._finish(number)
            else:
                self.mail.hear(f"bucket/{number}")
            yield self._buffers[number % 2][:size]
            if self._group is None:
                self._synchronize()
                self.mail.tell(f"taken/{number}/{self.mail.member}", True)

    def close(self) -> None:
        """Give up the buffers and the group; what still runs fails, and so does any later transfer."""
        if self._group is not None:
            self._group.abort()
        self._works.clear()
        self._buffers, self._group = [], None

    @property
    def is_open(self) -> bool:
        """Whether another transfer can begin: not after a failed one."""
        return bool(self._buffers)

    def _finish(self, number: int) -> None:
        work = self._works[number]
        self.mail.until(work.is_completed, lambda: f"bucket {number} did not get through")
        work.wait()  # raises what went wrong; on a GPU makes later kernels wait for the bucket
        del self._works[number]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def join_link(cluster: ClusterConfig, store: SignedStore, member: int, members: int) -> WeightLink:
    """The link of a run: member 0 is learner rank 0 with its host_store(), the others are the rollout workers with
    their open_store()."""
    transport = "cuda_ipc" if cluster.weight_sync == "cuda_ipc" else "broadcast"
    on_gpu = transport == "cuda_ipc" or broadcast_backend(cluster) == "nccl"
    device = torch.device("cuda" if on_gpu else "cpu")
    # While member 0 waits for a rollout worker, the other ranks wait for it in a collective: that one must not run out
    # first.
    return WeightLink(
        store, transport, member=member, members=members, device=device, timeout_s=cluster.collective_timeout_s / 2
    )


def _process_group(mail: Mailbox, device: torch.device) -> Any:
    limit = datetime.timedelta(seconds=mail.timeout_s)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(dist.PrefixStore("weights", mail.store), mail.member, mail.members, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * limit  # NCCL's own limit ends the process without a word: let ours come first

    def form(store: dist.Store) -> Any:
        group: Any = dist.ProcessGroupNCCL(dist.PrefixStore("weights", store), mail.member, mail.members, options)
        group.broadcast([torch.zeros(1, device=device)], dist.BroadcastOptions())  # which makes the communicator
        return group

    return formed(mail, form)


def formed(mail: Mailbox, form: Callable[[dist.Store], Any]) -> Any:
    """What `form` gives, of the run's store without signatures. RuntimeError at the time limit: NCCL's call ends at no
    limit of its own when a member is lost while the communicator forms, so it runs in a thread, which is left behind
    then. Its connection to the store is its own, since a TCPStore is locked for as long as one of its calls waits."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    store = mail.store.clone().plain

    def run() -> None:
        try:
            found.put(form(store))
        except RuntimeError as error:
            found.put(error)

    threading.Thread(target=run, daemon=True).start()
    mail.until(lambda: not found.empty(), lambda: "the group of learner and rollout workers did not form")
    group = found.get()
    if isinstance(group, RuntimeError):
        raise group
    return group


def _shared_buffers(mail: Mailbox, device: torch.device, bucket_bytes: int) -> list[Tensor]:
    """Member 0 makes the buffers and tells where they are; the others map them, which works on one GPU only."""
    place = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "host memory"
    if mail.member == 0:
        buffers = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device).share_memory_() for _ in range(2)]
        for member in range(1, mail.members):  # a handle is good for one receiver
            mail.store.set(f"place/{member}", place)
            mail.store.set(f"buffers/{member}", bytes(multiprocessing.reduction.ForkingPickler.dumps(buffers)))
        return buffers
    mail.until(lambda: mail.store.check([f"buffers/{mail.member}"]), lambda: "learner rank 0 did not share its buffers")
    of_learner = mail.store.get(f"place/{mail.member}").decode()
    if place != of_learner:
        raise RuntimeError(
            f"{mail.name} is on GPU {place}, learner rank 0 on {of_learner}: cluster.weight_sync=cuda_ipc needs one GPU"
        )
    return pickle.loads(mail.store.get(f"buffers/{mail.member}"))  # of the run itself: the store has checked it

"""Buckets from learner rank 0 to all rollout workers, by broadcast or through memory they share.

The group is apart from the learner's own, and a rollout worker needs no default group.
"""

from __future__ import annotations

import datetime
import itertools
import multiprocessing.reduction
import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing  # noqa: F401  teaches ForkingPickler to hand over where a tensor lies instead of its values
from torch import Tensor

from infsample_rl.config import ClusterConfig
from infsample_rl.model.weight_sync.buckets import BUCKET_BYTES
from infsample_rl.model.weight_sync.mailbox import Mailbox
from infsample_rl.model.weight_sync.transport import broadcast_backend, choose_transport


class WeightLink:
    """One member's end of the line, as in Mailbox; made by all members at once.

    broadcast: NCCL when `device` is a GPU, of which every member has its own, else gloo. cuda_ipc: member 0's buffers
    are mapped by the others, once; on the CPU the same code shares host memory. Two buffers of `bucket_bytes` on
    `device` live as long as the link.
    """

    def __init__(
        self,
        store: dist.TCPStore,
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
        self.mail.until(work.is_completed, f"bucket {number} did not get through")
        work.wait()  # raises what went wrong; on a GPU makes later kernels wait for the bucket
        del self._works[number]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def join_link(cluster: ClusterConfig, store: dist.TCPStore, member: int, members: int) -> WeightLink:
    """The link of a run: member 0 is learner rank 0 with its host_store(), the others are the rollout workers with
    their open_store()."""
    transport = choose_transport(cluster)
    on_gpu = transport == "cuda_ipc" or broadcast_backend(cluster) == "nccl"
    device = torch.device("cuda" if on_gpu else "cpu")
    # While member 0 waits for a rollout worker, the other ranks wait for it in a collective: that one must not run out
    # first.
    return WeightLink(
        store, transport, member=member, members=members, device=device, timeout_s=cluster.collective_timeout_s / 2
    )


def _process_group(mail: Mailbox, device: torch.device) -> Any:
    store, limit = dist.PrefixStore("weights", mail.store), datetime.timedelta(seconds=mail.timeout_s)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, mail.member, mail.members, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * limit  # NCCL's own limit ends the process without a word: let ours come first
    return dist.ProcessGroupNCCL(store, mail.member, mail.members, options)


def _shared_buffers(mail: Mailbox, device: torch.device, bucket_bytes: int) -> list[Tensor]:
    """Member 0 makes the buffers and tells where they are; the others map them, which works on one GPU only."""
    place = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "host memory"
    if mail.member == 0:
        buffers = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device).share_memory_() for _ in range(2)]
        for member in range(1, mail.members):  # a handle is good for one receiver
            mail.store.set(f"place/{member}", place)
            pickled: Any = bytes(multiprocessing.reduction.ForkingPickler.dumps(buffers))  # set() takes bytes too
            mail.store.set(f"buffers/{member}", pickled)
        return buffers
    mail.until(lambda: mail.store.check([f"buffers/{mail.member}"]), "learner rank 0 did not share its buffers")
    of_learner = mail.store.get(f"place/{mail.member}").decode()
    if place != of_learner:
        raise RuntimeError(
            f"{mail.name} is on GPU {place}, learner rank 0 on {of_learner}: cluster.weight_sync=cuda_ipc needs one GPU"
        )
    return pickle.loads(mail.store.get(f"buffers/{mail.member}"))

"""Where the KV of preempted samples and of their prompts waits until they decode again: in host memory beside a GPU, in
a file beside a pool in host memory.

Beside a GPU a copy over PCIe costs less than a prefill, which reads all weights. On the CPU host memory is the pool's
own, whose size is stated; the file is written through the system's cache, and a token's KV is copied in a fiftieth of
the time that computing it takes (SmolLM2-135M: 46 KB). The file has no name: nothing is left of it when the process
ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from infsample_rl.config.rollout import RolloutConfig
from infsample_rl.model.disk import check_disk_folder
from infsample_rl.rollout.engine.kv_cache import PagedKV, free_bytes
from infsample_rl.rollout.schedule.kv_pool import MOST_POOLS, Parking

CHUNK_BYTES = 2**26  # of pinned memory at a time: torch rounds every piece up to a power of two
SHARE_OF_FREE = 0.5  # of what is free when a pool is allocated, in host memory or on the disk, for all workers together


class ParkedInMemory(Parking):
    """KV of preempted samples and their prompts in host memory, pinned beside a GPU, which grows to what they need at a
    time. Copies are launched a page at a time, which is what they take on the GPU, and not waited for: what is copied
    next, either way, comes behind them."""

    def __init__(self, kv: PagedKV, sharers: int = 1) -> None:
        """`sharers`: workers that park KV in this memory, which has no more for all of them."""
        super().__init__(_most_pages(kv, free_bytes(torch.device("cpu")), sharers))
        self._parts, self._is_cuda = kv.parts, kv.device.type == "cuda"
        self._pages_of_chunk = max(1, CHUNK_BYTES // kv.page_bytes)
        self._places: dict[Hashable, list[list[Tensor]]] = {}  # of its pages; of every page one of each part's size
        self._free: list[list[Tensor]] = []

    def put(self, owner: Hashable, pages: list[int]) -> None:
        """Copy the KV in `pages`, which are the owner's, out of the pool."""
        places = self._places[owner] = [self._take_place() for _ in pages]
        for place, page in zip(places, pages, strict=True):
            for part, kept in zip(self._parts, place, strict=True):
                kept.copy_(part[:, page].contiguous(), non_blocking=True)

    def fetch(self, owner: Hashable, pages: list[int]) -> None:
        """Copy the owner's KV back, into `pages`, of which there may be more than it had."""
        places = self._places.pop(owner)
        for place, page in zip(places, pages, strict=False):
            for part, kept in zip(self._parts, place, strict=True):
                part[:, page].copy_(kept.to(part.device, non_blocking=True))
        self._free += places

    def forget(self, owner: Hashable) -> None:
        self._free += self._places.pop(owner, [])

    def clear(self) -> None:
        """Let go of all KV."""
        for places in self._places.values():
            self._free += places
        self._places.clear()

    def _take_place(self) -> list[Tensor]:
        if not self._free:
            count = self._pages_of_chunk
            chunk = [
                torch.empty((count, *part[:, 0].shape), dtype=part.dtype, pin_memory=self._is_cuda)
                for part in self._parts
            ]
            self._free = [list(place) for place in zip(*chunk, strict=True)]
        return self._free.pop()


class ParkedInFile(Parking):
    """KV of preempted samples and their prompts in a file without a name, which grows to what they need at a time."""

    def __init__(self, kv: PagedKV, folder: str, sharers: int = 1) -> None:
        """`sharers`: as ParkedInMemory's. ValueError for a folder that is missing, cannot be written to or is itself in
        memory."""
        check_disk_folder("rollout.preemption", folder)
        super().__init__(_most_pages(kv, shutil.disk_usage(folder).free, sharers))
        self._file, self._folder = tempfile.TemporaryFile(dir=folder, buffering=0), folder
        self._page = [torch.empty(part[:, 0].shape, dtype=part.dtype) for part in kv.parts]
        self._buffers: list[Any] = [part.view(torch.uint8).numpy() for part in self._page]
        self._page_bytes = sum(part.nbytes for part in self._page)
        self._parts = kv.parts
        self._places: dict[Hashable, list[int]] = {}  # of its pages in the file
        self._free: list[int] = []
        self._num_places = 0
        self._unwritten: dict[int, list[Tensor]] = {}  # by place: what the file did not take

    def take(self, count: int) -> bool:
        """Take `count` pages, if as many are free, on the disk too."""
        if not super().take(count):
            return False
        if self.num_taken > self._num_places:
            try:
                os.posix_fallocate(self._file.fileno(), 0, self.num_taken * self._page_bytes)
            except OSError as error:
                self.release(count)
                self.most_pages = self._num_places
                size = self._num_places * self._page_bytes / 1e9
                warnings.warn(
                    f"rollout.preemption={self._folder} has no room for more than {size:.3g} GB of KV: "
                    f"{error.strerror}",
                    stacklevel=2,
                )
                return False
            self._free += range(self._num_places, self.num_taken)
            self._num_places = self.num_taken
        return True

    def put(self, owner: Hashable, pages: list[int]) -> None:
        """Copy the KV in `pages`, which are the owner's, out of the pool."""
        places = self._places[owner] = [self._free.pop() for _ in pages]
        for place, page in zip(places, pages, strict=True):
            for part, kept in zip(self._parts, self._page, strict=True):
                kept.copy_(part[:, page])
            try:
                self._check(os.pwritev(self._file.fileno(), self._buffers, place * self._page_bytes))
            except OSError as error:
                self._keep(place, error)

    def fetch(self, owner: Hashable, pages: list[int]) -> None:
        """Copy the owner's KV back, into `pages`, of which there may be more than it had."""
        places = self._places.pop(owner)
        for place, page in zip(places, pages, strict=False):
            unwritten = self._unwritten.get(place)
            if unwritten is None:
                self._check(os.preadv(self._file.fileno(), self._buffers, place * self._page_bytes))
            for part, kept in zip(self._parts, unwritten or self._page, strict=True):
                part[:, page].copy_(kept)
        self._let_go(places)

    def forget(self, owner: Hashable) -> None:
        self._let_go(self._places.pop(owner, []))

    def clear(self) -> None:
        """Let go of all KV."""
        for owner in list(self._places):
            self.forget(owner)

    def _let_go(self, places: list[int]) -> None:
        self._free += places
        for place in places:
            self._unwritten.pop(place, None)

    def _keep(self, place: int, error: OSError) -> None:
        """The page that could not be written waits in host memory: its sample was promised that it is not lost."""
        if not self._unwritten:
            warnings.warn(
                f"rollout.preemption={self._folder} takes no KV, which waits in host memory: {error}", stacklevel=3
            )
        self._unwritten[place] = [kept.clone() for kept in self._page]

    def _check(self, num_bytes: int) -> None:
        if num_bytes != self._page_bytes:
            raise OSError(
                f"the file of parked KV in rollout.preemption={self._folder} gave or took {num_bytes} of "
                f"{self._page_bytes} bytes"
            )


ParkedKV = ParkedInMemory | ParkedInFile


def _most_pages(kv: PagedKV, free: int, sharers: int) -> int:
    return min(MOST_POOLS * kv.num_pages, int(SHARE_OF_FREE * free) // sharers // kv.page_bytes)


def check_parking(config: RolloutConfig, device: torch.device) -> None:
    """ValueError where KV shall be parked and there is no place for it."""
    if _takes_memory(config, device):
        return
    if config.park_folder is not None or config.preemption == "park":
        check_disk_folder("rollout.preemption", _folder(config))


def open_parking(config: RolloutConfig, kv: PagedKV, sharers: int) -> ParkedKV | None:
    """Where preempted samples' KV waits beside this pool; None: it is computed again, which one warning says if it is
    for want of a place. `sharers`: as ParkedInMemory's."""
    if config.preemption == "recompute":
        return None
    if _takes_memory(config, kv.device):
        return ParkedInMemory(kv, sharers)
    try:
        return ParkedInFile(kv, _folder(config), sharers)
    except (OSError, ValueError) as error:
        warnings.warn(f"KV of preempted samples is computed again, not parked: {error}", stacklevel=2)
        return None


def _takes_memory(config: RolloutConfig, device: torch.device) -> bool:
    return device.type != "cpu" and config.park_folder is None


def _folder(config: RolloutConfig) -> str:
    return config.park_folder or tempfile.gettempdir()

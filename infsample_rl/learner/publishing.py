"""The learner's side of bringing weights to engines in other processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from infsample_rl.config import ClusterConfig
from infsample_rl.model.weight_sync.buckets import Shape, plan_weights, shapes_of, stream_buckets
from infsample_rl.model.weight_sync.link import WeightLink, join_link
from infsample_rl.model.weight_sync.store import StoreAddress, host_store
from infsample_rl.model.weight_sync.sync import send_weights
from infsample_rl.observe.phases import phase
from infsample_rl.types import MaybeNone, WeightManifest, WeightSyncReport


class WeightPublisher:
    """Sends what `tensors` yields, (name, full tensor) one at a time, gathered on all ranks; rank 0 sends. Every call
    is a collective."""

    def __init__(self, cluster: ClusterConfig, tensors: Callable[[], Iterator[tuple[str, Tensor]]], rank: int) -> None:
        self._cluster, self._tensors, self._rank = cluster, tensors, rank
        self._shapes: list[Shape] | None = None  # found out once
        self._link: WeightLink | MaybeNone = None  # after join_link()

    def shapes(self) -> list[Shape]:
        """What is sent, which the first call finds out by gathering it."""
        if self._shapes is None:
            self._shapes = shapes_of(self._tensors())
        return self._shapes

    def export(self, version: int) -> tuple[WeightManifest, Iterator[np.ndarray]]:
        """For an object store: manifest and buckets, each valid until the next is asked for.

        Every rank must run the buckets to their end; those of other ranks than 0 are none.
        """
        manifest, tensors = plan_weights(self.shapes(), version), self._tensors()
        if self._rank != 0:
            return manifest, (bucket for _ in tensors for bucket in list[np.ndarray]())
        return manifest, stream_buckets(tensors, manifest)

    def host_link(self, host: str) -> StoreAddress:
        """Rank 0: where the rollout workers meet it in join_link, at this address of this machine."""
        self._store, address = host_store(host, self._cluster.collective_timeout_s)
        return address

    def join_link(self, members: int) -> None:
        """Rank 0: the line to the rollout workers, which join at the same time, in place of any that was there."""
        if self._link is not None:
            self._link.close()
        self._link = join_link(self._cluster, self._store, 0, members)

    @phase("sync")
    def send(self, version: int) -> WeightSyncReport | None:
        """Rank 0 sends every rollout worker, which receives at the same time, what it samples with. Other ranks gather,
        and return None."""
        manifest, tensors = plan_weights(self.shapes(), version), self._tensors()
        if self._rank == 0:
            return send_weights(self._link, tensors, manifest)
        deque(tensors, maxlen=0)  # keeps none while the next one comes
        return None

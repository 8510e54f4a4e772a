"""A reference worker as Ray actors: one, or as many as its model is sharded over; the driver knows the first alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray

from infsample_rl import lasting_imports
from infsample_rl.cluster.messages import Payload, open_micro_group, seal, unseal
from infsample_rl.cluster.observed import Observed, status_of, with_control
from infsample_rl.cluster.worker_secrets import Secrets
from infsample_rl.config import Config
from infsample_rl.types import ReferenceResult

if TYPE_CHECKING:  # what a worker imports, it imports where it runs
    from infsample_rl.model.weight_sync.store import StoreAddress


class ReferenceCalls(Observed):
    """The frozen policy, or rank 0 of those that it is sharded over."""

    def __init__(self, secrets: Secrets, config: Config, index: int, beside: list[dict[str, Any]]):
        """`beside`: options of the actors of the other ranks, which end with this process, since it makes them."""
        self.begin(secrets)
        with lasting_imports():
            from infsample_rl.learner.reference import ReferenceWorker
            from infsample_rl.model.weight_sync.store import host_store

        self.observe("reference", index)
        store, self._others = None, list[Any]()
        if beside:
            store, meeting = host_store(ray.util.get_node_ip_address(), config.cluster.collective_timeout_s)
            self._others = [
                RANK.options(**options).remote(secrets, config, index, rank, meeting)
                for rank, options in enumerate(beside, start=1)
            ]
        self.worker = ReferenceWorker(config, 0, store)

    def logprobs(self, prompts: list[bytes], *payloads: Payload) -> list[Any]:
        """Of a micro-group of each sealed Prompt: a sealed list[ReferenceReport], then every ReferenceResult."""
        found: list[ReferenceResult] = []
        asked = [rank.logprobs.remote(prompts, *payloads) for rank in self._others]
        try:
            for prompt, payload in zip(prompts, payloads, strict=True):
                found.append(self.worker.logprobs(unseal(prompt), open_micro_group(payload)))
                self._done += 1
            ray.get(asked)
        except (RuntimeError, ray.exceptions.RayError):
            if self._others and any(status_of(rank) is None for rank in self._others):
                os._exit(1)  # with all ranks: the driver starts them again
            raise
        return [seal([result.report for result in found]), *found]


class ReferenceRankCalls(Observed):
    """Another rank of a reference worker: it takes part in what rank 0 is asked."""

    def __init__(self, secrets: Secrets, config: Config, index: int, rank: int, meeting: StoreAddress):
        self.begin(secrets)
        with lasting_imports():
            from infsample_rl.learner.reference import ReferenceWorker
            from infsample_rl.model.weight_sync.store import open_store

        self.worker = ReferenceWorker(config, rank, open_store(meeting, config.cluster.collective_timeout_s))
        self.observe("reference", index)

    def logprobs(self, prompts: list[bytes], *payloads: Payload) -> None:
        """As ReferenceCalls.logprobs, whose answers are all."""
        for prompt, payload in zip(prompts, payloads, strict=True):
            self.worker.logprobs(unseal(prompt), open_micro_group(payload))


RANK = with_control(ReferenceRankCalls)

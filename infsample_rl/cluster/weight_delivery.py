"""Weights from the learner to the rollout workers: a version to all of them, and to one that takes a lost one's
place."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import ray

from infsample_rl.cluster.asking import Asking
from infsample_rl.cluster.calls import SLICE_S, Patience
from infsample_rl.cluster.failures import StepLost, WorkerLost, worker_name
from infsample_rl.cluster.interruption import Interruption
from infsample_rl.cluster.workers import Crew, Handle
from infsample_rl.config import Config
from infsample_rl.model.weight_sync.transport import choose_transport
from infsample_rl.observe.phases import phase
from infsample_rl.types import PublishedProbe, WeightSyncReport


class WeightDelivery:
    """Which version the rollout workers hold, and how the next one gets to them."""

    def __init__(
        self,
        config: Config,
        crew: Crew,
        asking: Asking,
        note: Callable[[str], None],
        interruption: Interruption,
        has_place: Callable[[str, int], bool],
    ) -> None:
        """`has_place(role, index)`: whether a worker that has not started has been given one."""
        self._has_place = has_place
        self._config, self._crew, self._asking, self._note, self._interruption = (
            config,
            crew,
            asking,
            note,
            interruption,
        )
        self._transport = choose_transport(config.cluster)
        self._version = 0
        self._probe: PublishedProbe | None = None
        self._linked: tuple[Handle, ...] = ()  # members of the weight link
        self.learner_has_moved = False  # since the last version was delivered

    def forget_learner(self) -> None:
        """The learner's processes are new: links to the old ones are gone."""
        self.learner_has_moved, self._linked = True, ()

    @phase("publish")
    def deliver(self, version: int, probe: PublishedProbe | None) -> tuple[WeightSyncReport, set[int]]:
        """Bring every engine to the learner's weights, and to the run's length probe; a report, and the workers that
        hold them.

        Rollout workers that are lost are replaced; those that are still starting are left out, unless too few have
        started.
        """
        started = time.monotonic()
        self._version, self._probe = version, probe
        while True:
            try:
                rollout = self._crew.all("rollout") if self._config.cluster.colocate else self._those_that_started()
                report = self._send(rollout)
                break
            except WorkerLost as lost:
                self._linked = ()
                self._crew.replace(lost)
        self.learner_has_moved = False
        return dataclasses.replace(report, seconds=time.monotonic() - started), set(rollout)

    def _send(self, rollout: dict[int, Handle]) -> WeightSyncReport:
        version, probe, limit = self._version, self._probe, self._config.cluster.progress_timeout_s
        what, gather = f"weights version {version} to reach the engines", self._asking.gather
        if self._transport == "local":
            reports = self._asking.ask("learner", what, lambda rank: rank.publish_here.remote(version, probe), limit)
        elif self._transport == "object_store":
            published = self._publish()
            gather({ref: ("learner", rank) for rank, ref in enumerate(published)}, "publishing weights", limit)
            reports = gather(
                {
                    handle.load_weights.remote(published[0], probe): ("rollout", index)
                    for index, handle in rollout.items()
                },
                what,
                limit,
            )
            # Nobody else holds the buckets: with `published`, at return, the object store frees them.
        else:
            self._link(rollout)
            calls = {
                handle.receive_weights.remote(version, probe): ("rollout", index) for index, handle in rollout.items()
            }
            calls |= {
                rank.send_weights.remote(version): ("learner", index)
                for index, rank in self._crew.all("learner").items()
            }
            try:
                reports = gather(calls, what, limit)
            except (WorkerLost, StepLost):
                raise
            except RuntimeError as error:  # of the learner, which has waited for one that hangs
                raise self._asking.first_gone("rollout") or error from error
        wrong = [report.version for report in reports if report is not None and report.version != version]
        if wrong:
            raise RuntimeError(f"rollout workers hold weights version {wrong[0]}, version {version} was published")
        return reports[0]

    def _publish(self) -> list[ray.ObjectRef]:
        """What every rank says of the version; rank 0's holds the weights."""
        return [rank.publish.remote(self._version) for rank in self._crew.all("learner").values()]

    def _link(self, rollout: dict[int, Handle]) -> None:
        """Connect learner rank 0 and these rollout workers, if they are not."""
        members = tuple(rollout.values())
        if self._linked == members:
            return
        limit, count = self._config.cluster.start_timeout_s, len(members) + 1
        host, port = self._asking.ask(
            "learner", "learner rank 0", lambda rank: rank.host_weight_link.remote(), limit, only=[0]
        )[0]
        calls = {self._crew.all("learner")[0].join_weight_link.remote(count): ("learner", 0)}
        for member, (index, handle) in enumerate(rollout.items(), 1):
            calls[handle.join_weight_link.remote(host, port, member, count)] = ("rollout", index)
        self._asking.gather(calls, "learner and rollout workers to connect", limit)
        self._linked = members

    def _those_that_started(self) -> dict[int, Handle]:
        """Rollout workers that can take weights: not those that still wait for a place or load the model, unless too
        few are left."""
        cluster, patience = self._config.cluster, Patience(self._note)
        while True:
            handles = self._crew.all("rollout")
            started = [index for index in sorted(handles) if self._crew.has_started("rollout", index)]
            self._check_those_that_start(set(handles) - set(started))
            if started:
                return {index: handles[index] for index in started}
            self._interruption.check()
            if patience.idle_s > cluster.start_timeout_s:
                raise RuntimeError(
                    f"no rollout worker has started within {cluster.start_timeout_s:g} s (cluster.progress_timeout_s)"
                )
            late = ", ".join(worker_name("rollout", index) for index in sorted(set(handles) - set(started)))
            patience.say(f"{late} to start")
            time.sleep(SLICE_S)

    def _check_those_that_start(self, indices: set[int]) -> None:
        """WorkerLost for one that hangs: it has had a place for as long as a start may take."""
        limit = self._config.cluster.start_timeout_s
        for index in sorted(indices):
            if self._crew.starting_s("rollout", index) <= limit:
                continue
            if self._has_place("rollout", index):
                raise WorkerLost(
                    "rollout", index, f"it has not started within {limit:g} s (cluster.progress_timeout_s)"
                )
            self._crew.still_has_no_place("rollout", index)

    def bring_back(self, index: int) -> tuple[list[ray.ObjectRef], ray.ObjectRef] | None:
        """Let a new rollout worker load the version that samples, through the object store, behind whatever the learner
        has to do.

        References that keep the weights, and of the call. None when the learner cannot give them now: it has gone on,
        or its ranks are not in step.
        """
        in_step = self._config.learner.grad_sync == "every_row" or self._config.cluster.learner_ranks == 1
        if self.learner_has_moved or not in_step:
            return None
        published = self._publish()
        return published, self._crew.all("rollout")[index].load_weights.remote(published[0], self._probe)

"""Weights from the learner to the rollout workers: to all of them, and to one in a lost one's place."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import ray

from infsample_rl.cluster.arrivals import Return
from infsample_rl.cluster.calls import Calls, Patience
from infsample_rl.cluster.interruption import SLICE_S
from infsample_rl.cluster.workers import EngineLost, Handle, StepLost, WorkerLost, worker_name
from infsample_rl.config import Config
from infsample_rl.model.weight_sync.transport import choose_transport
from infsample_rl.observe.phases import phase
from infsample_rl.rollout.length_prediction.messages import PublishedLengths
from infsample_rl.types import WeightSyncReport


class WeightDelivery:
    """Which rollout workers hold the version that samples, and how the next one gets to them.

    `has_place(role, index)`: whether a worker that has not started has been given a place.
    """

    def __init__(self, config: Config, calls: Calls, has_place: Callable[[str, int], bool]) -> None:
        self._config, self._calls, self._has_place = config, calls, has_place
        self.holders: set[int] = set()  # rollout workers that can be dealt work now
        self.returns: dict[ray.ObjectRef, Return] = {}  # by the call in which one loads the weights
        self.learner_has_moved = False  # since the last version was delivered
        self._version = 0
        self._probe: PublishedLengths | None = None
        self._linked: tuple[Handle, ...] = ()  # members of the weight link

    def forget_learner(self) -> None:
        """The learner's processes are new: links to the old ones are gone."""
        self.learner_has_moved, self._linked = True, ()

    @phase("publish")
    def publish(self, version: int, probe: PublishedLengths | None) -> WeightSyncReport:
        """Bring every engine to the learner's weights, and to the run's length probe.

        Rollout workers that are lost are replaced; those that are still starting are left out, unless too few have
        started, and come with the next version. RuntimeError where no engine takes them.
        """
        started, self._version, self._probe = time.monotonic(), version, probe
        failures = set[str]()
        while True:
            try:
                together = self._config.shares_process
                rollout = self._calls.workers.all("rollout") if together else self._those_that_started()
                report = self._send(rollout)
                break
            except WorkerLost as lost:
                self._linked = ()
                if str(lost) in failures:
                    raise RuntimeError(f"{lost}, in a new engine too") from lost
                if isinstance(lost, EngineLost):
                    failures.add(str(lost))
                self._calls.workers.replace(lost)
        self.learner_has_moved, self.holders = False, set(rollout)
        self.returns.clear()
        return dataclasses.replace(report, seconds=time.monotonic() - started)

    def _send(self, rollout: dict[int, Handle]) -> WeightSyncReport:
        version, probe, limit = self._version, self._probe, self._config.cluster.progress_timeout_s
        what, gather = f"weights version {version} to reach the engines", self._calls.gather
        transport = choose_transport(self._config)
        if transport == "local":
            reports = self._calls.ask("learner", what, lambda rank: rank.publish_here.remote(version, probe), limit)
        elif transport == "object_store":
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
                for index, rank in self._calls.workers.all("learner").items()
            }
            try:
                reports = gather(calls, what, limit)
            except (WorkerLost, StepLost):
                raise
            except RuntimeError as error:  # of the learner, which has waited for one that hangs
                raise self._calls.first_gone("rollout") or error from error
        wrong = [report.version for report in reports if report is not None and report.version != version]
        if wrong:
            raise RuntimeError(f"rollout workers hold weights version {wrong[0]}, version {version} was published")
        return reports[0]

    def _publish(self) -> list[ray.ObjectRef]:
        """What every rank says of the version; rank 0's holds the weights."""
        return [rank.publish.remote(self._version) for rank in self._calls.workers.all("learner").values()]

    def _link(self, rollout: dict[int, Handle]) -> None:
        """Connect learner rank 0 and these rollout workers, if they are not."""
        members = tuple(rollout.values())
        if self._linked == members:
            return
        limit, count = self._config.cluster.start_timeout_s, len(members) + 1
        meeting = self._calls.ask(
            "learner", "learner rank 0", lambda rank: rank.host_weight_link.remote(), limit, only=[0]
        )[0]
        calls = {self._calls.workers.all("learner")[0].join_weight_link.remote(count): ("learner", 0)}
        for member, (index, handle) in enumerate(rollout.items(), 1):
            calls[handle.join_weight_link.remote(meeting, member, count)] = ("rollout", index)
        self._calls.gather(calls, "learner and rollout workers to connect", limit)
        self._linked = members

    def _those_that_started(self) -> dict[int, Handle]:
        """Rollout workers that can take weights: that neither wait for a place nor load the model, one at least."""
        cluster, patience = self._config.cluster, Patience(self._calls.note)
        while True:
            handles = self._calls.workers.all("rollout")
            started = [index for index in sorted(handles) if self._calls.workers.has_started("rollout", index)]
            self._check_those_that_start(set(handles) - set(started))
            if started:
                return {index: handles[index] for index in started}
            self._calls.interruption.check()
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
            if self._calls.workers.starting_s("rollout", index) <= limit:
                continue
            if self._has_place("rollout", index):
                raise WorkerLost(
                    "rollout", index, f"it has not started within {limit:g} s (cluster.progress_timeout_s)"
                )
            self._calls.workers.still_has_no_place("rollout", index)

    def release(self) -> None:
        """Engines that take turns with the learner on its device give it weights and KV back, those that only start
        too: none can sample until the next version."""
        limit = self._config.cluster.start_timeout_s
        while True:
            try:
                self._calls.ask("rollout", "engines to make room", lambda handle: handle.rest.remote(), limit)
                break
            except WorkerLost as lost:
                self._calls.workers.replace(lost)
        self.holders.clear()
        self.returns.clear()

    def bring_back(self, index: int, handle: Handle) -> bool:
        """Let a new rollout worker load the version that samples, through the object store, behind whatever the learner
        has to do. False when the learner cannot give it now: it has gone on, or its ranks are not in step."""
        in_step = self._config.learner.grad_sync == "every_row" or self._config.cluster.learner_ranks == 1
        if self.learner_has_moved or not in_step:
            return False
        published = self._publish()
        self.returns[handle.load_weights.remote(published[0], self._probe)] = Return(index, handle, published)
        return True

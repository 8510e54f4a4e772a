"""The workers of a run on Ray: starts them, asks them, goes back to a checkpoint. Traffic carries samples,
WeightDelivery weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import ray
import torch

from infsample_rl.cluster.actors import ACTORS
from infsample_rl.cluster.arrivals import Arrival
from infsample_rl.cluster.asking import Asking
from infsample_rl.cluster.calls import NOT_STARTED
from infsample_rl.cluster.failures import Restarts, StepLost, WorkerLost, worker_name
from infsample_rl.cluster.interruption import Interruption
from infsample_rl.cluster.out_of_memory import KernelKills, explain
from infsample_rl.cluster.session import RaySession
from infsample_rl.cluster.telemetry import MetricsExporter, Requests, RowsShown, Statistics, metrics_addresses
from infsample_rl.cluster.traffic import Traffic
from infsample_rl.cluster.weight_delivery import WeightDelivery
from infsample_rl.cluster.worker_secrets import worker_secrets
from infsample_rl.cluster.workers import Answer, Crew, Handle
from infsample_rl.config import Config
from infsample_rl.model.loading import load_model_config
from infsample_rl.model.weight_sync.manifest import plan_weights, shapes_of_architecture
from infsample_rl.model.weight_sync.transport import check_object_store, choose_transport
from infsample_rl.observe.phases import phase
from infsample_rl.plan.placement import worker_groups
from infsample_rl.types import (
    ClusterNow,
    Completion,
    LossTotals,
    ProbeReport,
    Prompt,
    PublishedProbe,
    RolloutWork,
    RowWork,
    StreamEnd,
    WeightSyncReport,
    WorkerPhases,
)


class ClusterCounts(NamedTuple):
    """Sums since the start, at one moment."""

    at: float  # time.time()
    waited_s: float  # in which the driver waited for something to arrive
    rollout_workers: int  # that can be dealt work now
    micro_groups: int  # that have arrived
    samples_moved: int  # that a rollout worker gave back, not having started them, for an idle one
    restarts: int


class Cluster:
    """All processes of a run and everything in flight between them. `actors`: classes of the workers, by role."""

    def __init__(
        self,
        config: Config,
        *,
        total_steps: int,
        note: Callable[[str], None],
        interruption: Interruption | None = None,
        actors: Mapping[str, Any] = ACTORS,
    ) -> None:
        self._config, self._total_steps, self._note, self._actors = config, total_steps, note, actors
        self._interruption = interruption or Interruption()
        self._session, self._secrets = RaySession(config, note, self._interruption), worker_secrets(config)
        self._kernel_kills = KernelKills()
        self.restarts = Restarts(config.cluster.max_restarts, note, self._interruption.sleep, self._explain_loss)
        self._crew = Crew(self._spawn, ray.kill, _is_there, self.restarts)
        self._traffic = Traffic(
            config, self._crew, note, self._interruption, lambda index: self._weights.bring_back(index)
        )
        self._asking = Asking(self._crew, note, self._interruption, self._traffic.waiting)
        self._weights = WeightDelivery(
            config, self._crew, self._asking, note, self._interruption, self._session.has_place
        )
        self._probe_reports: dict[ray.ObjectRef, int] = {}
        self._phase_requests = Requests(lambda worker: worker.phases.remote())
        self._rows_shown = RowsShown()
        self.metrics: MetricsExporter | None = None  # once started
        self._started_at = time.monotonic()
        self._checked_restarts = 0  # those after which every worker's node had proven what it sees

    @phase("start")
    def start(self, checkpoint: str | None) -> None:
        """Start Ray (or join `cluster.address`), every worker, and the learner's process group."""
        self._interruption.install()
        self._session.open()
        self._check_object_store()
        self.metrics = MetricsExporter(self._statistics, run=self._config.run.name, role="driver", worker=0)
        self._note("metrics: " + ", ".join(metrics_addresses()))
        cluster, crew = self._config.cluster, self._crew
        for group in worker_groups(self._config):
            crew.start(group.role, group.count)
        if cluster.colocate:
            crew.share("learner", "rollout")
        for role in ("reward", "reference") if cluster.colocate else ("rollout", "reward", "reference"):
            self._await_start(role)
        try:
            self._start_learner(checkpoint)
        except (WorkerLost, StepLost) as lost:
            _refuse_what_cannot_start(lost)
            self.return_to(checkpoint, str(lost))

    def _await_start(self, role: str) -> None:
        while True:
            try:
                limit = self._config.cluster.start_timeout_s
                self._asking.ask(role, f"{role} workers to start", lambda handle: handle.status.remote(), limit)
                return
            except WorkerLost as lost:
                _refuse_what_cannot_start(lost)
                self._crew.replace(lost)

    def _check_object_store(self) -> None:
        """ValueError when weights that travel through the object store do not fit in it."""
        if choose_transport(self._config.cluster) == "object_store":
            model = self._config.model
            shapes = shapes_of_architecture(
                load_model_config(model), getattr(torch, model.dtype), trust_remote_code=model.trust_remote_code
            )
            check_object_store(plan_weights(shapes, 0).num_bytes, self._session.object_store_bytes())

    def _spawn(self, role: str, index: int) -> tuple[Handle, Answer]:
        colocated = role == "learner" and self._config.cluster.colocate
        actor = self._actors["colocated" if colocated else role].options(**self._session.options(role, index))
        ranks = [self._config.cluster.learner_ranks, self._total_steps] if role == "learner" else []
        handle = actor.remote(self._secrets[role], self._config, index, *ranks)
        return handle, handle.status.remote()

    def _start_learner(self, checkpoint: str | None) -> None:
        ask, limit = self._asking.ask, self._config.cluster.start_timeout_s
        ask("learner", "learner ranks to start", lambda rank: rank.status.remote(), limit)
        self._session.check_new_nodes()  # this role writes checkpoints
        host, port = ask("learner", "learner rank 0", lambda rank: rank.host_store.remote(), limit, only=[0])[0]
        found = ask(
            "learner", "learner ranks to load the policy", lambda rank: rank.setup.remote(host, port, checkpoint), limit
        )[0]
        self._note("learner: " + ", ".join(f"{name} {value}" for name, value in found.items()))
        self._weights.forget_learner()

    # One step: everything that is in flight, and what of it has arrived.

    @property
    def num_rollout_workers(self) -> int:
        """Those that can be dealt work now."""
        return len(self._traffic.rollout.ready)

    @property
    def num_learner_ranks(self) -> int:
        """Ranks the policy is sharded over."""
        return self._config.cluster.learner_ranks

    @property
    def has_reference(self) -> bool:
        """Whether there are reference workers."""
        return bool(self._crew.all("reference"))

    def start_rollout(self, dealt: list[list[RolloutWork]], *, step: int, evaluation: bool = False) -> None:
        """Let every ready rollout worker decode its part; micro-groups then come out of arrivals()."""
        self._traffic.rollout.start(dealt, step=step, evaluation=evaluation)

    def score(self, key: int, prompt: Prompt) -> None:
        """Send a micro-group to a reward worker."""
        self._traffic.score(key, prompt)

    def reference_logprobs(self, key: int, prompt: Prompt) -> None:
        """Send a micro-group to a reference worker."""
        self._traffic.reference_logprobs(key, prompt)

    def learn(self, rank: int, work: RowWork, keys: list[int]) -> None:
        """Send a learner rank its row of a wave; `keys`: the micro-groups the row is made of."""
        self._traffic.learn(rank, work, keys)

    def arrivals(self, *, until_learner_is_idle: bool = False) -> Iterator[Arrival]:
        """What arrives, as it arrives, until nothing (or no learner row) is in flight. More may be sent meanwhile.
        Raises as Traffic.arrivals."""
        return self._traffic.arrivals(until_learner_is_idle=until_learner_is_idle)

    def completions(self, key: int) -> list[Completion] | None:
        """Open a micro-group, for the samples that are shown to the user; None if it is gone with its node."""
        return self._traffic.completions(key)

    def forget(self, keys: list[int]) -> None:
        """Forget a step's micro-groups, so that the object store frees them."""
        self._traffic.forget(keys)

    # Calls on all workers of a role.

    def optimizer_step(self, totals: LossTotals, *, is_last: bool) -> dict[str, float | None]:
        """Step the optimizer on every rank, for the last time in this step or not; the metrics are equal on all, rank
        0's are returned."""
        self._weights.learner_has_moved = True
        return self._learner("optimizer step", lambda rank: rank.step.remote(totals, is_last))[0]

    def publish_weights(self, version: int, probe: PublishedProbe | None) -> WeightSyncReport:
        """Bring every engine to the learner's weights, and to the run's length probe. Rollout workers that are lost are
        replaced."""
        report, holders = self._weights.deliver(version, probe)
        self._traffic.rollout.begin_version(holders)
        return report

    def start_learning_lengths(self) -> None:
        """Let the rollout workers whose streams have just ended report what the length probe saw, while others work."""
        rollout = self._crew.all("rollout")
        self._probe_reports = {rollout[index].learn.remote(): index for index in sorted(self._traffic.rollout.decoding)}

    def probe_reports(self) -> list[ProbeReport]:
        """The reports, in the order of the workers; what a lost one saw is lost."""
        reports = []
        for ref, index in self._probe_reports.items():
            handle = self._crew.all("rollout")[index]
            try:
                reports += self._asking.gather(
                    {ref: ("rollout", index)}, "length probe reports", self._config.cluster.progress_timeout_s
                )
            except WorkerLost as lost:
                self._traffic.rollout.replace(lost, handle)  # it gets the version that is published next
        return reports

    def rollout_ends(self) -> list[StreamEnd]:
        """What rollout workers said at the end of the last round's streams; a worker that was dealt more later has
        several."""
        return self._traffic.rollout.ends

    def save(self, folder: str) -> None:
        """Write the learner's checkpoint into `folder`."""
        # Behind rows that may still be under way after abandon_step(), on all ranks alike: in a process that also
        # samples those have a group.
        group = {"concurrency_group": "learner"} if self._config.cluster.colocate else {}
        self._learner("saving the checkpoint", lambda rank: rank.save.options(**group).remote(folder))

    def _learner(self, what: str, call: Callable[[Handle], ray.ObjectRef]) -> list[Any]:
        return self._asking.ask("learner", what, call, self._config.cluster.progress_timeout_s)

    # Workers that come and go

    def resize(self) -> None:
        """Between steps: start one more rollout worker if cluster.max_workers asks for it and there is a place. It
        joins when it has weights.

        After a restart, too: RuntimeError where Ray moved a worker to a node with other files.
        """
        if (restarts := self.restarts.total) > self._checked_restarts and self._session.check_new_nodes():
            self._checked_restarts = restarts
        workers = self._crew.all("rollout")
        if self._config.cluster.colocate or len(workers) >= self._config.cluster.most_rollout_workers:
            return
        index = max(workers) + 1
        if self._session.add("rollout", index):
            self._note(f"{worker_name('rollout', index)} is started: there is a place for it")
            self._crew.add("rollout", index)

    def return_to(self, checkpoint: str | None, reason: str) -> None:
        """Give the unfinished step up, kill every learner rank and bring all back from `checkpoint`; weights have to be
        published then."""
        self._traffic.abandon()
        while True:
            self._crew.replace_all("learner", reason)
            try:
                self._start_learner(checkpoint)
                return
            except (WorkerLost, StepLost) as lost:
                reason = str(lost)

    def _explain_loss(self, said: str) -> str:
        if self._kernel_kills.new():
            said += "; out of memory: the kernel's OOM killer has ended a process on the driver's machine"
        return explain(said, self._config)

    def abandon_step(self, *, for_good: bool = False) -> None:
        """Give the unfinished step up: streams end, what is in flight is forgotten. `for_good`: nothing is sampled any
        more, so that streams are waited for only where the learner's calls come behind them."""
        self._traffic.abandon(drained=self._config.cluster.colocate or not for_good)

    # What is seen from outside

    def counts(self) -> ClusterCounts:
        """Where the run stands now."""
        traffic, rollout = self._traffic, self._traffic.rollout
        return ClusterCounts(
            time.time(),
            traffic.waiting.seconds,
            len(rollout.ready),
            traffic.num_arrived,
            rollout.num_moved,
            self.restarts.total,
        )

    def ask_phases(self, *, rollout: bool = False) -> None:
        """Ask workers for their phases; they come out of phases(). `rollout`: also rollout workers that decode, who
        tell theirs when they end."""
        roles = (
            ("learner", "reward", "reference")
            if self._config.cluster.colocate
            else ("rollout", "learner", "reward", "reference")
        )
        telling = set() if rollout else self._traffic.rollout.decoding
        workers = [
            handle
            for role in roles
            for index, handle in self._crew.all(role).items()
            if role != "rollout" or index not in telling
        ]
        self._phase_requests.ask(workers)

    def phases(self, *, wait_s: float = 0.0) -> list[WorkerPhases]:
        """What workers have told at the end of their streams, and what those that were asked have answered within
        `wait_s` seconds."""
        return self._traffic.rollout.take_phases() + self._phase_requests.take(wait_s)

    def now(self) -> ClusterNow:
        """What is in flight, and the rows as rollout workers said last; asks them again and waits for nobody. For one
        thread, any."""
        rollout = self._rows_shown.ask(list(self._crew.all("rollout").values()))
        return ClusterNow(rollout, self._traffic.rollout.num_owed, self._traffic.num_in_flight())

    def _statistics(self) -> Statistics:
        busy = time.monotonic() - self._started_at - self._traffic.waiting.seconds
        restarts = {("restarts", part): float(count) for part, count in list(self.restarts.by_part.items())}
        return self._traffic.statistics() | {"driver_busy_seconds": busy} | restarts

    def stop(self) -> None:
        """End every worker and leave Ray."""
        if self.metrics is not None:
            self.metrics.stop()
        self._session.close()


def _refuse_what_cannot_start(lost: Exception) -> None:
    """A worker that was not killed but failed while it was built would fail again."""
    if NOT_STARTED in str(lost):
        raise RuntimeError(str(lost)) from lost


def _is_there(answer: Answer) -> bool:
    return bool(ray.wait([answer], timeout=0)[0])

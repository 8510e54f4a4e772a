"""The processes of a run on Ray, started, added and brought back; what the driver says to them it says to a part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray
import torch

from infsample_rl.cluster.actors import ACTORS
from infsample_rl.cluster.arrivals import MicroGroups
from infsample_rl.cluster.calls import NOT_STARTED, Calls
from infsample_rl.cluster.interruption import Interruption
from infsample_rl.cluster.length_reports import LengthReports
from infsample_rl.cluster.monitor import Monitor
from infsample_rl.cluster.out_of_memory import explain
from infsample_rl.cluster.session import Session
from infsample_rl.cluster.streams import RolloutStreams
from infsample_rl.cluster.traffic import Traffic
from infsample_rl.cluster.weight_delivery import WeightDelivery
from infsample_rl.cluster.worker_secrets import worker_secrets
from infsample_rl.cluster.workers import Handle, Restarts, StepLost, WorkerLost, Workers
from infsample_rl.config import Config
from infsample_rl.learner.policy_loading import WHOLE
from infsample_rl.model.weight_sync.transport import check_object_store, choose_transport
from infsample_rl.observe.phases import phase
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.placement import worker_groups
from infsample_rl.types import LossTotals

CLOSE_S = 10.0  # for what engines have started to end
PEAK = "memory/learner_peak_bytes"


class Cluster:
    """All processes of a run. An attribute each: `rollout` samples, `traffic` is what is in flight between workers,
    `micro_groups` what has arrived, `learner` trains, `weights` go to the engines, `lengths` come from their probes,
    `monitor` sees it all, `restarts` counts."""

    def __init__(
        self, config: Config, *, total_steps: int, note: Callable[[str], None], interruption: Interruption
    ) -> None:
        self._config, self._session = config, Session(config, note, interruption)
        self.restarts = Restarts(
            config.cluster.max_restarts, note, interruption.sleep, lambda said: explain(said, config.run.dir)
        )
        begin = partial(_begin_worker, config, self._session, worker_secrets(config), total_steps)
        self._calls = Calls(Workers(begin, self.restarts), note, interruption)
        self.weights = WeightDelivery(config, self._calls, self._session.has_place)
        self.rollout = RolloutStreams(config, self._calls, self.weights)
        self.micro_groups = MicroGroups()
        self.traffic = Traffic(config, self._calls, self.weights, self.rollout, self.micro_groups)
        self.learner = LearnerRanks(config, self._calls, self._session, self.weights)
        self.lengths = LengthReports(config, self._calls, self.rollout)
        self.monitor = Monitor(config, self._calls, self.weights, self.rollout, self.traffic)
        self._checked_restarts = 0  # those after which every worker's node had proven what it sees

    @phase("reach")
    def reach(self) -> None:
        """Start Ray (or join `cluster.address`), reserve every place and begin every worker there. ValueError where the
        run has none; Terminated after SIGTERM."""
        self._calls.interruption.install()
        self._session.open()
        self._check_object_store()
        for group in worker_groups(self._config):
            self._calls.workers.start(group.role, group.count // group.ranks)
        if self._config.shares_process:
            self._calls.workers.share("learner", "rollout")

    @phase("start")
    def start(self, checkpoint: str | None) -> None:
        """Wait for every worker, and connect the learner's ranks."""
        for role in ("reward", "reference") if self._config.shares_process else ("rollout", "reward", "reference"):
            self._await_start(role)
        try:
            self.learner.start(checkpoint)
        except (WorkerLost, StepLost) as lost:
            _refuse_what_cannot_start(lost)
            self.return_to(checkpoint, str(lost))

    def _await_start(self, role: str) -> None:
        what, limit = f"{role} workers to start", self._config.cluster.start_timeout_s
        while True:
            try:
                self._calls.ask(role, what, lambda handle: handle.status.remote(), limit)
                return
            except WorkerLost as lost:
                _refuse_what_cannot_start(lost)
                self._calls.workers.replace(lost)

    def _check_object_store(self) -> None:
        """ValueError when weights that travel through the object store do not fit in it."""
        config = self._config
        if choose_transport(config) == "object_store":
            model = ModelOutline.of(config, valid_vocab=0)  # which nothing here asks for
            sizes = model.adapter_sizes(config) if config.learner.sends_adapters else model.sizes
            num_bytes = getattr(torch, config.model.dtype).itemsize * sum(sizes)
            check_object_store(num_bytes, self._session.object_store_bytes())

    def check_nodes(self) -> None:
        """After a restart, between steps: ValueError where Ray moved a worker to a node with other files."""
        if (restarts := self.restarts.total) > self._checked_restarts and self._session.check_new_nodes():
            self._checked_restarts = restarts

    def return_to(self, checkpoint: str | None, reason: str) -> None:
        """Give the step up and bring all learner ranks back from `checkpoint`; weights have to be published then."""
        self.traffic.abandon()
        if self._config.takes_turns:
            self.weights.release()
        while True:
            self._calls.workers.replace_all("learner", reason)
            try:
                self.learner.start(checkpoint)
                return
            except (WorkerLost, StepLost) as lost:
                reason = str(lost)

    def stop(self) -> None:
        """End every worker and leave Ray, which gives the run's reservations back."""
        if self._config.rollout.tensor_parallel > 1 and ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError):
                self._close_engines()
        ray.shutdown()

    def _close_engines(self) -> None:
        """Let processes of vLLM that share memory give it back: Ray ends them without asking."""
        self.traffic.abandon(for_good=True)
        closed = [handle.close.remote() for handle in self._calls.workers.all("rollout").values()]
        if closed:
            ray.wait(closed, num_returns=len(closed), timeout=CLOSE_S)


class LearnerRanks:
    """The ranks that the policy is sharded over. Every call raises as Calls.gather."""

    def __init__(self, config: Config, calls: Calls, session: Session, weights: WeightDelivery) -> None:
        self._config, self._calls, self._session, self._weights = config, calls, session, weights
        self.facts: dict[str, Any] = {}  # of rank 0, as LearnerWorker.setup() has them

    def start(self, checkpoint: str | None) -> None:
        """Wait for every rank, connect them, load the policy or a checkpoint; weights must be published then."""
        ask, limit = self._calls.ask, self._config.cluster.start_timeout_s
        ask("learner", "learner ranks to start", lambda rank: rank.status.remote(), limit)
        self._session.check_new_nodes()  # this role writes checkpoints
        meeting = ask("learner", "learner rank 0", lambda rank: rank.host_store.remote(), limit, only=[0])[0]
        what = "learner ranks to load the policy"
        self.facts = ask("learner", what, lambda rank: rank.setup.remote(checkpoint, meeting), limit)[0]
        if self.facts["loaded"].startswith(WHOLE):
            self._calls.note(f"warning: the policy is loaded {self.facts['loaded']}")
        self._weights.forget_learner()

    def step(self, totals: LossTotals, *, is_last: bool) -> dict[str, float | None]:
        """Step the optimizer on every rank, for the last time in this step or not; metrics, which are equal on all but
        for the memory: the fullest rank's."""
        self._weights.learner_has_moved = True
        limit = self._config.cluster.progress_timeout_s
        answers = self._calls.ask("learner", "optimizer step", lambda rank: rank.step.remote(totals, is_last), limit)
        return answers[0] | {PEAK: max(answer[PEAK] for answer in answers)}

    def save(self, folder: str) -> None:
        """Write the learner's checkpoint into `folder`."""
        # Behind rows that may still be under way after a step was given up, on all ranks alike: in a process that also
        # samples those have a group.
        group = {"concurrency_group": "learner"} if self._config.shares_process else {}
        limit = self._config.cluster.progress_timeout_s
        self._calls.ask(
            "learner", "saving the checkpoint", lambda rank: rank.save.options(**group).remote(folder), limit
        )


def _begin_worker(
    config: Config,
    session: Session,
    secrets: Mapping[str, Any],
    total_steps: int,
    role: str,
    index: int,
) -> tuple[Handle, ray.ObjectRef]:
    """Start a worker in its place, and ask it a first question."""
    colocated = role == "learner" and config.shares_process
    actor = ACTORS["colocated" if colocated else role].options(**session.options(role, index))
    of_role: dict[str, list[Any]] = {
        "learner": [config.cluster.learner_ranks, total_steps],
        "reference": [session.options_of_ranks(role, index)],
    }
    handle = actor.remote(secrets[role], config, index, *of_role.get(role, []))
    return handle, handle.status.remote()


def _refuse_what_cannot_start(lost: Exception) -> None:
    """A worker that was not killed but failed while it was built would fail again."""
    if NOT_STARTED in str(lost):
        raise RuntimeError(str(lost)) from lost

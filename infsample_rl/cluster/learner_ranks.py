"""The learner's processes: started together, and asked together for what is a collective of theirs."""

from __future__ import annotations

from infsample_rl.cluster.calls import Calls
from infsample_rl.cluster.session import Session
from infsample_rl.cluster.weight_delivery import WeightDelivery
from infsample_rl.config import Config
from infsample_rl.types import LossTotals


class LearnerRanks:
    """The ranks that the policy is sharded over. Every call raises as Calls.gather."""

    def __init__(self, config: Config, calls: Calls, session: Session, weights: WeightDelivery) -> None:
        self._config, self._calls, self._session, self._weights = config, calls, session, weights

    def start(self, checkpoint: str | None) -> None:
        """Wait for every rank to start, connect them, load the policy or a checkpoint; weights must be published
        then."""
        ask, limit = self._calls.ask, self._config.cluster.start_timeout_s
        ask("learner", "learner ranks to start", lambda rank: rank.status.remote(), limit)
        self._session.check_new_nodes()  # this role writes checkpoints
        host, port = ask("learner", "learner rank 0", lambda rank: rank.host_store.remote(), limit, only=[0])[0]
        what = "learner ranks to load the policy"
        found = ask("learner", what, lambda rank: rank.setup.remote(host, port, checkpoint), limit)[0]
        self._calls.note("learner: " + ", ".join(f"{name} {value}" for name, value in found.items()))
        self._weights.forget_learner()

    def step(self, totals: LossTotals, *, is_last: bool) -> dict[str, float | None]:
        """Step the optimizer on every rank, for the last time in this step or not; the metrics are equal on all, rank
        0's are returned."""
        self._weights.learner_has_moved = True
        limit = self._config.cluster.progress_timeout_s
        return self._calls.ask("learner", "optimizer step", lambda rank: rank.step.remote(totals, is_last), limit)[0]

    def save(self, folder: str) -> None:
        """Write the learner's checkpoint into `folder`."""
        # Behind rows that may still be under way after a step was given up, on all ranks alike: in a process that also
        # samples those have a group.
        group = {"concurrency_group": "learner"} if self._config.cluster.colocate else {}
        limit = self._config.cluster.progress_timeout_s
        self._calls.ask(
            "learner", "saving the checkpoint", lambda rank: rank.save.options(**group).remote(folder), limit
        )

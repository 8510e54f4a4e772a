"""What the length probes of the rollout workers have seen of a step's samples."""

from __future__ import annotations

import ray

from infsample_rl.cluster.calls import Calls
from infsample_rl.cluster.streams import RolloutStreams
from infsample_rl.cluster.workers import WorkerLost
from infsample_rl.config import Config
from infsample_rl.rollout.length_prediction.messages import LengthReport


class LengthReports:
    """Asked for when streams have ended, taken when the learner has done its update."""

    def __init__(self, config: Config, calls: Calls, rollout: RolloutStreams) -> None:
        self._config, self._calls, self._rollout = config, calls, rollout
        self._asked: dict[ray.ObjectRef, int] = {}  # worker by its answer

    def ask(self) -> None:
        """Let the rollout workers whose streams have just ended report, while others work."""
        handles = self._calls.workers.all("rollout")
        self._asked = {handles[index].report_lengths.remote(): index for index in sorted(self._rollout.decoding)}

    def take(self) -> list[LengthReport]:
        """The reports, in the order of the workers; what a lost one saw is lost."""
        reports, limit = [], self._config.cluster.progress_timeout_s
        for ref, index in self._asked.items():
            handle = self._calls.workers.all("rollout")[index]
            try:
                reports += self._calls.gather({ref: ("rollout", index)}, "length probe reports", limit)
            except WorkerLost as lost:
                self._rollout.replace(lost, handle)  # it gets the version that is published next
        return reports

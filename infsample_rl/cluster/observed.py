"""What every actor tells of itself, beside its own calls."""

from __future__ import annotations

from typing import Any

import ray

from infsample_rl.observe.phases import report_phases, status, watch_log
from infsample_rl.types import WorkerPhases, WorkerStatus

ANSWER_S = 10.0  # a process that has not answered status() for so long is taken as gone
with_groups: Any = ray.remote  # its hints lack concurrency_groups
# two: give_back() waits for a running step, progress() must not
with_control = with_groups(concurrency_groups={"control": 2})


class Observed:
    """What every actor tells of itself, also while its own calls run."""

    _done = 0  # micro-groups or rows

    def observe(self, role: str, index: int) -> None:
        """Begin to keep the last log line."""
        watch_log()
        self._role, self._index = role, index

    @ray.method(concurrency_group="control")
    def progress(self) -> int:
        """Grows as long as the worker works, also within a call."""
        return self._done

    @ray.method(concurrency_group="control")
    def phases(self) -> WorkerPhases:
        """Phases since the last call."""
        return report_phases(self._role, self._index, ray.util.get_node_ip_address())

    @ray.method(concurrency_group="control")
    def status(self) -> WorkerStatus:
        """Process, last log line, and where its threads stand."""
        return status()


def status_of(actor: Any) -> WorkerStatus | None:
    """What a worker says of itself; None when it is gone or does not answer within ANSWER_S."""
    try:
        return ray.get(actor.status.remote(), timeout=ANSWER_S)
    except ray.exceptions.RayError:
        return None

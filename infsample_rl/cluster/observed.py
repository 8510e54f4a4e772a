"""What every actor does beside its own calls: begin as one, and tell of itself."""

from __future__ import annotations

import contextlib
import resource
from typing import Any

import ray

from infsample_rl.cluster.worker_secrets import Secrets, take_secrets
from infsample_rl.observe.phases import report_phases, status, watch_log
from infsample_rl.types import WorkerPhases, WorkerStatus

ANSWER_S = 10.0  # a process that has not answered status() for so long is taken as gone
MOST_OPEN_FILES = 65_536  # as in a driver of Ray's: programs may close every number below the limit
with_groups: Any = ray.remote  # its hints lack concurrency_groups
# two: give_back() waits for a running step, progress() must not
with_control = with_groups(concurrency_groups={"control": 2})


class Observed:
    """What every actor tells of itself, also while its own calls run."""

    _done = 0  # micro-groups or rows

    def begin(self, secrets: Secrets) -> None:
        """Before anything else: keep no key but these, and let this process and all it starts hold a file for every
        trajectory. Ray raises that limit for a driver and what it starts later, not for forks or on a joined node."""
        take_secrets(secrets)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            with contextlib.suppress(ValueError):  # macOS has a lower one beside it
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

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

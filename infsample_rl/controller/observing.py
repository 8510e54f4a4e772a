"""What is seen of a step from outside, beside its metrics: the timeline, Prometheus, what the driver did."""

from __future__ import annotations

import platform

from infsample_rl.cluster.cluster import Cluster
from infsample_rl.cluster.monitor import ClusterCounts
from infsample_rl.controller.step_metrics import Metrics
from infsample_rl.observe.phases import report_phases
from infsample_rl.observe.timeline import Timeline


def observe_step(cluster: Cluster, timeline: Timeline, step: int, before: ClusterCounts) -> Metrics:
    """Enter a step that has just ended into metrics and timeline, and ask the workers what they did in it. `before`:
    when it began."""
    now = cluster.monitor.counts()
    cluster.monitor.metrics.observe("step_seconds", now.at - before.at)
    add_phases(cluster, timeline)
    timeline.end_step(step, before.at, now.at)
    cluster.monitor.ask_phases()
    return {
        "timing/driver": max(0.0, now.at - before.at - (now.waited_s - before.waited_s)),  # what it did beside waiting
        "cluster/rollout_workers": before.rollout_workers,
        "cluster/samples_moved": now.samples_moved - before.samples_moved,
        "cluster/restarts": now.restarts,
    }


def add_phases(cluster: Cluster, timeline: Timeline, *, wait_s: float = 0.0) -> None:
    """The driver's own phases, and those that the workers have told of within `wait_s` seconds."""
    timeline.add([report_phases("driver", 0, platform.node()), *cluster.monitor.phases(wait_s=wait_s)])

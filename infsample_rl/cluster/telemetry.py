"""A process's metrics for Prometheus, and its phases, by way of Ray: every node's agent serves them at /metrics.

Workers return plain statistics; the actors around them and the driver hand these to a MetricsExporter.
docs/observability.md lists every metric.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.util import metrics

from infsample_rl.observe.phases import phase_seconds

EXPORT_S = 5.0  # Ray's agents forget a gauge that was not set within their own interval, 10 s
PREFIX = "infsample_rl_"  # Ray puts its own, ray_, before it
SECONDS = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]  # bounds of histograms

# name -> (kind, meaning, further label). All have the labels run, role and worker. Prometheus sees a counter as
# NAME_total.
METRICS: dict[str, tuple[str, str, str]] = {
    # the driver
    "step": ("gauge", "updates done", ""),
    "step_seconds": ("histogram", "seconds of a training step", ""),
    "weight_sync_seconds": ("histogram", "seconds in which a version reached all engines", ""),
    "driver_busy_seconds": (
        "counter",
        "seconds in which the driver worked instead of waiting for something to arrive",
        "",
    ),
    "calls_in_flight": (
        "gauge",
        "micro-groups at the reward or reference workers, rows at the learner, queued or running",
        "stage",
    ),
    "micro_groups_held": (
        "gauge",
        "micro-groups of this step that the driver has been told of and the object store holds",
        "",
    ),
    "micro_groups_arrived": (
        "counter",
        "micro-groups the driver has been told of; micro_groups_yielded less these are undelivered",
        "",
    ),
    "samples_moved": (
        "counter",
        "samples that a rollout worker gave back, not having started them, for an idle one",
        "",
    ),
    "workers_decoding": ("gauge", "rollout workers whose stream has not ended", ""),
    "restarts": ("counter", "workers that were started again", "part"),
    # rollout workers
    "kv_pages": ("gauge", "pages of the KV pool", ""),
    "kv_pages_used": ("gauge", "pages of the KV pool that are held", ""),
    "rows": ("gauge", "samples that decode now", ""),
    "running_steps": ("counter", "rounds in which every row got a token", ""),
    "sampled_tokens": ("counter", "tokens sampled", ""),
    "preemptions": ("counter", "rows that had to give their pages back unfinished", ""),
    "micro_groups_yielded": ("counter", "micro-groups handed to the object store", ""),
    # reward, reference, learner
    "reward_timeouts": ("counter", "reward calls killed at reward.timeout_s", ""),
    "reward_deaths": ("counter", "processes of reward functions that died in a call", ""),
    "learner_rows": ("counter", "rows trained, those of weight zero not counted", ""),
    "learner_row_tokens": ("counter", "tokens in these rows, prompts included", ""),
    "learner_updates": ("counter", "optimizer steps, skipped ones included", ""),
    # every process
    "object_store_bytes": ("counter", "bytes of arrays this process has put into the object store", ""),
    "phase_seconds": ("counter", "seconds spent in a phase; the rest is idle", "phase"),
}

# name, or (name, value of its further label); counters as sums since the start
Statistics = dict[Any, float]


class MetricsExporter:
    """Sets one process's metrics from `statistics()` every EXPORT_S seconds, in a thread of its own."""

    def __init__(self, statistics: Callable[[], Statistics], *, run: str, role: str, worker: int):
        self._statistics = statistics
        run = run.encode("ascii", "backslashreplace").decode()  # Ray takes ASCII labels only
        self._labels = {"run": run, "role": role, "worker": str(worker)}
        self._metrics: dict[str, Any] = {}
        self._exported: dict[tuple[str, str], float] = {}  # of counters
        self._counted: Statistics = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="metrics")
        self._thread.start()

    def count(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Add to a counter, of `label` where METRICS gives it a further one. Example: exporter.count("restarts",
        label="rollout 3")"""
        key = (name, label)
        with self._lock:
            self._counted[key] = self._counted.get(key, 0.0) + amount

    def observe(self, name: str, value: float) -> None:
        """Enter a value into a histogram."""
        self._metric(name).observe(value, tags=self._labels)

    def stop(self) -> None:
        """End the thread. Before Ray is left."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(EXPORT_S):
            self._export()

    def _export(self) -> None:
        with self._lock:
            counted = dict(self._counted)
        phases = {("phase_seconds", name): seconds for name, seconds in phase_seconds().items()}
        for key, value in (self._statistics() | counted | phases).items():
            name, label = key if isinstance(key, tuple) else (key, "")
            kind, _, further = METRICS[name]
            labels = self._labels | ({further: label} if further else {})
            if kind == "gauge":
                self._metric(name).set(value, tags=labels)
            elif value > self._exported.get((name, label), 0.0):
                self._metric(name).inc(value - self._exported.get((name, label), 0.0), tags=labels)
                self._exported[name, label] = value

    def _metric(self, name: str) -> Any:
        if name not in self._metrics:
            kind, meaning, further = METRICS[name]
            options: dict[str, Any] = {"description": meaning, "tag_keys": (*self._labels, *filter(None, [further]))}
            made = {"gauge": metrics.Gauge, "counter": metrics.Counter}.get(kind)
            self._metrics[name] = (
                made(PREFIX + name, **options)
                if made
                else metrics.Histogram(PREFIX + name, boundaries=SECONDS, **options)
            )
        return self._metrics[name]


def metrics_addresses() -> list[str]:
    """Where the nodes of the cluster serve their metrics."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"]
    ]

"""Ray, which only this file and actors.py know: starts the workers, carries records between them, says what has arrived."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from infsample_rl.actors import ColocatedActor, LearnerActor, ReferenceActor, RewardActor, RolloutActor
from infsample_rl.arrivals import Arrival, MicroGroupArrival, ReferenceArrival, RewardArrival, RowArrival
from infsample_rl.config import Config
from infsample_rl.model.loading import load_model_config
from infsample_rl.placement import check_gpus, total_cpus, total_gpus, worker_groups
from infsample_rl.types import (
    Completion,
    LossTotals,
    ProbeReport,
    Prompt,
    PublishedProbe,
    RolloutWork,
    SampleSpec,
)
from infsample_rl.weight_sync.manifest import plan_weights, shapes_of_architecture
from infsample_rl.weight_sync.sync import WeightSyncReport
from infsample_rl.weight_sync.transport import check_object_store, choose_transport

POLL_S = 10.0  # how long one wait lasts before it is said what is waited for


class Cluster:
    """All processes of a run and everything in flight between them."""

    def __init__(self, config: Config, *, total_steps: int, note: Callable[[str], None]):
        self._config = config
        self._transport = choose_transport(config.cluster)
        self._total_steps = total_steps
        self._note = note
        self._streams: dict[Any, int] = {}  # generator of a rollout worker -> its index
        self._headers: dict[Any, ray.ObjectRef] = {}  # generator -> a header whose micro-group is still to come
        self._in_flight: dict[ray.ObjectRef, tuple[str, int]] = {}  # result -> (kind, micro-group key or rank)
        self._micro_groups: dict[int, ray.ObjectRef] = {}
        self._references: dict[int, ray.ObjectRef] = {}
        self._next_key = 0
        self._decoding: list[Any] = []  # rollout workers that were dealt work last
        self._probe_reports: list[ray.ObjectRef] = []

    def start(self, checkpoint: str | None) -> None:
        """Start Ray (or join `cluster.address`), every worker, and the learner's process group."""
        self._init_ray()
        config, cluster = self._config, self._config.cluster
        groups = {group.role: group for group in worker_groups(config)}

        def spawn(actor: Any, role: str, *arguments: Any) -> Any:
            return actor.options(num_cpus=groups[role].cpus, num_gpus=groups[role].gpus).remote(*arguments)

        ranks = groups["learner"].count
        if cluster.colocate:
            self.rollout = self.learner = [spawn(ColocatedActor, "learner", config, rank, ranks, self._total_steps) for rank in range(ranks)]
        else:
            self.rollout = [spawn(RolloutActor, "rollout", config, index) for index in range(cluster.rollout_workers)]
            self.learner = [spawn(LearnerActor, "learner", config, rank, ranks, self._total_steps) for rank in range(ranks)]
        self.reward = [spawn(RewardActor, "reward", config) for _ in range(groups["reward"].count)]
        count = groups["reference"].count if "reference" in groups else 0
        self.reference = [spawn(ReferenceActor, "reference", config) for _ in range(count)]
        waited = [] if cluster.colocate else [worker.progress.remote() for worker in self.rollout]
        waited += [worker.ready.remote() for worker in self.reward + self.reference]
        self._gather(waited, "workers to start", cluster.start_timeout_s)
        host, port = self._gather([self.learner[0].host_store.remote()], "learner rank 0", cluster.start_timeout_s)[0]
        setups = [rank.setup.remote(host, port, checkpoint) for rank in self.learner]
        learner = self._gather(setups, "learner ranks to load the policy", cluster.start_timeout_s)[0]
        self._note("learner: " + ", ".join(f"{name} {value}" for name, value in learner.items()))
        if self._transport in ("broadcast", "cuda_ipc"):
            host, port = self._gather([self.learner[0].host_weight_link.remote()], "learner rank 0", cluster.start_timeout_s)[0]
            joined = [self.learner[0].join_weight_link.remote(), *(worker.join_weight_link.remote(host, port) for worker in self.rollout)]
            self._gather(joined, "learner and rollout workers to connect", cluster.start_timeout_s)

    def _init_ray(self) -> None:
        config = self._config
        threads = str(config.cluster.threads_per_worker)
        package = str(Path(__file__).resolve().parent.parent)
        python_path = os.pathsep.join(path for path in (package, os.environ.get("PYTHONPATH", "")) if path)
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": python_path}
        arguments: dict[str, Any] = {"runtime_env": {"env_vars": environment}, "log_to_driver": False, "logging_level": "ERROR"}
        if config.cluster.address is None:
            # CPUs are reservations, not cores: a local cluster gets as many as the workers ask for.
            arguments |= {"address": "local", "num_cpus": max(os.cpu_count() or 1, int(total_cpus(config)) + 1), "include_dashboard": False}
        else:
            arguments["address"] = config.cluster.address
        ray.init(**arguments)
        signal.signal(signal.SIGTERM, _interrupt)  # Ray has just installed its own, which ends the process without a word
        if total_gpus(config) > 0:
            check_gpus(config, ray.cluster_resources().get("GPU", 0))
        if self._transport == "object_store":
            shapes = shapes_of_architecture(
                load_model_config(config.model), getattr(torch, config.model.dtype), trust_remote_code=config.model.trust_remote_code
            )
            smallest = min(node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"])
            check_object_store(plan_weights(shapes, 0).num_bytes, int(smallest))

    # One step: everything that is in flight, and what of it has arrived.

    def start_rollout(self, dealt: list[list[RolloutWork]], *, step: int, evaluation: bool = False) -> None:
        """Let every rollout worker decode its part; micro-groups then come out of arrivals()."""
        pending = 2 * self._config.rollout.max_undelivered  # a header and a payload each
        for index, (worker, work) in enumerate(zip(self.rollout, dealt, strict=True)):
            if work:
                options = {"num_returns": "streaming", "_generator_backpressure_num_objects": pending}
                self._streams[worker.stream.options(**options).remote(work, step, evaluation)] = index
        self._decoding = [worker for worker, work in zip(self.rollout, dealt, strict=True) if work]

    def score(self, key: int, prompt: Prompt) -> None:
        """Send a micro-group to a reward worker."""
        worker = self.reward[key % len(self.reward)]
        self._in_flight[worker.score.remote(prompt, self._micro_groups[key])] = ("reward", key)

    def reference_logprobs(self, key: int, prompt: Prompt) -> None:
        """Send a micro-group to a reference worker."""
        worker = self.reference[key % len(self.reference)]
        floats, payload = worker.logprobs.options(num_returns=2).remote(prompt, self._micro_groups[key])
        self._in_flight[floats] = ("reference", key)
        self._references[key] = payload

    def accumulate(
        self,
        rank: int,
        row: list[SampleSpec] | None,
        prompt_ids: dict[int, np.ndarray],
        keys: list[int],
        totals: LossTotals,
        *,
        row_id: int | None = None,
    ) -> None:
        """Send a learner rank its row of a wave, None for one of weight zero; `keys`: the micro-groups the row is made of."""
        call = self._learner_call(rank, "accumulate")
        self._in_flight[call.remote(row, prompt_ids, totals, row_id, *self._payloads(keys))] = ("learner", rank)

    def remember(
        self, rank: int, row: list[SampleSpec] | None, prompt_ids: dict[int, np.ndarray], keys: list[int], *, row_id: int | None
    ) -> None:
        """Let a learner rank keep a row's log-probabilities for later updates of the step; arguments as in accumulate."""
        call = self._learner_call(rank, "remember")
        self._in_flight[call.remote(row, prompt_ids, row_id, *self._payloads(keys))] = ("learner", rank)

    def _payloads(self, keys: list[int]) -> list[ray.ObjectRef]:
        return [self._micro_groups[key] for key in keys] + [self._references[key] for key in keys if key in self._references]

    def _learner_call(self, rank: int, name: str) -> Any:
        """A learner rank's method; where it shares its process with a stream, in a thread beside that."""
        method = getattr(self.learner[rank], name)
        return method.options(concurrency_group="learner") if self._config.cluster.colocate else method

    def arrivals(self, *, until_learner_is_idle: bool = False) -> Iterator[Arrival]:
        """What arrives, as it arrives, until nothing (or no learner row) is in flight. More may be sent meanwhile.

        Raises RuntimeError when a worker fails, or when nothing moves for cluster.progress_timeout_s.
        """
        last_progress, heartbeat, turn = time.monotonic(), -1, 0
        while (self._streams or self._in_flight) and not (until_learner_is_idle and self._learner_is_idle()):
            streams, turn = list(self._streams), turn + 1
            first = turn % len(streams) if streams else 0  # ray.wait favours the first of the list: take turns
            waitables = streams[first:] + streams[:first] + list(self._in_flight)
            ready, _ = ray.wait(waitables, num_returns=1, timeout=POLL_S, fetch_local=False)
            if not ready:
                before, heartbeat = heartbeat, self._heartbeat(heartbeat)
                last_progress = time.monotonic() if heartbeat > before else last_progress
                self._check_progress(last_progress)
                continue
            last_progress = time.monotonic()
            arrival = self._open_stream(ready[0]) if ready[0] in self._streams else self._open_result(ready[0])
            if arrival is not None:
                yield arrival

    def _open_stream(self, stream: Any) -> MicroGroupArrival | None:
        try:
            item = next(stream)
        except StopIteration:
            who = f"rollout worker {self._streams.pop(stream)}"
            if stream in self._headers:  # an error takes the place of a header
                self._open(self._headers.pop(stream), who)
            self._open(stream.completed(), who)
            return None
        if stream not in self._headers:
            self._headers[stream] = item
            return None
        header = self._open(self._headers.pop(stream), f"rollout worker {self._streams[stream]}")
        key, self._next_key = self._next_key, self._next_key + 1
        self._micro_groups[key] = item
        return MicroGroupArrival(key, header)

    def _learner_is_idle(self) -> bool:
        return all(kind != "learner" for kind, _ in self._in_flight.values())

    def _open_result(self, ref: ray.ObjectRef) -> Arrival:
        kind, key = self._in_flight.pop(ref)
        if kind == "learner":
            return RowArrival(key, self._open(ref, f"learner rank {key}"))
        value = self._open(ref, f"{kind} worker")
        return RewardArrival(key, value) if kind == "reward" else ReferenceArrival(key, value)

    def completions(self, key: int) -> list[Completion]:
        """Open a micro-group, for the samples that are shown to the user."""
        return ray.get(self._micro_groups[key])

    def forget(self, keys: list[int]) -> None:
        """Forget a step's micro-groups, so that the object store frees them."""
        for key in keys:
            self._micro_groups.pop(key, None)
            self._references.pop(key, None)

    # Calls on all workers of a role.

    def optimizer_step(self, totals: LossTotals, *, is_last: bool) -> dict[str, float]:
        """Step the optimizer on every rank, for the last time in this step or not; the metrics are equal on all, rank 0's are returned."""
        return self._learner("optimizer step", lambda rank: rank.step.remote(totals, is_last))[0]

    def start_learning_lengths(self) -> None:
        """Let the rollout workers whose streams have just ended report what the length probe saw, while others work."""
        self._probe_reports = [worker.learn.remote() for worker in self._decoding]

    def probe_reports(self) -> list[ProbeReport]:
        """The reports, in the order of the workers."""
        return self._gather(self._probe_reports, "length probe reports", self._config.cluster.progress_timeout_s)

    def publish_weights(self, version: int, probe: PublishedProbe | None) -> WeightSyncReport:
        """Bring every engine to the learner's weights, and to the run's length probe."""
        started, what, limit = time.monotonic(), f"weights version {version} to reach the engines", self._config.cluster.progress_timeout_s
        if self._transport == "local":
            reports = self._learner(what, lambda rank: rank.publish_here.remote(version, probe))
        elif self._transport == "object_store":
            manifest, buckets, sums = self._learner("publishing weights", lambda rank: rank.publish.remote(version))[0]
            reports = self._gather([worker.load_weights.remote(manifest, buckets, probe, sums) for worker in self.rollout], what, limit)
            # Nobody else holds the buckets: with `buckets`, at return, the object store frees them.
        else:
            received = [worker.receive_weights.remote(version, probe) for worker in self.rollout]
            reports = self._gather([*received, *(rank.send_weights.remote(version) for rank in self.learner)], what, limit)
        wrong = [report.version for report in reports if report is not None and report.version != version]
        if wrong:
            raise RuntimeError(f"rollout workers hold weights version {wrong[0]}, version {version} was published")
        return dataclasses.replace(reports[0], seconds=time.monotonic() - started)

    def save(self, folder: str) -> None:
        """Write the learner's checkpoint into `folder`."""
        self._learner("saving the checkpoint", lambda rank: rank.save.remote(folder))

    def rollout_stats(self) -> list[dict[str, float]]:
        """Figures of the last stream of every rollout worker that had work."""
        return self._gather([worker.stats.remote() for worker in self._decoding], "rollout statistics", self._config.cluster.progress_timeout_s)

    def stop(self) -> None:
        """End every worker and leave Ray."""
        ray.shutdown()

    def _learner(self, what: str, call: Callable[[Any], ray.ObjectRef]) -> list[Any]:
        return self._gather([call(rank) for rank in self.learner], what, self._config.cluster.progress_timeout_s)

    def _gather(self, refs: list[ray.ObjectRef], what: str, timeout_s: float) -> list[Any]:
        """All results; says what is waited for, raises RuntimeError after `timeout_s` or when a worker fails."""
        started, pending = time.monotonic(), list(refs)
        while pending:
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
            for ref in ready:
                self._open(ref, what)
            waited = time.monotonic() - started
            if pending and waited > timeout_s:
                raise RuntimeError(f"{what}: {len(pending)} of {len(refs)} have not answered within {timeout_s:g} s")
            if pending:
                self._note(f"waiting for {what}: {len(pending)} of {len(refs)} left after {waited:.0f} s")
        return [self._open(ref, what) for ref in refs]

    def _open(self, ref: ray.ObjectRef, who: str) -> Any:
        """The value of a reference; a failure becomes one RuntimeError (or ValueError, if the worker refused a setting)."""
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            kind = ValueError if isinstance(cause, ValueError) else RuntimeError
            raise kind(f"{who}: {cause}") from error
        except ray.exceptions.RayActorError as error:
            refused = re.findall(r"^ValueError: (.+)$", str(error), re.MULTILINE)  # raised where the worker was constructed
            if refused:
                raise ValueError(f"{who}: {refused[-1]}") from error
            raise RuntimeError(f"{who}: its process died ({str(error).strip().splitlines()[-1]})") from error
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"{who}: {type(error).__name__}: {error}") from error

    def _heartbeat(self, last: int) -> int:
        """Running steps of all decoding workers together: grows as long as anyone decodes."""
        try:
            return max(last, sum(ray.get([self.rollout[index].progress.remote() for index in self._streams.values()], timeout=POLL_S)))
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            return last  # no answer is no progress; a death is raised where its results are opened

    def _check_progress(self, last_progress: float) -> None:
        idle = time.monotonic() - last_progress
        waited = [f"rollout worker {index}" for index in self._streams.values()] + sorted({f"{kind} {key}" for kind, key in self._in_flight.values()})
        limit = self._config.cluster.progress_timeout_s
        if any(kind == "reward" for kind, _ in self._in_flight.values()):  # every sample of a micro-group may use up its reward limit
            limit += self._config.reward.timeout_s * self._config.rollout.micro_group * len(self._config.reward.functions)
        if idle > limit:
            raise RuntimeError(f"nothing has moved for {idle:.0f} s (cluster.progress_timeout_s); waiting for {', '.join(waited[:8])}")
        if idle > 3 * POLL_S:
            self._note(f"waiting for {', '.join(waited[:8])}: no progress for {idle:.0f} s")


def _interrupt(*_: object) -> None:
    """SIGTERM ends a run like Ctrl-C: workers are stopped, logs closed, and how to go on is said."""
    raise KeyboardInterrupt

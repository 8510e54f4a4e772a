"""A rollout worker: one engine with its own copy of the policy. A plain class; cluster.py wraps it for Ray."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from infsample_rl.config import Config
from infsample_rl.data.turns import templates_of
from infsample_rl.model.peak_memory import process_memory
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.model.weight_sync.link import WeightLink, join_link
from infsample_rl.model.weight_sync.store import StoreAddress, open_store
from infsample_rl.model.weight_sync.sync import load_published, receive_weights
from infsample_rl.observe.phases import phase
from infsample_rl.rollout.engine.draft_files import DraftFile
from infsample_rl.rollout.engine.engines import open_engine
from infsample_rl.rollout.environment.episodes import Environments, Episodes
from infsample_rl.rollout.environment.turn_records import TurnRecords, fingerprint
from infsample_rl.rollout.length_prediction.messages import LengthReport, PublishedLengths
from infsample_rl.types import (
    Completion,
    MaybeNone,
    MicroGroupHeader,
    RolloutNow,
    RolloutWork,
    WeightManifest,
    WeightSyncReport,
)


class RolloutWorker:
    """Samples the work it is dealt and streams micro-groups; weights are replaced in place between streams."""

    def __init__(
        self,
        config: Config,
        worker_index: int,
        model: PreTrainedModel | None = None,
        *,
        reserved_bytes: int = 0,
        environments: Environments | None = None,
    ) -> None:
        """Loads the tokenizer and, unless it is given, the model: on a GPU when the settings give workers one, else on
        the CPU.

        `reserved_bytes`: as SamplingEngine's. `environments`: of samples of several turns.
        """
        torch.set_num_threads(config.cluster.threads_per_worker)
        self.config, self.worker_index = config, worker_index
        self.memory = process_memory("cuda" if config.cluster.rollout_gpus > 0 else "cpu")
        self.link: WeightLink | MaybeNone = None  # after join_weight_link()
        self._halted = -1  # streams up to this number are to end
        tokenizer = load_tokenizer(config.model)
        self.engine = open_engine(config, tokenizer, self.memory, model, reserved_bytes=reserved_bytes)
        self._draft_file: DraftFile | None = None
        if self.engine.drafter is not None and config.run.dir is not None:
            vocab_size = self.engine.vocab_size
            self._draft_file = DraftFile(Path(config.run.dir), worker_index, self.engine.drafter, vocab_size)
        self._environments = environments
        if environments is not None:
            kwargs, stops = config.data.chat_template_kwargs, self.engine.stop_token_ids
            self._templates = templates_of(tokenizer, kwargs, environments.tools, stops)
            users = [function.name for function in config.reward.functions if ".py:" in function.name]
            self._made_by = fingerprint(config.environment, users)
        if config.is_deterministic and not self.engine.is_exact:
            warnings.warn(
                f"samples may differ by rounding from run to run: model.path={config.model.path} has no compiled "
                "decoder here",
                stacklevel=2,
            )

    def stream(
        self,
        work: list[RolloutWork],
        *,
        step: int,
        evaluation: bool = False,
        pause_every: int | None = None,
        number: int = 0,
    ) -> Iterator[MicroGroupHeader | list[Completion]]:
        """A header, then its micro-group, for every micro-group as soon as its samples have ended; empty lists for
        pauses (engine.stream).

        `number`: what halt() knows the stream by.
        """
        temperature = self.config.run.eval_temperature if evaluation else None
        micro_groups = self.engine.stream(
            [item.prompt_ids.tolist() for item in work],
            self.config.run.seed,
            step=step,
            prompt_indices=[item.prompt_index for item in work],
            sample_indices=[item.sample_indices for item in work],
            evaluation=evaluation,
            temperature=temperature,
            pause_every=pause_every,
            is_halted=lambda: number <= self._halted,
            turns=self._turns(work, step, evaluation=evaluation),
        )
        while True:
            with phase("decode"):
                micro_group = next(micro_groups, None)
            if micro_group is None:
                if self._draft_file is not None:
                    self.engine.stats.draft_seconds += self._draft_file.write()
                return
            if micro_group:
                yield self._header(micro_group, evaluation)
            yield [replace(completion, stays=[]) for completion in micro_group]

    def _turns(self, work: list[RolloutWork], step: int, *, evaluation: bool) -> Episodes | None:
        """What answers the turns of a stream's samples."""
        if self._environments is None:
            return None
        starts = {item.prompt_index: item.start for item in work if item.start is not None}
        own, run_dir = self.config.environment, self.config.run.dir
        records = None
        if run_dir is not None:
            records = TurnRecords(Path(run_dir), step=step, evaluation=evaluation, made_by=self._made_by)
        return Episodes(self._environments, self._templates, own, starts, records)

    @phase("sync")
    def load_weights(
        self, manifest: WeightManifest, buckets: Iterable[np.ndarray], probe: PublishedLengths | None = None
    ) -> WeightSyncReport:
        """Copy what the object store holds into the model, in place. Not while a stream runs.

        `probe`: the run's length probe, where it has one.
        """
        report = load_published(self.engine.parameters, manifest, buckets, load=self.engine.load)
        self.begin_version(report.version, probe)
        return report

    @phase("rest")
    def rest(self) -> None:
        """Give weights and KV back until weights come. Not while a stream runs."""
        self.engine.rest()

    def close(self) -> None:
        """End what the engine has started. Not while a stream runs."""
        self.engine.close()

    def join_weight_link(self, meeting: StoreAddress, member: int, members: int) -> None:
        """The line to learner rank 0, which joins at the same time, in place of any that was there."""
        if self.link is not None:
            self.link.close()
        cluster = self.config.cluster
        self.link = join_link(cluster, open_store(meeting, cluster.collective_timeout_s), member, members)

    @phase("sync")
    def receive_weights(self, version: int, probe: PublishedLengths | None = None) -> WeightSyncReport:
        """Take `version` from learner rank 0, which sends it at the same time, into the model, in place. Not while a
        stream runs."""
        report = receive_weights(self.link, self.engine.parameters, version, self.engine.load)
        self.begin_version(version, probe)
        return report

    def begin_version(self, version: int, probe: PublishedLengths | None = None) -> None:
        """Sample as policy `version` from now on: its weights have arrived."""
        if probe is not None:
            watch: Any = self.engine.lengths.watch  # of the kind that the driver publishes for
            watch.load(probe)
        self.engine.begin_version(version)

    @phase("learn")
    def learn(self) -> LengthReport:
        """What the length probe has seen since the last time, and a replay of the last groups with it and without. Not
        while a stream runs."""
        return self.engine.learn()

    def progress(self) -> int:
        """Grows with every running step, and with every reply of an environment: samples may all wait for theirs."""
        replies = 0 if self._environments is None else self._environments.num_replies
        return self.engine.totals.running_steps + replies

    def halt(self, number: int) -> None:
        """End the stream of this number, and those before, at its next running step. From another thread."""
        self._halted = max(self._halted, number)

    def give_back(self) -> dict[int, list[int]]:
        """Half of the stream's samples that have not started, which it then leaves out: {prompt_index: sample indices}.
        From another thread."""
        return self.engine.withdrawals.ask()

    def now(self) -> RolloutNow:
        """The rows that decode and how full the KV pool is; also while a stream runs."""
        return RolloutNow(self.worker_index, self.engine.rows_now(), *self.engine.pages_now())

    def stats(self) -> dict[str, float]:
        """Figures of the last stream, by metric name."""
        found = {name: float(value) for name, value in asdict(self.engine.stats).items()}
        return found | {"peak_memory_bytes": float(self.memory.peak_bytes())}

    def _header(self, micro_group: list[Completion], evaluation: bool) -> MicroGroupHeader:
        with_stays = not evaluation and micro_group[0].prompt_index in self.config.timeline_prompts
        return MicroGroupHeader.of(
            micro_group,
            self.engine.totals.last_step_at,
            worker=self.worker_index,
            forecasts=[completion.forecast for completion in micro_group],
            stays=[completion.stays for completion in micro_group] if with_stays else [],
            num_waiting=self.engine.num_waiting,
        )

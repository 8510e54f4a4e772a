"""What every sampling engine has in common: the call, its schedule and streaming; who computes the tokens is the
engine's own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from infsample_rl.config.fields import check_temperature
from infsample_rl.config.rollout import PREDICTED_SCHEDULES, RolloutConfig
from infsample_rl.model.generation import stop_ids_of
from infsample_rl.model.weight_sync.sync import Load
from infsample_rl.rollout.engine.call import Request, RolloutStats, StopRule, Totals, Withdrawals
from infsample_rl.rollout.engine.length_source import LengthSource, Watch
from infsample_rl.rollout.engine.sampler import EVALUATION, TRAINING, sample_key
from infsample_rl.rollout.engine.step_loop import StepLoop
from infsample_rl.rollout.engine.stop_strings import StopStrings
from infsample_rl.rollout.engine.turns import Turns
from infsample_rl.rollout.length_prediction.messages import LengthReport
from infsample_rl.rollout.length_prediction.replay import ReplaySettings
from infsample_rl.rollout.schedule.drafter import Drafter
from infsample_rl.rollout.schedule.kv_budget import rows_in
from infsample_rl.rollout.schedule.kv_pool import KVPool, Parking
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy
from infsample_rl.types import Completion, RowNow


class Call(NamedTuple):
    """What one call decodes, and how."""

    groups: list[PromptGroup]
    config: RolloutConfig
    temperature: float
    most_rows: int
    watch: Watch | None  # what predicts lengths and learns them
    turns: Turns | None  # what answers the samples' turns


class RolloutEngine(ABC):
    """Samples groups of completions within a fixed KV pool. One call at a time; a new call ends the one before."""

    vocab_size: int
    context: int | None  # most tokens of a prompt and a response; None: no bound is known
    shared_block = 0  # as GroupSettings.shared_block
    drafter: Drafter | None = None  # of an engine that drafts tokens

    def __init__(
        self,
        config: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        lengths: LengthSource,
        stop_token_ids: set[int] | None,
        generation: GenerationConfig | None,
    ) -> None:
        """`stop_token_ids` None: those of `generation`, the tokenizer and the settings together."""
        self.config, self.tokenizer, self.lengths = config, tokenizer, lengths
        if stop_token_ids is None:
            stop_token_ids = stop_ids_of(generation, tokenizer, config.stop_token_ids)
        self.stop_token_ids, self._stop_strings = stop_token_ids, StopStrings(tokenizer, config.stop_strings)
        self._own_stops = stop_token_ids  # whatever sample_by() adds
        self.policy_version = 0  # stamped on completions
        self.totals, self.stats, self.withdrawals = Totals(), RolloutStats(), Withdrawals()
        self._loop: StepLoop | None = None  # of the last stream

    @property
    @abstractmethod
    def is_exact(self) -> bool:
        """Whether a sample has the same bits under every schedule and in any company."""

    @property
    @abstractmethod
    def num_pages(self) -> int:
        """Pages of the KV pool; 0: not allocated yet."""

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, Tensor]:
        """Names, dtypes and shapes of what load() takes."""

    @property
    @abstractmethod
    def load(self) -> Load:
        """Loads published weights; not while a stream runs."""

    @abstractmethod
    def _allocate(self, prompt_indices: Sequence[int], sizes: Sequence[int]) -> None:
        """Have a pool for prompts of so many tokens. ValueError for one that does not fit beside a full response."""

    @abstractmethod
    def _new_loop(self, call: Call) -> StepLoop:
        """What decodes a call's groups."""

    def sample_by(self, config: RolloutConfig) -> None:
        """Sample as these settings say from the next call on; the pool stays as it is. ValueError for a stop string
        that cannot be."""
        self._stop_strings = StopStrings(self.tokenizer, config.stop_strings)
        self.config, self.stop_token_ids = config, self._own_stops | set(config.stop_token_ids)

    def generate(
        self,
        prompt_ids: list[list[int]],
        seed: int,
        *,
        prompt_indices: list[int] | None = None,
        sample_indices: list[list[int]] | None = None,
        **options: Any,
    ) -> list[list[Completion]]:
        """Completions [prompt][sample], samples in the order asked for (dynamic_slot's extra ones last). Arguments as
        in `stream`."""
        request = Request.of(prompt_ids, prompt_indices, sample_indices, self.config.group_size)
        indices = request.prompt_indices
        if len(set(indices)) != len(indices):
            raise ValueError(f"prompt_indices must differ, got {indices}")
        groups: dict[int, dict[int, Completion]] = {index: {} for index in indices}
        for micro_group in self.stream(
            prompt_ids, seed, prompt_indices=indices, sample_indices=sample_indices, **options
        ):
            groups[micro_group[0].prompt_index] |= {completion.sample_index: completion for completion in micro_group}
        ordered = []
        for found, wanted in zip(groups.values(), request.sample_indices, strict=True):
            extra = sorted(found.keys() - set(wanted))
            ordered.append([found[index] for index in [*wanted, *extra] if index in found])
        return ordered

    def stream(
        self,
        prompt_ids: list[list[int]],
        seed: int,
        *,
        step: int = 0,
        prompt_indices: list[int] | None = None,
        sample_indices: list[list[int]] | None = None,
        evaluation: bool = False,
        temperature: float | None = None,
        pause_every: int | None = None,
        is_halted: Callable[[], bool] | None = None,
        turns: Turns | None = None,
    ) -> Generator[list[Completion], None, None]:
        """Micro-groups of one prompt each, as soon as their samples have ended. Closing the iterator frees all KV.

        prompt_indices: positions in the step's batch (default 0, 1, ...). sample_indices[n]: samples wanted of prompt n
        (default all G). `evaluation` takes other noise, and always token_budget. `temperature` None: the settings'; 0:
        exact argmax. `pause_every`: an empty list comes out after so many running steps, and while all samples are
        away, for a caller that has other work to do in between. `is_halted`: asked before every running step; the
        stream ends where it says yes. `turns`: what a sample's turns are answered by, with schedule=token_budget; None:
        a sample has one.
        """
        config = evaluation_config(self.config) if evaluation else self.config
        request = Request.of(prompt_ids, prompt_indices, sample_indices, config.group_size)
        request.check(self.vocab_size, self.context, config.max_new_tokens, config.schedule)
        temperature = config.temperature if temperature is None else temperature
        check_temperature("temperature", temperature)
        sizes = [len(ids) for ids in prompt_ids]
        if self._loop is not None:
            self._loop.free()
        self._loop = None
        self._allocate(request.prompt_indices, sizes)
        most_rows = rows_in(config, self.num_pages, sizes or [1])
        watch = None if evaluation else self.lengths.watch  # evaluations are not watched
        if watch is not None:
            watch.prepare()
        groups = request.groups(
            GroupSettings(
                config.schedule,
                most_rows,
                config.group_size,
                config.epsilon,
                config.num_prefix_tokens,
                self.shared_block,
            ),
            partial(sample_key, seed, EVALUATION if evaluation else TRAINING, step),
            self.lengths.predict if config.schedule in PREDICTED_SCHEDULES else None,
            predicted_in_rows=self.lengths.waits_for_probe(config),
        )
        loop = self._loop = self._new_loop(Call(groups, config, temperature, most_rows, watch, turns))
        if watch is not None:
            watch.begin(groups, ReplaySettings(config, self.num_pages, loop.planner.parking is not None), step=step)
        self.stats = loop.stats
        return self._run(loop, pause_every, is_halted)

    def pages_now(self) -> tuple[int, int]:
        """Pages of the KV pool, and those that are held at this moment; from another thread, also while a stream
        runs."""
        pool = None if self._loop is None else self._loop.planner.pool
        return self.num_pages, 0 if pool is None else pool.num_pages - pool.num_free

    def unfinished_tokens(self) -> dict[tuple[int, int], list[int]]:
        """{(prompt_index, sample_index): response tokens so far} of the rows that decode; to be asked at a stream's
        pauses."""
        running = [] if self._loop is None else self._loop.planner.running
        return {(sample.group.prompt_index, sample.sample_index): list(sample.tokens) for sample in running}

    def rows_now(self) -> list[RowNow]:
        """The samples that decode at this moment; from another thread as pages_now() is."""
        running = [] if self._loop is None else list(self._loop.planner.running)
        return [
            RowNow(sample.group.prompt_index, sample.sample_index, sample.num_tokens, sample.predicted)
            for sample in running
        ]

    @property
    def num_waiting(self) -> int:
        """Samples of the stream that have not started and that `withdrawals` could give back; to be asked between
        running steps."""
        return 0 if self._loop is None else self._loop.planner.num_waiting

    def rest(self) -> None:
        """Give the memory of weights and KV back until load(), where a learner waits for it. Not while a stream
        runs."""
        raise RuntimeError(f"{type(self).__name__} does not take turns with a learner")

    def close(self) -> None:
        """End what it has started, for good."""
        if self._loop is not None:
            self._loop.free()

    def begin_version(self, version: int) -> None:
        """Sample as policy `version` from now on: its weights have arrived."""
        self.policy_version = version

    def learn(self) -> LengthReport:
        """What the length probe has seen since the last time, for the run it belongs to. Only where there is one, not
        while a stream runs."""
        return self.lengths.watch.report()

    def _new_planner(self, call: Call, parking: Parking | None, *, parks: bool) -> StepPlanner:
        """`parking`: where KV that gives way goes; `parks`: it is copied back from there, not computed again."""
        config = call.config
        by_budget = config.schedule == "token_budget"
        return StepPlanner(
            call.groups,
            KVPool(self.num_pages, config.page_size),
            num_slots=call.most_rows,
            prompts_at_once=config.most_prompts,
            max_new_tokens=config.max_new_tokens,
            policy=TokenBudgetPolicy(config.page_size, config.max_new_tokens, parks=parks) if by_budget else None,
            parking=parking,
        )

    def _stop_rule(self, config: RolloutConfig) -> StopRule:
        ends_text = self._stop_strings.ends if config.stop_strings else None
        return StopRule(config.max_new_tokens, self.stop_token_ids, ends_text)

    def _run(
        self, loop: StepLoop, pause_every: int | None, is_halted: Callable[[], bool] | None
    ) -> Generator[list[Completion], None, None]:
        planner, totals, paused_at = loop.planner, self.totals, 0
        try:
            self.withdrawals.is_open, is_done = True, planner.is_done
            while not is_done:
                if self._loop is not loop:
                    raise RuntimeError("this stream was ended by a later call of the same engine")
                if is_halted is not None and is_halted():
                    return
                self.withdrawals.answer(planner)
                seconds_before = self.lengths.seconds_spent
                steps_before = planner.running_steps
                micro_groups = loop.step()
                loop.stats.predict_seconds += self.lengths.seconds_spent - seconds_before
                totals.last_step_at = time.time()
                totals.running_steps += planner.running_steps - steps_before
                is_done, is_idle = planner.is_done, planner.running_steps == steps_before
                yield from micro_groups
                steps = loop.stats.running_steps
                if pause_every is not None and not is_done and (is_idle or steps - paused_at >= pause_every):
                    paused_at = steps
                    yield []
        finally:
            if self._loop is loop:  # else a later call has freed it, whose KV this may not touch
                loop.free()
                self.withdrawals.is_open = False


def evaluation_config(config: RolloutConfig) -> RolloutConfig:
    """For few samples of many prompts: rows go to whatever prompt has work, and no order may favour short samples."""
    return replace(config, schedule="token_budget", predictor="none", prefix_tokens=0, prompts_at_once="auto")

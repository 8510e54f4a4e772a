"""The sampling engine: G completions of every prompt through a KV pool of a fixed number of pages, streamed as
micro-groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infsample_rl.config.fields import check_temperature
from infsample_rl.config.rollout import MOST_QUERIES, PREDICTED_SCHEDULES, RolloutConfig
from infsample_rl.model.generation import stop_ids_of
from infsample_rl.rollout.engine.call import MicroGroups, Request, RolloutStats, StopRule, Totals, Withdrawals
from infsample_rl.rollout.engine.decode_loop import DecodeLoop, DecodeStep
from infsample_rl.rollout.engine.engine_pool import EnginePool
from infsample_rl.rollout.engine.length_source import LengthSource
from infsample_rl.rollout.engine.model_runner import ModelRunner
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.engine.sampler import EVALUATION, TRAINING, Sampler, sample_key
from infsample_rl.rollout.engine.speculation import speculation_of
from infsample_rl.rollout.engine.stop_strings import StopStrings
from infsample_rl.rollout.length_prediction.bert_watch import BertWatch
from infsample_rl.rollout.length_prediction.messages import LengthReport
from infsample_rl.rollout.length_prediction.replay import ReplaySettings
from infsample_rl.rollout.length_prediction.watch import ProbeWatch
from infsample_rl.rollout.schedule.kv_budget import rows_in
from infsample_rl.rollout.schedule.kv_pool import KVPool
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy
from infsample_rl.types import Completion, RowNow


class SamplingEngine:
    """Samples groups of completions within a fixed KV pool. One call at a time; a new call ends the one before."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rollout_config: RolloutConfig,
        *,
        stop_token_ids: set[int] | None = None,
        max_prompt_tokens: int | None = None,
        lm_head_fp32: bool = False,
        shared_probe: bool = False,
        reserved_bytes: int = 0,
        sharers: int = 1,
    ) -> None:
        """`stop_token_ids` None: those of the model's generation config, the tokenizer and the settings together.

        `max_prompt_tokens`: longest prompt to come; None: with the default KV budget,
        and with auto, the pool is allocated at the first call, and again at a longer prompt. `shared_probe`: the length
        probe belongs to a run: it predicts with what `lengths.watch.load` brings, and `learn` hands over what it saw;
        else it learns from each call for the next. Of a pool that takes what is free, `reserved_bytes`: what it leaves
        to others in this process; `sharers`: engines of other processes on the CPU and this one. ValueError for what
        cannot work.
        """
        self.config, self.tokenizer = rollout_config, tokenizer
        self.runner = ModelRunner(model.eval(), lm_head_fp32=lm_head_fp32, kv_dtype=rollout_config.kv_dtype)
        if len(tokenizer) > self.runner.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens, more than the model's vocabulary of "
                f"{self.runner.vocab_size}: give this model's tokenizer"
            )
        if stop_token_ids is None:
            stop_token_ids = stop_ids_of(model.generation_config, tokenizer, rollout_config.stop_token_ids)
        self.stop_token_ids, self._stop_strings = stop_token_ids, StopStrings(tokenizer, rollout_config.stop_strings)
        self.lengths = LengthSource(rollout_config, self.runner, tokenizer, shared=shared_probe)
        self.pool = EnginePool(
            rollout_config,
            self.runner,
            max_prompt_tokens=max_prompt_tokens,
            reserved_bytes=reserved_bytes,
            sharers=sharers,
        )
        self.policy_version = 0  # stamped on completions
        self.totals, self.stats, self.withdrawals = Totals(), RolloutStats(), Withdrawals()
        self._speculation = speculation_of(rollout_config, self.runner)
        self._loop: DecodeLoop | None = None  # of the last stream

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
    ) -> Generator[list[Completion], None, None]:
        """Micro-groups of one prompt each, as soon as their samples have ended. Closing the iterator frees all KV.

        prompt_indices: positions in the step's batch (default 0, 1, ...). sample_indices[n]: samples wanted of prompt n
        (default all G). `evaluation` takes other noise, and always token_budget. `temperature` None: the settings'; 0:
        exact argmax. `pause_every`: an empty list comes out after so many running steps, for a caller that has other
        work to do in between. `is_halted`: asked before every running step; the stream ends where it says yes.
        """
        config = _plain(self.config) if evaluation else self.config
        request = Request.of(prompt_ids, prompt_indices, sample_indices, config.group_size)
        request.check(self.runner, config.max_new_tokens, config.schedule)
        sizes = [len(ids) for ids in prompt_ids]
        for index, size in zip(request.prompt_indices, sizes, strict=True):
            self.pool.check(index, size)
        sampler = self._new_sampler(temperature)
        if self._loop is not None:
            self._loop.free()
        self._loop = None
        self.pool.allocate(sizes)
        most_rows = rows_in(config, self.runner.kv.num_pages, sizes or [1])
        if self.lengths.watch is not None and not evaluation:
            self.lengths.watch.prepare()
        groups = request.groups(
            GroupSettings(config.schedule, most_rows, config.group_size, config.epsilon, config.num_prefix_tokens),
            partial(sample_key, seed, EVALUATION if evaluation else TRAINING, step),
            self.lengths.predict if config.schedule in PREDICTED_SCHEDULES else None,
            predicted_in_rows=self.lengths.waits_for_probe(config),
        )
        planner = self._new_planner(groups, config, most_rows)
        watch = None if evaluation else self.lengths.watch  # evaluations are not watched
        if watch is not None:
            pages, parks = self.runner.kv.num_pages, planner.parking is not None
            watch.begin(groups, ReplaySettings(config, pages, parks), step=step)
        self._loop = self._new_loop(planner, config, sampler, max(sizes, default=1), watch)
        self.stats = self._loop.stats
        return self._run(self._loop, pause_every, is_halted)

    def pages_now(self) -> tuple[int, int]:
        """Pages of the KV pool, and those that are held at this moment; from another thread, also while a stream
        runs."""
        kv, pool = self.runner.kv, None if self._loop is None else self._loop.planner.pool
        return 0 if kv is None else kv.num_pages, 0 if pool is None else pool.num_pages - pool.num_free

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

    def learn(self) -> LengthReport:
        """What the length probe has seen since the last time, for the run it belongs to. Only where there is one, not
        while a stream runs."""
        before = self.lengths.seconds_spent
        report = self.lengths.watch.report()
        self.stats.predict_seconds += self.lengths.seconds_spent - before
        return report

    def _run(
        self, loop: DecodeLoop, pause_every: int | None, is_halted: Callable[[], bool] | None
    ) -> Generator[list[Completion], None, None]:
        planner, totals, paused_at = loop.planner, self.totals, 0
        try:
            self.withdrawals.is_open, is_done = True, loop.is_done
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
                is_done = loop.is_done
                yield from micro_groups
                if pause_every is not None and loop.stats.running_steps - paused_at >= pause_every and not is_done:
                    paused_at = loop.stats.running_steps
                    yield []
        finally:
            loop.free()
            if self._loop is loop:
                self.withdrawals.is_open = False

    def _new_planner(self, groups: list[PromptGroup], config: RolloutConfig, most_rows: int) -> StepPlanner:
        policy = parking = None
        if config.schedule == "token_budget":
            parking = self.pool.open_parking()
            policy = TokenBudgetPolicy(config.page_size, config.max_new_tokens, parks=parking is not None)
        return StepPlanner(
            groups,
            KVPool(self.runner.kv.num_pages, config.page_size),
            num_slots=most_rows,
            prompts_at_once=config.most_prompts,
            max_new_tokens=config.max_new_tokens,
            policy=policy,
            parking=parking,
        )

    def _new_loop(
        self,
        planner: StepPlanner,
        config: RolloutConfig,
        sampler: Sampler,
        longest: int,
        watch: ProbeWatch | BertWatch | None,
    ) -> DecodeLoop:
        """The tensors of one call, whose prompts have up to `longest` tokens."""
        runner, page_size, groups, most_rows = self.runner, config.page_size, list(planner.waiting), planner.num_slots
        prompts = min(config.most_prompts, most_rows, max(len(groups), 1))
        pages = -(-config.max_new_tokens // page_size), -(-longest // page_size)
        # rows, or rows and the tokens drafted after them
        most = most_rows if self._speculation is None else max(most_rows, MOST_QUERIES)
        batch = RowBatch(most, pages[0], prompts, pages[1], runner.kv.scratch_page, runner.device)
        ends_text = self._stop_strings.ends if config.stop_strings else None
        return DecodeLoop(
            planner,
            DecodeStep(runner, batch, sampler, self.pool.graphs.take(batch, sampler)),
            StopRule(config.max_new_tokens, self.stop_token_ids, ends_text),
            MicroGroups(groups, config.micro_group, self.policy_version, truncates=sampler.truncates),
            run_ahead=runner.device.type == "cuda",
            watch=watch,
            speculation=self._speculation if config.speculates else None,
        )

    def _new_sampler(self, temperature: float | None) -> Sampler:
        config = self.config
        temperature = config.temperature if temperature is None else temperature
        check_temperature("temperature", temperature)
        return Sampler(
            self.runner.vocab_size,
            len(self.tokenizer),  # ids from here on are padding of the model's head, never sampled
            temperature=temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            bad_token_ids=config.bad_token_ids,
            device=self.runner.device,
        )


def _plain(config: RolloutConfig) -> RolloutConfig:
    """For few samples of many prompts: rows go to whatever prompt has work, and no order may favour short samples."""
    return replace(config, schedule="token_budget", predictor="none", prefix_tokens=0, prompts_at_once="auto")

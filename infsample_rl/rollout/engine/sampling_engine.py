"""The sampling engine: G completions of every prompt through a KV pool of a fixed number of pages, streamed as
micro-groups."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infsample_rl.config.fields import check_temperature
from infsample_rl.config.rollout import PREDICTED_SCHEDULES, RolloutConfig
from infsample_rl.model.loading import last_hidden_size
from infsample_rl.model.loading import stop_token_ids as model_stop_token_ids
from infsample_rl.rollout.engine.decode_loop import DecodeLoop, RolloutStats
from infsample_rl.rollout.engine.kv_cache import PagedKV, free_bytes
from infsample_rl.rollout.engine.model_runner import ModelRunner
from infsample_rl.rollout.engine.parked_kv import ParkedKV, check_parking, open_parking
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.engine.sampler import EVALUATION, TRAINING, Sampler, sample_key
from infsample_rl.rollout.engine.stop_strings import StopStrings
from infsample_rl.rollout.length_prediction.bert import BertLengthPredictor
from infsample_rl.rollout.length_prediction.replay import ReplaySettings
from infsample_rl.rollout.length_prediction.watch import ProbeWatch
from infsample_rl.rollout.schedule.kv_budget import check_pages, num_pool_pages
from infsample_rl.rollout.schedule.kv_pool import KVPool
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, Predict, PromptGroup
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy
from infsample_rl.types import Completion, ProbeReport, RowNow


class SamplingEngine:
    """Samples groups of completions within a fixed KV pool. One call at a time; a new call ends the one before."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rollout_config: RolloutConfig,
        *,
        stop_token_ids: set[int] | None = None,
        deterministic: bool = False,
        max_prompt_tokens: int | None = None,
        lm_head_fp32: bool = False,
        shared_probe: bool = False,
        reserved_bytes: int = 0,
    ) -> None:
        """`stop_token_ids` None: those of the model's generation config, the tokenizer and the settings together.

        `deterministic`: bitwise the same results whatever else runs, at the price of always computing every row, and of
        room for a full response of each. `max_prompt_tokens`: longest prompt to come; None: with the default KV budget,
        and with auto, the pool is allocated at the first call, and again at a longer prompt. `shared_probe`: the length
        probe belongs to a run: it predicts with what `watch.load` brings, and `learn` hands over what it saw; else it
        learns from each call for the next. `reserved_bytes`: of the free memory, what rollout.kv_budget_bytes=auto
        leaves to others in this process. ValueError for what cannot work.
        """
        self.config = rollout_config
        self.tokenizer = tokenizer
        self.valid_vocab = len(tokenizer)  # ids from here on are padding of the model's head, never sampled
        self.runner = ModelRunner(
            model.eval(), deterministic=deterministic, lm_head_fp32=lm_head_fp32, kv_dtype=rollout_config.kv_dtype
        )
        self.vocab_size = self.runner.shape.vocab_size
        if self.valid_vocab > self.vocab_size:
            raise ValueError(
                f"the tokenizer has {self.valid_vocab} tokens, more than the model's vocabulary of {self.vocab_size}: "
                "give this model's tokenizer"
            )
        self.stop_token_ids = (
            model_stop_token_ids(model, tokenizer, rollout_config.stop_token_ids)
            if stop_token_ids is None
            else stop_token_ids
        )
        self._stop_strings = StopStrings(tokenizer, rollout_config.stop_strings)
        self.deterministic, self._max_prompt_tokens, self._reserved_bytes = (
            deterministic,
            max_prompt_tokens,
            reserved_bytes,
        )
        self.policy_version = 0  # stamped on completions
        self.heartbeat = 0  # running steps since construction
        self.sampled_tokens = self.preemptions = 0  # since construction
        self.last_step_at = 0.0  # time.time() of the last running step: when what a stream just yielded ended
        self.stats = RolloutStats()
        self._bert: BertLengthPredictor | None = None
        self._predictor = self._load_predictor()
        self.watch: ProbeWatch | None = None
        if rollout_config.probes and not deterministic:
            self.watch = ProbeWatch(last_hidden_size(model.config), rollout_config, shared=shared_probe)
        self._loop: DecodeLoop | None = None  # of the last stream
        check_parking(rollout_config, self.runner.device)
        # where preempted samples' KV waits, once a schedule that preempts has run; else computed again
        self.parking: ParkedKV | None = None
        self._pool_parked_beside: PagedKV | None = None  # the pool beside which that is
        self._streaming = False
        self._asked_back: deque[Future[dict[int, list[int]]]] = deque()
        # of a size that no prompt changes; else it grows with the longest so far
        self._pool_is_fixed = rollout_config.has_budget and (
            rollout_config.kv_budget_bytes != "auto" or max_prompt_tokens is not None
        )
        if max_prompt_tokens is not None or self._pool_is_fixed:
            self._allocate([max_prompt_tokens or 1] * rollout_config.prompts_at_once)
        # Few samples of many prompts: rows go to whatever prompt has work, and no order may favour short samples.
        plain = {
            "schedule": "token_budget",
            "predictor": "none",
            "prefix_tokens": 0,
            "prompts_at_once": rollout_config.most_rows,
        }
        self._evaluation_config = replace(rollout_config, **plain)
        if rollout_config.schedule == "dynamic_slot":
            warnings.warn(
                "rollout.schedule=dynamic_slot keeps the first samples to finish and so favours short ones",
                stacklevel=2,
            )

    def generate(
        self,
        prompt_ids: list[list[int]],
        seed: int,
        *,
        step: int = 0,
        prompt_indices: list[int] | None = None,
        sample_indices: list[list[int]] | None = None,
        evaluation: bool = False,
        temperature: float | None = None,
    ) -> list[list[Completion]]:
        """Completions [prompt][sample], samples in the order asked for (dynamic_slot's extra ones last). Arguments as
        in `stream`."""
        indices = list(range(len(prompt_ids))) if prompt_indices is None else list(prompt_indices)
        if len(set(indices)) != len(indices):
            raise ValueError(f"prompt_indices must differ, got {indices}")
        options = {
            "step": step,
            "prompt_indices": indices,
            "sample_indices": sample_indices,
            "evaluation": evaluation,
            "temperature": temperature,
        }
        groups: dict[int, dict[int, Completion]] = {index: {} for index in indices}
        for micro_group in self.stream(prompt_ids, seed, **options):
            groups[micro_group[0].prompt_index] |= {completion.sample_index: completion for completion in micro_group}
        asked = [range(self.config.group_size)] * len(indices) if sample_indices is None else sample_indices
        ordered = []
        for found, wanted in zip(groups.values(), asked, strict=True):
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
    ) -> Iterator[list[Completion]]:
        """Micro-groups of one prompt each, as soon as their samples have ended. Closing the iterator frees all KV.

        prompt_indices: positions in the step's batch (default 0, 1, ...). sample_indices[n]: samples wanted of prompt n
        (default all G). `evaluation` takes other noise, and always token_budget. `temperature` None: the settings'; 0:
        exact argmax. `pause_every`: an empty list comes out after so many running steps, for a caller that has other
        work to do in between. `is_halted`: asked before every running step; the stream ends where it says yes.
        """
        prompt_indices = list(range(len(prompt_ids))) if prompt_indices is None else list(prompt_indices)
        if sample_indices is None:
            sample_indices = [list(range(self.config.group_size)) for _ in prompt_ids]
        config = self._evaluation_config if evaluation else self.config
        self._check_request(prompt_ids, prompt_indices, sample_indices, config.schedule)
        self._loop = None if self._loop is None else self._loop.free()
        self._allocate([len(ids) for ids in prompt_ids])
        domain = EVALUATION if evaluation else TRAINING
        longest = (
            max([self._max_prompt_tokens or 1, *map(len, prompt_ids)])
            if self.deterministic
            else max(map(len, prompt_ids), default=1)
        )
        most_rows = self._most_rows(config, longest)
        slots = min(config.num_slots, most_rows)
        settings = GroupSettings(config.schedule, slots, config.group_size, config.epsilon, config.num_prefix_tokens)
        if self.watch is not None and not evaluation:
            self.watch.prepare()
        predict = {"predict": self._predictor_of(config), "predicted_in_rows": self._waits_for_probe(config)}
        groups = [
            PromptGroup(
                index, list(ids), list(asked), settings, partial(sample_key, seed, domain, step, index), **predict
            )
            for index, ids, asked in zip(prompt_indices, prompt_ids, sample_indices, strict=True)
            if len(asked) > 0
        ]
        self._loop = self._new_loop(groups, config, self._new_sampler(temperature), most_rows, longest, step)
        self.stats = self._loop.stats
        return self._run(self._loop, pause_every, is_halted)

    def statistics(self) -> dict[str, float]:
        """What the pool and the rows are at this moment, and sums since construction; may be asked from another thread
        while a stream runs."""
        loop, kv = self._loop, self.runner.kv
        pool = None if loop is None else loop.planner.pool
        return {
            "kv_pages": 0 if kv is None else kv.num_pages,
            "kv_pages_used": 0 if pool is None else pool.num_pages - pool.num_free,
            "rows": 0 if loop is None else len(loop.planner.running),
            "running_steps": self.heartbeat,
            "sampled_tokens": self.sampled_tokens,
            "preemptions": self.preemptions,
        }

    def unfinished_tokens(self) -> dict[tuple[int, int], list[int]]:
        """{(prompt_index, sample_index): response tokens so far} of the rows that decode; to be asked at a stream's
        pauses."""
        running = [] if self._loop is None else self._loop.planner.running
        return {(sample.group.prompt_index, sample.sample_index): list(sample.tokens) for sample in running}

    def rows_now(self) -> list[RowNow]:
        """The samples that decode at this moment; from another thread as statistics() is."""
        running = [] if self._loop is None else list(self._loop.planner.running)
        return [
            RowNow(sample.group.prompt_index, sample.sample_index, sample.num_tokens, sample.predicted)
            for sample in running
        ]

    @property
    def num_waiting(self) -> int:
        """Samples of the stream that have not started and that give_back() could hand over; to be asked between running
        steps."""
        return 0 if self._loop is None else self._loop.planner.num_waiting

    def give_back(self) -> dict[int, list[int]]:
        """From another thread: half of the samples of the stream that have not started, which it leaves out.
        {prompt_index: sample indices}."""
        asked: Future[dict[int, list[int]]] = Future()
        self._asked_back.append(asked)
        while True:
            try:
                return asked.result(timeout=0.1)
            except TimeoutError:
                if not self._streaming and asked.cancel():  # no stream runs that could answer
                    return {}

    def learn(self) -> ProbeReport:
        """What the length probe has seen since the last time, for the run it belongs to. Only where there is one, not
        while a stream runs."""
        before = self.watch.seconds_spent
        report = self.watch.report()
        self.stats.predict_seconds += self.watch.seconds_spent - before
        return report

    def _run(
        self, loop: DecodeLoop, pause_every: int | None, is_halted: Callable[[], bool] | None
    ) -> Iterator[list[Completion]]:
        try:
            self._streaming, is_done, paused_at = True, loop.is_done, 0
            while not is_done:
                if self._loop is not loop:
                    raise RuntimeError("this stream was ended by a later call of the same engine")
                if is_halted is not None and is_halted():
                    return
                self._answer_asked_back(loop)
                planner, seconds_before = loop.planner, self._predict_seconds()
                before = planner.running_steps, planner.num_tokens, planner.num_preemptions
                micro_groups = loop.step()
                loop.stats.predict_seconds += self._predict_seconds() - seconds_before
                self.last_step_at = time.time()
                self.heartbeat += planner.running_steps - before[0]
                self.sampled_tokens += planner.num_tokens - before[1]
                self.preemptions += planner.num_preemptions - before[2]
                is_done = loop.is_done
                yield from micro_groups
                if pause_every is not None and loop.stats.running_steps - paused_at >= pause_every and not is_done:
                    paused_at = loop.stats.running_steps
                    yield []
        finally:
            loop.free()
            if self._loop is loop:
                self._streaming = False

    def _answer_asked_back(self, loop: DecodeLoop) -> None:
        while self._asked_back:
            asked = self._asked_back.popleft()
            if asked.set_running_or_notify_cancel():
                asked.set_result(loop.planner.give_back())

    def _most_rows(self, config: RolloutConfig, longest: int) -> int:
        """Rows that may decode at a time, prompts having up to `longest` tokens."""
        pages, page_size = self.runner.kv.num_pages, config.page_size
        most_rows = min(config.most_rows, pages)  # a row has a page from its second token on
        if self.deterministic:  # a full response of every row fits: none is preempted
            most_rows = max(
                1, min(most_rows, (pages - -(-longest // page_size)) // -(-config.max_new_tokens // page_size))
            )
        return most_rows

    def _new_loop(
        self,
        groups: list[PromptGroup],
        config: RolloutConfig,
        sampler: Sampler,
        most_rows: int,
        longest: int,
        step: int,
    ) -> DecodeLoop:
        """The planner and the tensors of one call, whose prompts have up to `longest` tokens."""
        kv, page_size, policy, parking = self.runner.kv, config.page_size, None, None
        response_pages = -(-config.max_new_tokens // page_size)
        prompts = min(config.prompts_at_once, max(len(groups), 1))
        if self.deterministic:  # the same shapes whatever part of a step is asked for
            prompts = config.prompts_at_once
        elif config.schedule == "token_budget":
            parking = self._parking_beside_pool()
            policy = TokenBudgetPolicy(page_size, config.max_new_tokens, parks=parking is not None)
        planner = StepPlanner(
            groups,
            KVPool(kv.num_pages, page_size),
            num_slots=most_rows,
            prompts_at_once=config.prompts_at_once,
            max_new_tokens=config.max_new_tokens,
            policy=policy,
            parking=parking,
        )
        watch = self.watch if config.probes else None  # evaluations are not watched
        if watch is not None:
            watch.begin(groups, ReplaySettings.of(config, kv.num_pages, parks=planner.parking is not None), step=step)
        batch = RowBatch(
            most_rows, response_pages, prompts, -(-longest // page_size), kv.scratch_page, self.runner.device
        )
        return DecodeLoop(
            self.runner,
            planner,
            batch,
            sampler,
            max_new_tokens=config.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
            ends_text=self._stop_strings.ends if config.stop_strings else None,
            micro_group_size=config.micro_group,
            policy_version=self.policy_version,
            fixed_rows=most_rows if self.deterministic else None,
            run_ahead=self.runner.device.type == "cuda",
            watch=watch,
        )

    def _allocate(self, prompts: list[int]) -> None:
        """Allocate the pool for prompts of so many tokens, if the one there is does not do."""
        config, runner = self.config, self.runner
        if runner.kv is not None and self._pool_is_fixed:
            return
        page_bytes, free = runner.page_bytes(config.page_size), None
        if config.kv_budget_bytes == "auto":
            # of the pool that a larger one replaces
            held = 0 if runner.kv is None else runner.kv.num_pages * page_bytes
            free = max(0, free_bytes(runner.device) + held - self._reserved_bytes)
        pages = num_pool_pages(config, page_bytes=page_bytes, prompts=prompts or [1], free_bytes=free)
        if runner.kv is None or pages > runner.kv.num_pages:
            runner.allocate(pages, config.page_size)

    def _parking_beside_pool(self) -> ParkedKV | None:
        """Where preempted samples' KV waits, made when a schedule that preempts first finds this pool."""
        kv = self.runner.kv
        if self._pool_parked_beside is not kv:
            self.parking, self._pool_parked_beside = open_parking(self.config, kv), kv
        return self.parking

    def _waits_for_probe(self, config: RolloutConfig) -> bool:
        """Whether samples decode a prefix and wait for the probe. Not before it has learnt, nor while it is of no
        use."""
        return config.probes and config.num_prefix_tokens > 0 and self.watch is not None and self.watch.is_used

    def _predict_seconds(self) -> float:
        return sum(predictor.seconds_spent for predictor in (self.watch, self._bert) if predictor is not None)

    def _predictor_of(self, config: RolloutConfig) -> Predict | None:
        return self._predictor if config.schedule in PREDICTED_SCHEDULES else None

    def _new_sampler(self, temperature: float | None) -> Sampler:
        config = self.config
        temperature = config.temperature if temperature is None else temperature
        check_temperature("temperature", temperature)
        options = {
            "top_p": config.top_p,
            "top_k": config.top_k,
            "min_p": config.min_p,
            "bad_token_ids": config.bad_token_ids,
        }
        return Sampler(self.vocab_size, self.valid_vocab, temperature=temperature, device=self.runner.device, **options)

    def _check_request(
        self, prompt_ids: list[list[int]], prompt_indices: list[int], sample_indices: list[list[int]], schedule: str
    ) -> None:
        if not len(prompt_ids) == len(prompt_indices) == len(sample_indices):
            lengths = f"{len(prompt_ids)}, {len(prompt_indices)} and {len(sample_indices)}"
            raise ValueError(f"prompt_ids, prompt_indices and sample_indices must be equally long, got {lengths}")
        context, kv = self.runner.shape.context, self.runner.kv
        for index, ids, asked in zip(prompt_indices, prompt_ids, sample_indices, strict=True):
            if len(ids) == 0:
                raise ValueError(f"prompt {index} is empty; give at least one token")
            if not (0 <= min(ids) and max(ids) < self.vocab_size):
                outside = min(ids) if min(ids) < 0 else max(ids)
                raise ValueError(
                    f"prompt {index} has token {outside}, outside the model's vocabulary of {self.vocab_size}"
                )
            if context is not None and len(ids) + self.config.max_new_tokens > context:
                raise ValueError(
                    f"prompt {index} of {len(ids)} tokens + rollout.max_new_tokens = {self.config.max_new_tokens} is "
                    "above the model's context "
                    f"of {context}; the nearest that works is max_new_tokens={context - len(ids)}"
                )
            if self._pool_is_fixed:
                page_bytes = self.runner.page_bytes(self.config.page_size)
                check_pages(kv.num_pages, self.config, len(ids), f"prompt {index}", page_bytes=page_bytes)
            if len(set(asked)) != len(asked):
                raise ValueError(f"sample_indices of prompt {index} must differ, got {list(asked)}")
            if schedule == "dynamic_slot" and list(asked) != list(
                range(asked[0], asked[0] + len(asked)) if len(asked) else []
            ):
                raise ValueError(
                    f"sample_indices of prompt {index} must be contiguous with schedule=dynamic_slot, got {list(asked)}"
                )

    def _load_predictor(self) -> Predict | None:
        if self.config.schedule not in PREDICTED_SCHEDULES or self.config.predictor == "probe":
            return None
        if self.config.predictor == "none":
            schedule = self.config.schedule
            warnings.warn(
                f"rollout.schedule={schedule} without a predictor takes all lengths as equal; set "
                "rollout.predictor=probe",
                stacklevel=3,
            )
            return None
        if self.config.predictor_path is None:
            warnings.warn(
                "rollout.predictor=bert without rollout.predictor_path predicts all lengths equal; give the folder of "
                "a trained sequence classifier",
                stacklevel=3,
            )
            return lambda prompt_ids, prefixes: [1.0] * len(prefixes)
        bert = self._bert = BertLengthPredictor(self.config.predictor_path, self.runner.device)
        decode = self.tokenizer.decode
        return lambda prompt_ids, prefixes: bert.predict(decode(prompt_ids), [decode(prefix) for prefix in prefixes])

"""The engine of this package: its own decode steps over a paged KV pool, as fast as its kernels allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infsample_rl.config.rollout import MOST_QUERIES, RolloutConfig
from infsample_rl.model.architecture import last_hidden_size
from infsample_rl.model.lora import ReceivedAdapters
from infsample_rl.model.weight_sync.buckets import unpack_buckets
from infsample_rl.model.weight_sync.sync import Load
from infsample_rl.rollout.engine.call import MicroGroups
from infsample_rl.rollout.engine.decode_loop import DecodeLoop
from infsample_rl.rollout.engine.decode_step import DecodeStep
from infsample_rl.rollout.engine.engine_pool import EnginePool
from infsample_rl.rollout.engine.length_source import LengthSource
from infsample_rl.rollout.engine.model_runner import ModelRunner
from infsample_rl.rollout.engine.rollout_engine import Call, RolloutEngine
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.engine.sampler import Sampler
from infsample_rl.rollout.engine.speculation import speculation_of
from infsample_rl.rollout.schedule.kv_budget import rows_in


class SamplingEngine(RolloutEngine):
    """Samples with a transformers model, in this process."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rollout_config: RolloutConfig,
        *,
        stop_token_ids: set[int] | None = None,
        max_prompt_tokens: int | None = None,
        doubles: bool = False,
        lm_head_fp32: bool = False,
        shared_probe: bool = False,
        reserved_bytes: int = 0,
        sharers: int = 1,
        gpu_part: float = 1.0,
        adapters: ReceivedAdapters | None = None,
        exact: bool = False,
    ) -> None:
        """`exact`: as ModelRunner's. `adapters`: what is published, merged into the model at every version.
        `stop_token_ids` None: those of the model's generation config, the tokenizer and the settings together.

        `max_prompt_tokens`: longest prompt to come; None: with the default KV budget, and with auto, the pool is
        allocated at the first call, and again at a longer prompt; `doubles`: then for longer ones to come too, where
        memory allows, since captured steps go with a pool. `shared_probe`: the length probe belongs to a run: it
        predicts with what `lengths.watch.load` brings, and `learn` hands over what it saw; else it learns from each
        call for the next. Of a pool that takes what is free, `reserved_bytes`: what it leaves to others in this
        process; `gpu_part`: of the GPU's memory, what is this process's. `sharers`: this engine and those of other
        processes that share host memory. ValueError for what cannot work.
        """
        self._adapters = adapters
        kv_dtype = rollout_config.kv_dtype
        self.runner = ModelRunner(model.eval(), lm_head_fp32=lm_head_fp32, kv_dtype=kv_dtype, exact=exact)
        if len(tokenizer) > self.runner.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens, more than the model's vocabulary of "
                f"{self.runner.vocab_size}: give this model's tokenizer"
            )
        hidden_size = last_hidden_size(model.config)
        lengths = LengthSource(rollout_config, tokenizer, self.runner.device, hidden_size, shared=shared_probe)
        super().__init__(rollout_config, tokenizer, lengths, stop_token_ids, model.generation_config)
        self.vocab_size, self.context = self.runner.vocab_size, self.runner.context
        self._max_new_tokens = rollout_config.max_new_tokens  # of which sample_by() may allow fewer
        self.pool = EnginePool(
            rollout_config,
            self.runner,
            max_prompt_tokens=max_prompt_tokens,
            doubles=doubles,
            reserved_bytes=reserved_bytes,
            sharers=sharers,
            gpu_part=gpu_part,
        )
        self._speculation = speculation_of(rollout_config, self.runner)
        self.drafter = None if self._speculation is None else self._speculation.drafter

    @property
    def is_exact(self) -> bool:
        return self.runner.is_exact

    @property
    def num_pages(self) -> int:
        return 0 if self.runner.kv is None else self.runner.kv.num_pages

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return dict(self.runner.model.named_parameters()) if self._adapters is None else self._adapters.received

    def begin_version(self, version: int) -> None:
        if self._adapters is not None:
            self._adapters.merge()
        super().begin_version(version)

    @property
    def load(self) -> Load:
        return unpack_buckets

    def _allocate(self, prompt_indices: Sequence[int], sizes: Sequence[int]) -> None:
        for index, size in zip(prompt_indices, sizes, strict=True):
            self.pool.check(index, size)
        self.pool.allocate(sizes)

    def _new_loop(self, call: Call) -> DecodeLoop:
        groups, config, temperature, most_rows, watch, turns = call
        runner, page_size = self.runner, config.page_size
        sampler = self._new_sampler(temperature)
        parking = self.pool.open_parking() if config.schedule == "token_budget" else None
        prompts = min(config.most_prompts, most_rows, max(len(groups), 1))
        # The most of any call, so that graphs stay.
        most_tokens = max(self._max_new_tokens, config.max_new_tokens), self.pool.longest_prompt
        pages = [-(-tokens // page_size) for tokens in most_tokens]
        most = rows_in(config, self.num_pages, [1])  # which shorter prompts may leave room for
        if self._speculation is not None:
            most = max(most, MOST_QUERIES)  # rows and the tokens drafted after them
        batch = RowBatch(most, pages[0], prompts, pages[1], runner.kv.scratch_page, runner.device)
        return DecodeLoop(
            self._new_planner(call, parking, parks=parking is not None),
            DecodeStep(runner, batch, sampler, self.pool.graphs),
            self._stop_rule(config),
            MicroGroups(groups, config.micro_group, self.policy_version, truncates=sampler.truncates),
            run_ahead=runner.device.type == "cuda",
            watch=watch,
            speculation=self._speculation if config.speculates else None,
            turns=turns,
        )

    def _new_sampler(self, temperature: float) -> Sampler:
        config = self.config
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

"""The KV pool of an engine: how large it is, and what is made anew with it: captured steps and parked KV."""

from __future__ import annotations

from collections.abc import Sequence

from infsample_rl.config.rollout import RolloutConfig
from infsample_rl.rollout.engine.graph_cache import GraphCache
from infsample_rl.rollout.engine.kv_cache import PagedKV, free_bytes, total_bytes
from infsample_rl.rollout.engine.model_runner import ModelRunner
from infsample_rl.rollout.engine.parked_kv import ParkedKV, check_parking, open_parking
from infsample_rl.rollout.schedule.kv_budget import check_pages, check_total, free_for_pool, num_pool_pages


class EnginePool:
    """Allocates the runner's pool within the budget of the settings."""

    def __init__(
        self,
        config: RolloutConfig,
        runner: ModelRunner,
        *,
        max_prompt_tokens: int | None,
        doubles: bool,
        reserved_bytes: int,
        sharers: int,
        gpu_part: float,
    ) -> None:
        """As SamplingEngine's. ValueError for a budget that is too small, and where KV cannot be parked as asked."""
        check_parking(config, runner.device)
        self._config, self._runner = config, runner
        self._reserved_bytes, self._sharers, self._gpu_part = reserved_bytes, sharers, gpu_part
        self._doubles, self.longest_prompt = doubles, max_prompt_tokens or 1  # of all so far, or known to come
        self.graphs = GraphCache(runner)
        # where preempted samples' KV waits, once a schedule that preempts has run; else computed again
        self.parking: ParkedKV | None = None
        self._parked_beside: PagedKV | None = None  # the pool beside which that is
        # of a size that no prompt changes; else it grows with the longest so far
        self.is_fixed = config.has_budget and (not config.takes_free_memory or max_prompt_tokens is not None)
        if max_prompt_tokens is not None or self.is_fixed:
            self.allocate([max_prompt_tokens or 1] * config.most_prompts)

    def allocate(self, prompts: Sequence[int]) -> None:
        """Allocate the pool for prompts of so many tokens, if the one there is does not do; that one is freed first."""
        if self._runner.kv is None or not self.is_fixed:
            self._grow(prompts)
        self.longest_prompt = max([self.longest_prompt, *prompts])

    def _grow(self, prompts: Sequence[int]) -> None:
        config, runner = self._config, self._runner
        page_bytes = runner.page_bytes(config.page_size)
        held = 0 if runner.kv is None else runner.kv.num_pages
        free = self._free_bytes(held * page_bytes) if config.takes_free_memory else None
        pages = num_pool_pages(config, page_bytes=page_bytes, prompts=prompts or [1], free_bytes=free)
        if pages > held:
            if self._doubles:
                longest = max([self.longest_prompt, *prompts])
                pages = max(pages, self._doubled_pages(longest, page_bytes, self._free_bytes(held * page_bytes)))
            check_total(config, pages * page_bytes, total_bytes(runner.device))
            self.graphs.clear()
            self.parking = self._parked_beside = None  # which hold on to the old one
            runner.allocate(pages, config.page_size)
            self.graphs.check_device()

    def _free_bytes(self, held: int) -> int:
        """What the pool may take of the memory that is free, with the bytes it holds."""
        runner = self._runner
        free = max(0, free_bytes(runner.device, self._gpu_part) + held - self._reserved_bytes)
        return free_for_pool(free, on_gpu=runner.device.type == "cuda", sharers=self._sharers)

    def _doubled_pages(self, longest: int, page_bytes: int, free: int) -> int:
        """Pages for prompts of `longest` tokens, rounded up to a power of two, so that few calls need a larger pool; 0
        where so many are not free."""
        config, rounded = self._config, 1 << (longest - 1).bit_length()
        prompts = [min(rounded, self._runner.context or rounded)] * config.most_prompts
        try:
            pages = num_pool_pages(config, page_bytes=page_bytes, prompts=prompts, free_bytes=free)
        except ValueError:  # not even one of them would fit beside a response
            return 0
        return pages if pages * page_bytes <= free else 0

    def check(self, prompt_index: int, num_tokens: int) -> None:
        """ValueError for a prompt that does not fit beside a full response, where the pool is not made for it."""
        if self.is_fixed:
            pages, page_bytes = self._runner.kv.num_pages, self._runner.page_bytes(self._config.page_size)
            check_pages(pages, self._config, num_tokens, f"prompt {prompt_index}", page_bytes=page_bytes)

    def open_parking(self) -> ParkedKV | None:
        """Where preempted samples' KV waits, made when a schedule that preempts first finds this pool."""
        kv = self._runner.kv
        if self._parked_beside is not kv:
            self.parking, self._parked_beside = open_parking(self._config, kv, self._sharers), kv
        return self.parking

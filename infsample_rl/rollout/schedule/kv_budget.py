"""How many pages the KV pool has, from whichever way the budget is given. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from infsample_rl.config import RolloutConfig
from infsample_rl.config.fields import kv_pages, parse_bytes
from infsample_rl.config.rollout import MOST_ROWS
from infsample_rl.types import MaybeNone

# Of the free memory what pools take that are to take it: the rest of a GPU is for activations of a prefill and
# fragmentation, that of a machine for the other processes, which all share it.
GPU_SHARE, CPU_SHARE = 0.9, 0.5


def free_for_pool(free_bytes: int, *, on_gpu: bool, sharers: int) -> int:
    """Bytes that the pool of one worker may take of those that are free after its weights. `sharers`: workers on the
    CPU, which have one memory together."""
    return int(GPU_SHARE * free_bytes) if on_gpu else int(CPU_SHARE * free_bytes) // sharers


def num_pool_pages(
    config: RolloutConfig, *, page_bytes: int, prompts: Sequence[int], free_bytes: int | MaybeNone = None
) -> int:
    """Pages of the pool for prompts of these numbers of tokens, of which rollout.prompts_at_once may be resident
    together; the default budget counts the longest.

    `free_bytes`: of free_for_pool(), read where the pool takes what is free alone. Raises ValueError, with the
    smallest budget that would do, when one prompt and one full response do not fit.
    """
    page_size, longest, given = config.page_size, sorted(prompts, reverse=True), _given(config)
    if config.kv_budget_tokens is not None:
        pages = config.kv_budget_tokens // page_size
    elif config.takes_free_memory:
        longest = longest[: config.most_prompts]
        rows = min(config.most_rows, config.group_size * len(longest))
        most = kv_pages(rows, config.max_new_tokens, longest, page_size)
        pages = min(most, free_bytes // page_bytes)  # more could never be used
        given = f"{given} ({free_bytes} bytes free for it)"
    elif config.kv_budget_bytes is not None:
        pages = parse_bytes(config.kv_budget_bytes) // page_bytes
    else:
        slots = config.num_slots
        assert slots is not None, "none is where another budget is given"
        return kv_pages(slots, config.max_new_tokens, longest[: config.planned_prompts], page_size)
    check_pages(pages, config, longest[0], "a prompt", given=given, page_bytes=page_bytes)
    return pages


def check_total(config: RolloutConfig, num_bytes: int, total_bytes: int) -> None:
    """Raise ValueError for a pool of `num_bytes` on a device that has `total_bytes` in all."""
    if num_bytes > total_bytes:
        raise ValueError(
            f"{_given(config)} asks for a KV pool of {num_bytes} bytes, and the device has {total_bytes} in all; "
            "rollout.kv_budget_bytes=auto takes what is free"
        )


def _given(config: RolloutConfig) -> str:
    """The setting that says how large the pool is."""
    if config.takes_free_memory:
        return "rollout.kv_budget_bytes=auto"
    name = next((name for name in ("kv_budget_tokens", "kv_budget_bytes") if getattr(config, name) is not None), None)
    return f"rollout.slots={config.num_slots}" if name is None else f"rollout.{name}={getattr(config, name)}"


def rows_in(config: RolloutConfig, pages: int, prompts: Sequence[int]) -> int:
    """Most rows that decode at a time in a pool of so many pages, for prompts of these numbers of tokens: at most one a
    page, which a row has from its second token on."""
    if config.schedule == "token_budget" or config.num_slots is not None:
        return min(config.most_rows, pages)
    longest = sorted(prompts, reverse=True)[: config.planned_prompts]
    return min(config.most_rows, slots_in(pages, config.max_new_tokens, longest, config.page_size))


def slots_in(pages: int, max_new_tokens: int, prompts: Sequence[int], page_size: int) -> int:
    """Slots of a fixed-slot schedule that a KV budget is given for: the full responses that it holds beside the
    resident prompts, from 1 to MOST_ROWS. They are the N groups of Algorithm 2, whose memory threshold is a response.
    """
    left = pages - kv_pages(0, max_new_tokens, prompts, page_size)
    return min(MOST_ROWS, max(1, left // kv_pages(1, max_new_tokens, [], page_size)))


def check_pages(
    pages: int, config: RolloutConfig, prompt_tokens: int, name: str, *, page_bytes: int, given: str | None = None
) -> None:
    """Raise ValueError when `pages` cannot hold a prompt of `prompt_tokens` tokens, called `name`, and one full
    response."""
    smallest = kv_pages(1, config.max_new_tokens, [prompt_tokens], config.page_size)
    if pages < smallest:
        raise ValueError(
            f"{given or 'the KV pool'} holds {pages} pages of {config.page_size} tokens, too few for {name} of "
            f"{prompt_tokens} tokens and one response of {config.max_new_tokens}; the smallest that would do is "
            f"rollout.kv_budget_tokens={smallest * config.page_size} ({smallest * page_bytes} bytes)"
        )

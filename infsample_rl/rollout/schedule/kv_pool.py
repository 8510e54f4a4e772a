"""Which KV pages are free, taken and shared, as plain ints; kv_cache.py has the tensors."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class KVPool:
    """Book-keeping of one worker's KV memory: `num_pages` pages of `page_size` tokens, fixed for the life of the pool.

    A page belongs to whoever took it and to everyone who shared it; it is free again when the last of them has released
    it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be >= 1, got {num_pages} and {page_size}")
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages))  # a heap: low pages first
        self._owners = [0] * num_pages
        self.peak_pages = 0

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """`count` free pages, the lowest first. RuntimeError when there are fewer: the caller must have made room."""
        if count > len(self._free):
            raise RuntimeError(f"{count} KV pages wanted, {len(self._free)} of {self.num_pages} are free")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        self.peak_pages = max(self.peak_pages, self.num_pages - len(self._free))
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more owner for every page, which somebody must hold already."""
        for page in pages:
            if self._owners[page] == 0:
                raise RuntimeError(f"KV page {page} is free and cannot be shared")
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One owner less for every page; a page without any is free."""
        for page in pages:
            if self._owners[page] == 0:
                raise RuntimeError(f"KV page {page} is free already")
            self._owners[page] -= 1
            if self._owners[page] == 0:
                heapq.heappush(self._free, page)


def smallest_budget_tokens(prompt_tokens: int, max_new_tokens: int, page_size: int) -> int:
    """Tokens of the smallest pool that holds one prompt and one full response: smallest_budget_tokens(20, 30, 16) ->
    64."""
    return (-(-prompt_tokens // page_size) + -(-max_new_tokens // page_size)) * page_size

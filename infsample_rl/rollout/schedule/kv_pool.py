"""Which KV pages are free, taken, shared and parked outside the pool, as plain ints; kv_cache.py and parked_kv.py have
the tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

UNBOUNDED = 2**62  # pages, for what is computed again instead of being parked
MOST_POOLS = 4  # parked beside one pool; of all recorded lengths one prompt alone, of CodeGen with 100, wanted more


class KVPool:
    """Book-keeping of one worker's KV memory: `num_pages` pages of `page_size` tokens, fixed for the life of the pool.

    A page belongs to whoever took it and to everyone who shared it; it is free again when the last of them has released
    it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._released: list[int] = []  # free, the next ones last: as few as possible are ever touched
        self._num_touched = 0  # pages from here on were never taken
        self._shares: Counter[int] = Counter()  # by page: owners beside the first
        self.peak_pages = 0

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._released) + self.num_pages - self._num_touched

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """`count` free pages. RuntimeError when there are fewer: the caller must have made room."""
        left = self.num_free - count
        if left < 0:
            raise RuntimeError(f"{count} KV pages wanted, {self.num_free} of {self.num_pages} are free")
        again = max(0, len(self._released) - count)
        pages = self._released[again:][::-1]
        del self._released[again:]
        first = self._num_touched
        self._num_touched += count - len(pages)
        self.peak_pages = max(self.peak_pages, self.num_pages - left)
        return [*pages, *range(first, self._num_touched)]

    def share(self, pages: Sequence[int]) -> None:
        """One more owner for every page, which somebody must hold already."""
        self._shares.update(pages)

    def release(self, pages: Sequence[int]) -> None:
        """One owner less for every page; a page without any is free. RuntimeError for more than were taken."""
        shares, free = self._shares, self._released
        for page in pages:
            if shares.get(page):
                shares[page] -= 1
            else:
                free.append(page)
        if len(free) > self._num_touched:
            raise RuntimeError(f"KV pages were released that nobody held: {len(free)} of {self._num_touched} are free")


class Parking:
    """Book-keeping of `most_pages` pages outside the pool, where preempted samples and their prompts wait."""

    def __init__(self, most_pages: int) -> None:
        self.most_pages = most_pages
        self.num_taken = 0

    @property
    def taken_share(self) -> float:
        """Of the places there are; 1 where there is none."""
        return self.num_taken / self.most_pages if self.most_pages else 1.0

    def take(self, count: int) -> bool:
        """Take `count` pages, if as many are free."""
        if self.num_taken + count > self.most_pages:
            return False
        self.num_taken += count
        return True

    def release(self, count: int) -> None:
        """Give `count` pages back."""
        self.num_taken -= count

    def forget(self, owner: Hashable) -> None:
        """What was copied out for a sample or a prompt is not wanted any more."""

"""How many pages of KV may lie outside the pool, where preempted samples wait: plain ints; parked_kv.py has the KV
itself."""

from __future__ import annotations

MOST_POOLS = 4  # of all recorded lengths one prompt alone, of CodeGen with 100 samples, ever wanted more


class Parking:
    """Book-keeping of `most_pages` pages."""

    def __init__(self, most_pages: int) -> None:
        self.most_pages = most_pages
        self.num_taken = 0

    @classmethod
    def beside(cls, pool_pages: int) -> Parking:
        """The largest there is beside a pool of so many pages."""
        return cls(MOST_POOLS * pool_pages)

    def take(self, count: int) -> bool:
        """Take `count` pages, if as many are free."""
        if self.num_taken + count > self.most_pages:
            return False
        self.num_taken += count
        return True

    def release(self, count: int) -> None:
        """Give `count` pages back."""
        self.num_taken -= count

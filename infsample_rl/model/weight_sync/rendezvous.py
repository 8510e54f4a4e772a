"""Where processes of one run find each other: a key-value store that one of them hosts.

The host binds the port before anyone hears of it. A port that is looked up as free and bound later may be taken in
between, by the connections of another process group among others.
"""

from __future__ import annotations

import datetime

import torch.distributed as dist


def host_store(timeout_s: float) -> dist.TCPStore:
    """The store, hosted by this process (learner rank 0) on a free port, its .port; the others open_store() it."""
    return dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=timeout_s)
    )


def open_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The store of learner rank 0; RuntimeError when it cannot be reached in time."""
    return dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))

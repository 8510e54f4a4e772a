"""Through what processes of vLLM meet, and share memory."""

from __future__ import annotations

import os
import time


def files_of_vllm(*folders: str) -> set[str]:
    """Their names in these folders."""
    kinds = ("psm_", "sem.mp-", "vllm")
    return {name for folder in folders for name in os.listdir(folder) if name.startswith(kinds)}


def check_nothing_is_left(before: set[str], *folders: str) -> None:
    """Of runs since then; those of other tests end too."""
    limit = time.monotonic() + 120
    while (left := files_of_vllm(*folders) - before) and time.monotonic() < limit:
        time.sleep(0.2)
    assert not left

"""Tests marked gpu on a machine without one: they run on the CPU instead, as far as that goes."""

from __future__ import annotations

import pytest
import torch

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # the device of such a test


def needs_gpu() -> None:
    """What follows tells something on a GPU alone: a test ends here as skipped where there is none."""
    if GPU == "cpu":
        pytest.skip("needs a GPU from here on")

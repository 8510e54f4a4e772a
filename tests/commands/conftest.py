"""A server of `serve` for the files that ask it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def running(tiny_qwen3):
    from infsample_rl.commands.serve.__main__ import build
    from tests.served import KEY, OPTIONS, start

    found, stop = start(build(str(tiny_qwen3), OPTIONS, [], KEY))
    yield found
    stop()

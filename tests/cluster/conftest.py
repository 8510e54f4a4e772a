"""Ray without processes: references are what they hold."""

from __future__ import annotations

import pytest

from tests.fakes import FakeRay


@pytest.fixture
def fake_ray(monkeypatch):
    """ray.get, ray.wait and ray.kill of tests/fakes.py; `killed` are the handles that were ended."""
    return FakeRay(monkeypatch)

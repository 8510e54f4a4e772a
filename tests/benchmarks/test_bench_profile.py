"""bench.profile counts what a step does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def run_profile(*arguments):
    command = [sys.executable, "-m", "benchmarks.profile", "threads=1", "steps=6", "prompt_tokens=9", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_of_the_tiny_policy_is_counted(rows):
    done = run_profile("device=cpu", f"rows={rows}", "json=true")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["rows"], found["steps"], found["device"]) == (rows, 6, "cpu")
    assert found["operators_nested"] > found["operators"] > 50  # four layers of a dozen operators and more
    assert (
        found["host_syncs"] <= 1 and found["kernels"] == found["launches"] == 0 and found["device_allocations"] is None
    )
    assert 0 < found["allocations"] < found["operators_nested"] and found["milliseconds"] > 0
    assert len(found["top"]) == 15 and found["top"][0]["microseconds"] >= found["top"][-1]["microseconds"]


def test_an_unknown_key_is_refused_in_one_line():
    done = run_profile("row=3")
    assert done.returncode == 2 and done.stdout == ""
    # above it torchao may warn
    assert "did you mean rows=...?" in done.stderr and done.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.gpu
def test_a_step_on_cuda_is_one_launch_without_syncs_and_allocations():
    done = run_profile("device=cuda", "dtype=bfloat16", "rows=4", "json=true")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["launches"] <= 2 and found["host_syncs"] == 0 and found["device_allocations"] == 0
    assert found["kernels"] > 20

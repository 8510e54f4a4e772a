"""The benchmarks as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = "import sys; [sys.modules.__setitem__(name, None) for name in ('ray', 'hydra', 'omegaconf', 'deepspeed')]"


@pytest.fixture(scope="session")
def run_benchmark(tmp_path_factory):
    """`python -m benchmarks.NAME ARGUMENTS` in a folder that is not the repository, where ray, hydra, omegaconf and
    deepspeed cannot be imported; its standard output."""

    def run(name: str, *arguments: str) -> str:
        code = f"{BLOCKED}; sys.argv[0] = 'x'; sys.path.insert(0, {str(ROOT)!r}); import runpy"
        code += f"; runpy.run_module('benchmarks.{name}', run_name='__main__')"
        command = [sys.executable, "-c", code, *arguments]
        cwd = tmp_path_factory.mktemp(name)
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=500)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run

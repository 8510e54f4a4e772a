"""Compiling, caching and loading the decode kernels, and what happens where that fails."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from infsample_rl.rollout.kernels import cpu_kernels

needs_compiler = pytest.mark.skipif(cpu_kernels.load() is None, reason="no C++ compiler")


@needs_compiler
def test_one_openmp_runtime_is_mapped_and_it_is_torchs():
    program = """
import torch
from infsample_rl.rollout.kernels import cpu_kernels
cpu_kernels.load().linear(torch.randn(8, 64), torch.randn(512, 64))
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
print(mapped == {cpu_kernels._openmp_path()}, cpu_kernels._openmp_path())
"""  # on its own: other libraries of this process may have brought one
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True ") and "torch" in done.stdout


@pytest.fixture
def fresh_load():
    cpu_kernels.load.cache_clear()
    yield cpu_kernels.load
    cpu_kernels.load.cache_clear()


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": "/nowhere/c++"}, r"No such file or directory: '/nowhere/c\+\+'"),
        ({"CXX": "", "PATH": "/nowhere"}, r"no C\+\+ compiler: c\+\+, g\+\+, clang\+\+ not found, CXX not set"),
        ({"CXX": "false"}, "false failed"),
    ],
    ids=["missing", "none", "failing"],
)
def test_without_a_working_compiler_load_warns_once_and_gives_none(
    tmp_path, monkeypatch, fresh_load, environment, reason
):
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=reason) as caught:
        assert fresh_load() is None
        assert fresh_load() is None
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@needs_compiler
def test_compilations_at_once_leave_one_whole_library(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_kernels, "FLAGS", (*cpu_kernels.FLAGS, "-O0"))
    with ThreadPoolExecutor(2) as pool:
        first, second = (future.result() for future in [pool.submit(cpu_kernels._library_path) for _ in range(2)])
    assert first == second
    assert list((tmp_path / "infsample_rl").iterdir()) == [first]
    cpu_kernels.Kernels(ctypes.CDLL(str(first)), ctypes.CDLL(cpu_kernels._openmp_path()))


@needs_compiler
def test_a_changed_compile_command_is_compiled_anew(monkeypatch):
    path = cpu_kernels._library_path()
    monkeypatch.setattr(cpu_kernels, "_compile", lambda command, path: None)
    monkeypatch.setattr(cpu_kernels, "FLAGS", ("-O1",))
    assert cpu_kernels._library_path() != path

"""Float32 kernels of a decode step on CPU: skinny matrix products, two-part paged attention, all decoder layers
(cpu_decoder.py).

The C++ beside this file is compiled at first use, for the machine at hand, into the user's cache folder. What a row
gets is bitwise the same whatever the batch around it, its place, the page numbers and the number of threads. Letters: R
rows, K and N columns in and out of a matrix, H kv heads, N query heads per kv head, D head size.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
SOURCES = tuple(
    f"cpu_{name}"
    for name in ("kernels.cpp", "attention.h", "decoder.h", "drafts.h", "linear.h", "threads.h", "vectors.h")
)
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno")
COMPILE_SECONDS = 120

POINTER, INT64, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


@functools.cache
def load(without: str = "decoding takes torch's operators, slower, and no tokens are drafted") -> Kernels | None:
    """The kernels, compiled if need be; None, after one warning that says why, and how it goes on `without`, where they
    cannot be had."""
    try:
        return Kernels(ctypes.CDLL(str(_library_path())), ctypes.CDLL(_openmp_path()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())
        warnings.warn(f"no compiled CPU kernels ({reason}): {without}", stacklevel=2)
        return None


class Kernels:
    """The compiled functions. Tensors are float32 on CPU, contiguous; anything else is a ValueError."""

    def __init__(self, library: ctypes.CDLL, openmp: ctypes.CDLL) -> None:
        use_openmp = _function(library, "use_openmp", [POINTER], None)
        use_openmp(ctypes.cast(openmp.GOMP_parallel, POINTER))
        self._linear = _function(library, "linear", [POINTER] * 4 + [INT64] * 4 + [INT], None)
        self._attention = _function(library, "paged_attention", [POINTER] * 9 + [INT64] * 13 + [FLOAT, INT], INT64)
        self._norm = _function(library, "rms_norm", [POINTER] * 3 + [INT64] * 2 + [FLOAT, INT], None)
        self._silu = _function(library, "silu_mul", [POINTER] * 3 + [INT64] * 2 + [INT], None)
        self.decode = _function(library, "decode", [POINTER] * 2, INT64)  # of cpu_decoder.CompiledDecoder, as the next
        self.workspace_floats = _function(library, "workspace_floats", [POINTER], INT64)
        # of schedule.drafter.Drafter
        self.open_drafts = _function(library, "open_drafts", [POINTER, INT64], POINTER)
        self.close_drafts = _function(library, "close_drafts", [POINTER], None)
        self.bytes_of_drafts = _function(library, "bytes_of_drafts", [POINTER], INT64)
        self.open_text = _function(library, "open_text", [POINTER], INT64)
        self.extend_text = _function(library, "extend_text", [POINTER, INT64, POINTER, INT64], None)
        self.draft = _function(library, "draft", [POINTER, INT64] * 2 + [POINTER, INT64, POINTER, POINTER], INT64)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [R, K], weight [N, K], bias [N] -> x weight^T + bias [R, N]."""
        (num_rows, size), num_out = x.shape, weight.shape[0]
        check("x", x, x.shape)
        check("weight", weight, (num_out, size))
        if bias is not None:
            check("bias", bias, (num_out,))
        out = x.new_empty((num_rows, num_out))
        pointers = (x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
        self._linear(*pointers, num_rows, size, size, num_out, torch.get_num_threads())
        return out

    def paged_attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        row_tables: Tensor,
        row_lengths: Tensor,
        prompt_tables: Tensor,
        prompt_lengths: Tensor,
        prompt_of_row: Tensor,
        scaling: float,
    ) -> Tensor:
        """Every row's exact softmax over its prompt's tokens and its own; a prompt's KV is read once for up to 16 of
        its rows.

        query [R, H N, D]; keys and values [pages, page_size, H, D]; tables [R or prompts, pages of one] and lengths [R
        or prompts] >= 1, int32 as prompt_of_row [R] -> [R, H N, D].
        """
        out = torch.empty_like(query)
        (num_rows, num_heads, size), num_prompts = query.shape, len(prompt_lengths)
        for tensor in (query, keys, values):
            check("query, keys or values", tensor, tensor.shape)
        given = (query, keys, values, row_tables, row_lengths, prompt_tables, prompt_lengths, prompt_of_row, out)
        sizes = (num_rows, num_heads // keys.shape[2], num_prompts, *keys.shape, num_heads * size, *keys.stride()[:3])
        widths = (row_tables.shape[1], prompt_tables.shape[1])
        pointers = [tensor.data_ptr() for tensor in given]
        bad = self._attention(*pointers, *sizes, *widths, scaling, torch.get_num_threads())
        if bad:
            raise ValueError(f"a length, page or prompt of row or prompt {(bad - 1) // 3} is out of range")
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., K], weight [K] -> x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
        size = x.shape[-1]
        check("x", x, x.shape)
        check("weight", weight, (size,))
        out = torch.empty_like(x)
        pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
        self._norm(*pointers, x.numel() // size, size, eps, torch.get_num_threads())
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate and up [R, K] -> gate * sigmoid(gate) * up [R, K]."""
        num_rows, size = gate.shape
        check("gate", gate, gate.shape)
        check("up", up, gate.shape)
        out = torch.empty_like(gate)
        self._silu(gate.data_ptr(), up.data_ptr(), out.data_ptr(), num_rows, size, torch.get_num_threads())
        return out


def check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """ValueError unless the tensor has this shape and type, on CPU, contiguous. (Written for speed: it runs on every
    call.)"""
    if tensor.dtype is not dtype or not tensor.is_cpu or tensor.shape != shape or not tensor.is_contiguous():
        found = f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        raise ValueError(f"{name} is {found}; it must be {dtype} {tuple(shape)}, contiguous, on cpu")


def _function(library: ctypes.CDLL, name: str, arguments: list, result: type | None) -> Callable:
    function = library[f"infsample_{name}"]
    function.argtypes, function.restype = arguments, result
    return function


def _openmp_path() -> str:
    """The OpenMP runtime that torch has loaded; a second one would fight it for the cores."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [line.split(maxsplit=5)[-1] for line in lines if re.search("libgomp|libiomp5|libomp", line)]
    if not paths:
        raise RuntimeError("torch has no OpenMP runtime loaded")
    return min(paths, key=lambda path: "torch" not in path)  # torch's own, where several are


def _library_path() -> Path:
    """The compiled library for these sources, this compiler and this CPU; compiles it where it is missing."""
    command = _compile_command()
    sources = [(FOLDER / name).read_bytes() for name in SOURCES]
    name = hashlib.sha256(b"\0".join([*sources, " ".join(command).encode(), _cpu().encode()])).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infsample_rl"
    path = folder / f"cpu_kernels_{name}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(command, path)
    return path


def has_compiler() -> bool:
    """Whether a C++ compiler is named or found here; whether it works is seen where it is needed."""
    try:
        return bool(_compile_command())
    except RuntimeError:
        return False


def _compile_command() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    found = named or [compiler for compiler in COMPILERS if shutil.which(compiler)][:1]
    if not found:
        raise RuntimeError(f"no C++ compiler: {', '.join(COMPILERS)} not found, CXX not set")
    native = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
    return [*found, *FLAGS, native]


def _compile(command: list[str], path: Path) -> None:
    """Compiled aside and renamed, so that processes may race."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        whole = [*command, "-o", str(made), str(FOLDER / SOURCES[0])]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[:300]}")
        os.replace(made, path)


def _cpu() -> str:
    """What -march=native looks at, so that a cache folder shared by machines serves each."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    telling = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return platform.machine() + "".join(line for line in lines if line.startswith(telling))

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
SOURCES = ("cpu_kernels.cpp", "cpu_attention.h", "cpu_decoder.h", "cpu_linear.h", "cpu_threads.h", "cpu_vectors.h")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno")
COMPILE_SECONDS = 120

POINTER, INT64, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


@functools.cache
def load() -> Kernels | None:
    """The kernels, compiled if need be; None, after one warning that says why, where they cannot be had."""
    try:
        return Kernels(ctypes.CDLL(str(_library_path())), ctypes.CDLL(_openmp_path()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())
        warnings.warn(
            f"no compiled CPU kernels ({reason}): decoding takes torch's operators, 1.3 to 2 times slower", stacklevel=2
        )
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
        num_rows, num_heads, size = query.shape
        num_prompts, (num_kv_heads, kv_size) = prompt_tables.shape[0], keys.shape[2:]
        for name, tensor in (("query", query), ("keys", keys)):
            check(name, tensor, tensor.shape)
        check("values", values, keys.shape)
        if size != kv_size or num_heads % num_kv_heads:
            raise ValueError(
                f"query has {num_heads} heads of {size}; the {num_kv_heads} kv heads must divide them and have their "
                f"size, not {kv_size}"
            )
        of_rows = (("row_tables", row_tables), ("row_lengths", row_lengths), ("prompt_of_row", prompt_of_row))
        of_prompts = (("prompt_tables", prompt_tables), ("prompt_lengths", prompt_lengths))
        for count, tensors in ((num_rows, of_rows), (num_prompts, of_prompts)):
            for name, tensor in tensors:
                check(name, tensor, (count, *tensor.shape[1:]), torch.int32)
        out = torch.empty_like(query)
        given = (query, keys, values, row_tables, row_lengths, prompt_tables, prompt_lengths, prompt_of_row, out)
        sizes = (num_rows, num_heads // num_kv_heads, num_prompts, *keys.shape, num_heads * size, *keys.stride()[:3])
        widths = (row_tables.shape[1], prompt_tables.shape[1])
        pointers = [tensor.data_ptr() for tensor in given]
        _raise_bad_index(self._attention(*pointers, *sizes, *widths, scaling, torch.get_num_threads()))
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


def _raise_bad_index(code: int) -> None:
    """A kernel's answer: 0, or which index is out of range (it was checked before anything was read)."""
    if code:
        index, kind = divmod(code - 1, 3)
        what = ("row_lengths or row_tables", "prompt_lengths or prompt_tables", "prompt_of_row")[kind]
        raise ValueError(
            f"{what}[{index}] is out of range: lengths go from 1 to what the pages hold, pages and prompts must exist"
        )


def _function(library: ctypes.CDLL, name: str, arguments: list, result: type | None) -> Callable:
    function = library[f"infsample_{name}"]
    function.argtypes, function.restype = arguments, result
    return function


def _openmp_path() -> str:
    """The OpenMP runtime that torch has loaded; a second one would fight it for the cores."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = [
        line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line or "libiomp5" in line or "libomp" in line
    ]
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


def _compile_command() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    found = named or [compiler for compiler in COMPILERS if shutil.which(compiler)][:1]
    if not found:
        raise RuntimeError(f"no C++ compiler: {', '.join(COMPILERS)} not found, CXX not set")
    native = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
    return [*found, *FLAGS, native]


def _compile(command: list[str], path: Path) -> None:
    """Compiled aside and renamed, so that processes may race."""
    handle, aside = tempfile.mkstemp(dir=path.parent, suffix=".so.part")
    os.close(handle)
    try:
        done = subprocess.run(
            [*command, "-o", aside, str(FOLDER / SOURCES[0])], capture_output=True, text=True, timeout=COMPILE_SECONDS
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[:300]}")
        os.replace(aside, path)
    finally:
        Path(aside).unlink(missing_ok=True)


def _cpu() -> str:
    """What -march=native looks at, so that a cache folder shared by machines serves each."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    telling = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return platform.machine() + "".join(line for line in lines if line.startswith(telling))

"""Environment variables of workers. Dashboards show them: no secret may be among them (worker_secrets.py). Imports
neither torch nor transformers."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ray._private.services import JEMALLOC_SO

from infsample_rl.config import Config

PACKAGE = Path(__file__).resolve().parents[2]  # the folder that has this package
TENSOR_ROLES = ("rollout", "reference", "learner")

# oneDNN keeps up to 1,024 products it has compiled for 16 bits, with buffers of the size of a weight, and rows differ
# in length, so that those of earlier rows are not asked for again: 280 MB in 18 rows of SmolLM2-135M. A row with LoRA
# has about 40; below 32 it gets slower.
FEW_COMPILED_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "48"}


def is_installed() -> bool:
    """Whether this package lies among those of an interpreter, which finds it by itself; another interpreter must not
    be led there, where it would find its libraries in other versions."""
    return PACKAGE.name in ("site-packages", "dist-packages")


def worker_environment(config: Config) -> dict[str, str]:
    """Of every worker."""
    threads = str(config.cluster.threads_per_worker)
    package = "" if is_installed() else str(PACKAGE)
    python_path = os.pathsep.join(path for path in (package, os.environ.get("PYTHONPATH", "")) if path)
    environment = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": python_path,
    }
    if config.cluster.address is None:  # this machine: nothing has to come from another one
        loopback = socket.if_indextoname(1)
        environment |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    if config.is_deterministic and (config.cluster.rollout_gpus or config.cluster.learner_gpus):
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else cuBLAS need not repeat, as NVIDIA's manual says
    return environment


def allocator_environment(role: str, gpus: float, *, samples: bool = False) -> dict[str, str]:
    """Beside it, what gives a worker with tensors in host memory the jemalloc that Ray brings; nothing where another
    library is preloaded.

    glibc keeps much of what a learner row frees, so that its peak grows from step to step. Without
    `oversize_threshold:0` jemalloc would return every tensor of 8 MB and more at once (docs/plan.md). MKL keeps the
    buffers of its products, 10 to 45 MB a thread, unless it is told not to. Who runs rows keeps few compiled products;
    not who `samples`, whose row counts come back.
    """
    if role not in TENSOR_ROLES or gpus > 0 or JEMALLOC_SO is None or "LD_PRELOAD" in os.environ:
        return {}
    found = {"LD_PRELOAD": JEMALLOC_SO, "MALLOC_CONF": "oversize_threshold:0", "MKL_DISABLE_FAST_MM": "1"}
    return found if samples or role == "rollout" else found | FEW_COMPILED_PRODUCTS

"""DeepSpeed's AdamW in C++, the only one that ZeRO takes for masters in host memory; compiled at first use."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def cpu_adam(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same AdamW with its step in C++. ValueError where that cannot be compiled."""
    try:
        compile_cpu_adam()
    except (RuntimeError, OSError) as error:
        raise ValueError(
            "learner.offload_optimizer=true with learner.backend=deepspeed compiles DeepSpeed's CPU Adam, which failed "
            f"here ({error.__cause__ or error}): install g++ and ninja, or take learner.backend=fsdp"
        ) from error
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in optimizer.param_groups]
    settings = optimizer.defaults
    return DeepSpeedCPUAdam(groups, lr=settings["lr"], betas=settings["betas"], eps=settings["eps"], adamw_mode=True)


def compile_cpu_adam() -> None:
    """Compile it, minutes of g++, or load what has been compiled. RuntimeError or OSError where it cannot be."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    version = f"py{sys.version_info.major}{sys.version_info.minor}_torch{torch.__version__}"
    with _alone(Path(root) / "infsample_rl" / version / CPUAdamBuilder().name):
        CPUAdamBuilder().load()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let torch build what is named as this folder in it, and nobody else meanwhile.

    torch keeps others out by a file, which a killed process leaves, and the next would wait for it without end. The
    system's lock ends with its holder: a file that is found under it is a dead process's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder.parent)
        try:
            yield
        finally:
            if given is None:
                del os.environ["TORCH_EXTENSIONS_DIR"]
            else:
                os.environ["TORCH_EXTENSIONS_DIR"] = given

"""AdamW whose moments lie in a file: in memory only those of the parameter that is being stepped.

The file has no name, so nothing is left of it when the process ends, however it ends. Its room is taken when it is made: a full disk is
found before the run begins, not in the middle of a step. The tensors of the optimizer's state are a shared mapping of it; once a
parameter has been stepped its pages are let go, and the system writes them to the disk when it wants the memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

KINDS = ("exp_avg", "exp_avg_sq")
IN_MEMORY = ("tmpfs", "ramfs")


class DiskAdamW(torch.optim.AdamW):
    """torch's AdamW, one parameter a kernel call: the same arithmetic, the same numbers."""

    def __init__(self, groups: Iterable[dict[str, Any]], folder: str, **settings: Any) -> None:
        """`groups` of float32 parameters in host memory, or shards of such. Raises ValueError for a folder that cannot take their moments."""
        single = [group | {"params": [parameter]} for group in groups for parameter in group["params"]]
        super().__init__(single, **settings)
        sizes = {parameter: 4 * _local(parameter).numel() for parameter in self._parameters()}
        regions = {parameter: len(KINDS) * -(-size // mmap.PAGESIZE) * mmap.PAGESIZE for parameter, size in sizes.items()}
        self._file = _unnamed_file(folder, sum(regions.values()))
        self._regions: dict[nn.Parameter, tuple[int, int]] = {}  # where its moments begin, and their bytes
        offset = 0
        for parameter, size in regions.items():
            self._regions[parameter] = offset, size
            kept = {kind: self._tensor(parameter, offset + place * size // len(KINDS)) for place, kind in enumerate(KINDS)}
            self.state[parameter] = {"step": torch.zeros(())} | kept
            offset += size

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """As AdamW's, a parameter at a time."""
        groups = self.param_groups
        try:
            for group in groups:
                self.param_groups = [group]
                super().step()
                self._let_go(group["params"][0])
        finally:
            self.param_groups = groups

    def read(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """A copy of its moments in memory; empty before its first step."""
        state = self.state[parameter]
        copies = {kind: state[kind].clone() for kind in KINDS} if state["step"] > 0 else {}
        self._let_go(parameter)
        return copies

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, values: dict[str, Tensor], steps: int) -> None:
        """Set its moments as after `steps` steps."""
        self.state[parameter]["step"].fill_(steps)
        for kind, value in values.items():
            self.state[parameter][kind].copy_(value)
        self._let_go(parameter)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (group["params"][0] for group in self.param_groups)

    def _tensor(self, parameter: nn.Parameter, offset: int) -> Tensor:
        """One moment, shaped, sharded and placed like the parameter."""
        local = _local(parameter)
        kept = torch.empty_like(local)
        if local.numel():
            kept = torch.frombuffer(self._file, dtype=torch.float32, count=local.numel(), offset=offset).view(local.shape)
        if not isinstance(parameter, DTensor):
            return kept
        whole = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(kept, parameter.device_mesh, parameter.placements, run_check=False, **whole)

    def _let_go(self, parameter: nn.Parameter) -> None:
        offset, size = self._regions[parameter]
        if size:
            self._file.madvise(mmap.MADV_DONTNEED, offset, size)


def check_moments_folder(folder: str) -> None:
    """ValueError for a folder that is missing, cannot be written to or is itself in memory."""
    if not Path(folder).is_dir():
        raise ValueError(f"learner.moments_folder must be a folder of the learner's machine, got {folder}, which is none")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"learner.moments_folder={folder} cannot be written to")
    kind = file_system(Path(folder))
    if kind in IN_MEMORY:
        raise ValueError(f"learner.moments_folder must be on a disk, got {folder}, which is a {kind} and lies in memory")


def _unnamed_file(folder: str, size: int) -> mmap.mmap:
    """A mapping of `size` bytes (of a page, where there are none) of a new file that is gone with the process."""
    check_moments_folder(folder)
    size = max(size, mmap.PAGESIZE)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise ValueError(f"learner.moments_folder={folder} has no room for {size / 1e9:.3g} GB of AdamW's moments: {error.strerror}") from None


def file_system(folder: Path) -> str:
    """What the folder's file system is called; empty where the system does not tell."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    held = {Path(point.encode().decode("unicode_escape")): kind for _, point, kind, *_ in mounts}  # a later one covers an earlier
    found = folder.resolve()
    return next((held[place] for place in (found, *found.parents) if place in held), "")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

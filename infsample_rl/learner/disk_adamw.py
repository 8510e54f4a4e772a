"""AdamW whose moments lie in a file: in memory only those of the parameter that is being stepped.

The file has no name, so nothing is left of it when the process ends, however it ends. Its room is taken when it is
made: a full disk is found before the run begins, not in the middle of a step. The tensors of the optimizer's state are
a shared mapping of it; once a parameter has been stepped its pages are let go, and the system writes them to the disk
when it wants the memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from infsample_rl.model.disk import check_disk_folder, take_room, unnamed_file

KINDS = ("exp_avg", "exp_avg_sq")


class DiskAdamW(torch.optim.AdamW):
    """torch's AdamW, one parameter a kernel call: the same arithmetic, the same numbers."""

    def __init__(self, groups: Iterable[dict[str, Any]], folder: str, **settings: Any) -> None:
        """`groups` of float32 parameters in host memory, or shards of such. Raises ValueError for a folder that cannot
        take their moments."""
        single = [group | {"params": [parameter]} for group in groups for parameter in group["params"]]
        super().__init__(single, **settings)
        sizes = {parameter: 4 * _local(parameter).numel() for parameter in self._parameters()}
        regions = {
            parameter: len(KINDS) * -(-size // mmap.PAGESIZE) * mmap.PAGESIZE for parameter, size in sizes.items()
        }
        self._file = _mapped_file(folder, sum(regions.values()))
        self._regions: dict[nn.Parameter, tuple[int, int]] = {}  # where its moments begin, and their bytes
        offset = 0
        for parameter, size in regions.items():
            self._regions[parameter] = offset, size
            kept = {
                kind: self._tensor(parameter, offset + place * size // len(KINDS)) for place, kind in enumerate(KINDS)
            }
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
            kept = torch.frombuffer(self._file, dtype=torch.float32, count=local.numel(), offset=offset).view(
                local.shape
            )
        if not isinstance(parameter, DTensor):
            return kept
        whole = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(kept, parameter.device_mesh, parameter.placements, run_check=False, **whole)

    def _let_go(self, parameter: nn.Parameter) -> None:
        offset, size = self._regions[parameter]
        if size:
            self._file.madvise(mmap.MADV_DONTNEED, offset, size)


def _mapped_file(folder: str, size: int) -> mmap.mmap:
    """A mapping of `size` bytes (of a page, where there are none) of a new file that is gone with the process."""
    check_disk_folder("learner.moments_folder", folder)
    size = max(size, mmap.PAGESIZE)
    try:
        with unnamed_file(folder) as file:
            take_room(file, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise ValueError(
            f"learner.moments_folder={folder} has no room for {size / 1e9:.3g} GB of AdamW's moments: {error.strerror}"
        ) from None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

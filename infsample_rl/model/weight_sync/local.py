"""Learner and engine in one process: the same parameters, or full ones copied straight into the engine's model."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from infsample_rl.model.weight_sync.checksum import differences, digest, summed
from infsample_rl.model.weight_sync.manifest import misfit
from infsample_rl.model.weight_sync.sync import WeightSyncReport
from infsample_rl.types import WeightManifest


def check_shared(engine: nn.Module, learner: nn.Module, version: int) -> WeightSyncReport:
    """Prove that nothing needs copying: every parameter lies at the same address. RuntimeError names the first that
    does not."""
    addresses = {name: parameter.data_ptr() for name, parameter in learner.named_parameters()}
    for name, parameter in engine.named_parameters():
        if parameter.data_ptr() != addresses[name]:
            raise RuntimeError(f"weights version {version}: engine and learner no longer share {name}")
    return WeightSyncReport(version=version, num_bytes=0, seconds=0.0, checksum=None)


@torch.no_grad()
def load_local(
    engine: nn.Module, tensors: Iterable[tuple[str, Tensor]], manifest: WeightManifest, *, with_checksum: bool = False
) -> WeightSyncReport:
    """Copy full parameters, one at a time, into the engine's model in place. Runs `tensors` to its end; other ranks
    gather with it."""
    source, started, sums = iter(tensors), time.monotonic(), dict[str, int]()
    parameters, loaded = dict(engine.named_parameters()), set[str]()
    problem = misfit(engine, manifest)
    try:
        for name, tensor in summed(source, sums) if with_checksum else source:
            if problem is None and name not in parameters:
                problem = f"{name} is not in the manifest"
            if problem is not None:
                break
            parameters[name].copy_(tensor)
            loaded.add(name)
    finally:
        for _ in source:
            pass
    left_out = sorted({entry[0] for entry in manifest.entries} - loaded)
    if problem is None and left_out:
        problem = f"{left_out[:3]} of the manifest were not given"
    problem = problem or (differences(engine, manifest, sums) if with_checksum else None)
    if problem is not None:
        raise RuntimeError(f"engine beside its learner, weights version {manifest.version}: {problem}")
    checksum = digest(sums) if sums else None
    return WeightSyncReport(
        version=manifest.version, num_bytes=manifest.num_bytes, seconds=time.monotonic() - started, checksum=checksum
    )

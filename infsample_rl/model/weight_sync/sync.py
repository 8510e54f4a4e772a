"""One version of the weights from the learner to an engine, over any transport: sent, checked, loaded, reported.

broadcast, cuda_ipc   send_weights on learner rank 0, receive_weights on every rollout worker, at the same time
object_store          buckets.stream_buckets on learner rank 0, then load_published on every rollout worker
local                 check_shared where engine and learner share their parameters, else load_local, in every process

What loads is given the engine's parameters by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from infsample_rl.model.weight_sync.buckets import bucket_sizes, fill_buckets, misfit, misfit_of, unpack_buckets
from infsample_rl.model.weight_sync.link import WeightLink
from infsample_rl.types import WeightManifest, WeightSyncReport

# (parameters, manifest, buckets): bring the weights in the buckets to the parameters
Load = Callable[[Mapping[str, Tensor], WeightManifest, Iterable[Tensor | np.ndarray]], None]

_GRACE_S = 5.0  # how long the others may take to say that they saw a transfer fail; who does not is named


def send_weights(link: WeightLink, tensors: Iterable[tuple[str, Tensor]], manifest: WeightManifest) -> WeightSyncReport:
    """Learner rank 0: bring every rollout worker to `tensors`, one at a time, and wait until all have loaded them.

    Always runs `tensors` to its end, as other ranks gather with it. RuntimeError names who refused, failed or did not
    answer; after a refusal the link still works, after a failure it is closed.
    """
    source, started = iter(tensors), time.monotonic()
    failure = None
    try:
        _offer(link, manifest)
        try:
            for number, bucket in enumerate(fill_buckets(source, manifest, link.free_buffers())):
                link.give(number, bucket)
            num_buckets = len(bucket_sizes(manifest))
            for number in range(max(0, num_buckets - 2), num_buckets):
                link.taken(number)
            failure = "; ".join(problem for problem in link.mail.hear_all("loaded") if problem) or None
        except RuntimeError as error:
            failure = str(error)  # the error itself would keep the broken connections open
        if failure is not None:
            raise RuntimeError(f"weights version {manifest.version}: {_abandon(link, failure)}")
    finally:
        for _ in source:
            pass
    return _report(manifest.version, manifest.num_bytes, started)


def _offer(link: WeightLink, manifest: WeightManifest) -> None:
    """Send the manifest and hear whether it fits everywhere; RuntimeError, here and there, when it does not."""
    _check_open(link)
    link.mail.begin()
    link.mail.tell("offer", [manifest.version, manifest.entries, manifest.num_bytes, manifest.bucket_bytes])
    try:
        refusals = "; ".join(answer for answer in link.mail.hear_all("answer") if answer)
        if refusals:
            raise RuntimeError(refusals)
    except RuntimeError as error:
        link.mail.fail(str(error))
        raise
    link.mail.tell("go", True)


def receive_weights(
    link: WeightLink, parameters: Mapping[str, Tensor], version: int, load: Load = unpack_buckets
) -> WeightSyncReport:
    """A rollout worker: take the weights of `version` into `parameters`, in place, while learner rank 0 runs
    send_weights. With another `load`, `parameters` say what fits, and it puts the weights where they belong.

    RuntimeError when they do not fit, when another worker refused them, or when the learner is gone.
    """
    _check_open(link)
    mail, started = link.mail, time.monotonic()
    mail.begin()
    offered, entries, num_bytes, bucket_bytes = mail.hear("offer")
    entries = [(name, dtype, tuple(shape), bucket, offset) for name, dtype, shape, bucket, offset in entries]
    manifest = WeightManifest(version=offered, entries=entries, num_bytes=num_bytes, bucket_bytes=bucket_bytes)
    problem = misfit(parameters, manifest, version)
    mail.tell(f"answer/{mail.member}", f"{mail.name}: {problem}" if problem else None)
    mail.hear("go")
    failure = None
    try:
        load(parameters, manifest, link.take(bucket_sizes(manifest)))
        if link.device.type == "cuda":
            torch.cuda.synchronize(link.device)
    except RuntimeError as error:
        failure = str(error)
    if failure is not None:
        raise RuntimeError(f"weights version {version}: {_give_up(link, f'{mail.name}: {failure}')}")
    mail.tell(f"loaded/{mail.member}", None)
    return _report(version, num_bytes, started)


def _give_up(link: WeightLink, failure: str) -> str:
    """Tell learner rank 0, if it is still there, that this worker failed, and close the link."""
    link.close()
    if not link.mail.has_learner():
        return f"learner rank 0 is gone ({failure})"
    link.mail.tell(f"loaded/{link.mail.member}", failure)
    return failure


def _abandon(link: WeightLink, failure: str) -> str:
    """Close the link after a failure and say who of the others did not see it: those are dead or hang."""
    link.mail.fail(failure)
    link.close()
    deadline = time.monotonic() + min(_GRACE_S, link.mail.timeout_s / 2)
    while link.mail.silent("loaded") and time.monotonic() < deadline:
        time.sleep(0.05)
    silent = link.mail.silent("loaded")
    return f"{', '.join(silent)} died or hangs ({failure})" if silent else failure


def _check_open(link: WeightLink) -> None:
    if not link.is_open:
        raise RuntimeError(f"{link.mail.name}: a transfer of weights failed before; join all members anew")


def load_published(
    parameters: Mapping[str, Tensor],
    manifest: WeightManifest,
    buckets: Iterable[np.ndarray],
    load: Load = unpack_buckets,
) -> WeightSyncReport:
    """Load what stream_buckets published, in place, one bucket at a time; `load` as in receive_weights(). RuntimeError
    when it does not fit."""
    started = time.monotonic()
    problem = misfit(parameters, manifest)
    if problem is not None:
        raise RuntimeError(problem)
    load(parameters, manifest, buckets)
    return _report(manifest.version, manifest.num_bytes, started)


def check_shared(engine: Mapping[str, Tensor], learner: nn.Module, version: int) -> WeightSyncReport:
    """Prove that nothing needs copying: every parameter lies at the same address. RuntimeError names the first that
    does not."""
    addresses = {name: parameter.data_ptr() for name, parameter in learner.named_parameters()}
    for name, parameter in engine.items():
        if parameter.data_ptr() != addresses[name]:
            raise RuntimeError(f"weights version {version}: engine and learner no longer share {name}")
    return WeightSyncReport(version=version, num_bytes=0, seconds=0.0)


@torch.no_grad()
def load_local(
    parameters: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], version: int
) -> WeightSyncReport:
    """Copy full tensors, one at a time, into the engine's parameters in place; other ranks gather with it.

    RuntimeError, after the last of `tensors`, for one that does not fit or was not given.
    """
    started, num_bytes, problem, left = time.monotonic(), 0, None, dict(parameters)
    for name, tensor in tensors:
        own = left.pop(name, None)
        found = f"the engine's model has no {name}" if own is None else misfit_of(own, name, tensor.dtype, tensor.shape)
        problem = problem or found
        if own is not None and problem is None:
            own.copy_(tensor)
            num_bytes += tensor.nbytes
    problem = problem or (f"{sorted(left)[:3]} were not given" if left else None)
    if problem is not None:
        raise RuntimeError(f"engine beside its learner, weights version {version}: {problem}")
    return _report(version, num_bytes, started)


def _report(version: int, num_bytes: int, started: float) -> WeightSyncReport:
    return WeightSyncReport(version=version, num_bytes=num_bytes, seconds=time.monotonic() - started)

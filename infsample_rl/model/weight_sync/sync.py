"""One version of the weights from the learner to an engine, over any transport: sent, checked, loaded, proved,
reported.

broadcast, cuda_ipc   send_weights on learner rank 0, receive_weights on every rollout worker, at the same time
object_store          buckets.stream_buckets on learner rank 0, then load_published on every rollout worker
local                 check_shared where engine and learner share their parameters, else load_local, in every process
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from infsample_rl.model.weight_sync.buckets import fill_buckets, load_buckets, unpack_buckets
from infsample_rl.model.weight_sync.checksum import differences, digest, summed
from infsample_rl.model.weight_sync.link import WeightLink
from infsample_rl.model.weight_sync.manifest import bucket_sizes, misfit
from infsample_rl.types import WeightManifest, WeightSyncReport

_GRACE_S = 5.0  # how long the others may take to say that they saw a transfer fail; who does not is named


def send_weights(
    link: WeightLink, tensors: Iterable[tuple[str, Tensor]], manifest: WeightManifest, *, with_checksum: bool = False
) -> WeightSyncReport:
    """Learner rank 0: bring every rollout worker to `tensors`, one at a time, and wait until all have loaded them.

    Always runs `tensors` to its end, as other ranks gather with it. RuntimeError names who refused, failed or did not
    answer; after a refusal the link still works, after a failure it is closed.
    """
    source, started, sums = iter(tensors), time.monotonic(), dict[str, int]()
    failure = None
    try:
        _offer(link, manifest, with_checksum=with_checksum)
        try:
            for number, bucket in enumerate(_filled(link, summed(source, sums) if with_checksum else source, manifest)):
                link.give(number, bucket)
            num_buckets = len(bucket_sizes(manifest, link.bucket_bytes))
            for number in range(max(0, num_buckets - 2), num_buckets):
                link.taken(number)
            link.mail.tell("sums", sums)
            problems = [problem for problem in link.mail.hear_all("loaded") if problem]
            failure = "; ".join(problems) or None
        except RuntimeError as error:
            failure = str(error)  # the error itself would keep the broken connections open
        if failure is not None:
            raise RuntimeError(f"weights version {manifest.version}: {_abandon(link, failure)}")
    finally:
        for _ in source:
            pass
    return _report(manifest, started, sums)


def _filled(link: WeightLink, tensors: Iterable[tuple[str, Tensor]], manifest: WeightManifest) -> Iterator[Tensor]:
    return fill_buckets(tensors, manifest, link.free_buffers(), link.bucket_bytes)


def _offer(link: WeightLink, manifest: WeightManifest, *, with_checksum: bool) -> None:
    """Send the manifest and hear whether it fits everywhere; RuntimeError, here and there, when it does not."""
    _check_open(link)
    link.mail.begin()
    offer = {
        "version": manifest.version,
        "entries": manifest.entries,
        "num_bytes": manifest.num_bytes,
        "bucket_bytes": link.bucket_bytes,
    }
    link.mail.tell("offer", offer | {"with_checksum": with_checksum})
    try:
        refusals = "; ".join(answer for answer in link.mail.hear_all("answer") if answer)
        if refusals:
            raise RuntimeError(refusals)
    except RuntimeError as error:
        link.mail.fail(str(error))
        raise
    link.mail.tell("go", True)


def receive_weights(link: WeightLink, model: nn.Module, version: int) -> WeightSyncReport:
    """A rollout worker: take the weights of `version` into `model`, in place, while learner rank 0 runs send_weights.

    RuntimeError when they do not fit, when another worker refused them, when the learner is gone, or for a wrong
    checksum.
    """
    _check_open(link)
    mail, started = link.mail, time.monotonic()
    mail.begin()
    offer = mail.hear("offer")
    entries = [(name, dtype, tuple(shape), bucket, offset) for name, dtype, shape, bucket, offset in offer["entries"]]
    manifest = WeightManifest(version=offer["version"], entries=entries, num_bytes=offer["num_bytes"])
    problem = misfit(model, manifest, version)
    if offer["bucket_bytes"] != link.bucket_bytes:
        problem = f"learner rank 0 sends buckets of {offer['bucket_bytes']} bytes, not {link.bucket_bytes}"
    mail.tell(f"answer/{mail.member}", f"{mail.name}: {problem}" if problem else None)
    mail.hear("go")
    failure = None
    try:
        unpack_buckets(model, manifest, link.take(bucket_sizes(manifest, link.bucket_bytes)), link.bucket_bytes)
        sums = mail.hear("sums")
        failure = differences(model, manifest, sums) if offer["with_checksum"] else None
        if link.device.type == "cuda":
            torch.cuda.synchronize(link.device)
    except RuntimeError as error:
        failure = str(error)
    if failure is not None:
        raise RuntimeError(f"weights version {version}: {_give_up(link, f'{mail.name}: {failure}')}")
    mail.tell(f"loaded/{mail.member}", None)
    return _report(manifest, started, sums)


def _give_up(link: WeightLink, failure: str) -> str:
    """Tell learner rank 0, if it is still there, that this worker failed, and close the link."""
    link.close()
    if not link.mail.has_learner():
        return f"learner rank 0 is gone ({failure})"
    link.mail.tell(f"loaded/{link.mail.member}", failure)
    return failure


def load_published(
    model: nn.Module,
    manifest: WeightManifest,
    buckets: Iterable[np.ndarray],
    version: int | None = None,
    *,
    sums: dict[str, int] | None = None,
    worker: str = "rollout worker",
) -> WeightSyncReport:
    """Load what stream_buckets published, in place, one bucket at a time. `sums`: the learner's checksums, where they
    are wanted.

    RuntimeError when the weights do not fit, are of another version than `version` (None: of any), or differ after
    loading.
    """
    started = time.monotonic()
    load_buckets(model, manifest, buckets, version)
    wrong = differences(model, manifest, sums) if sums else None
    if wrong is not None:
        raise RuntimeError(f"{worker}: weights version {manifest.version}: {wrong}")
    return _report(manifest, started, sums or {})


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


def _report(manifest: WeightManifest, started: float, sums: dict[str, int]) -> WeightSyncReport:
    checksum = digest(sums) if sums else None
    return WeightSyncReport(
        version=manifest.version, num_bytes=manifest.num_bytes, seconds=time.monotonic() - started, checksum=checksum
    )

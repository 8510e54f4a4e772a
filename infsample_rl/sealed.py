"""How a micro-group travels: sealed together with its header in one message where it is small, else behind it through the object store.

The driver reads headers only. Each item of a stream costs it about a tenth of a millisecond, so a small micro-group should not be two.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from infsample_rl.types import Completion, MicroGroupHeader

# Ray sends what is below 100 kB inside its messages (max_direct_call_object_size); the header must fit beside it.
MOST_SEALED_BYTES = 64 * 1024


class SealedMicroGroup(NamedTuple):
    """A header and the completions it tells of, which only unseal() opens.

    Example: SealedMicroGroup(header=MicroGroupHeader(...), completions=b"...")
    """

    header: MicroGroupHeader
    completions: bytes  # pickled


Payload = SealedMicroGroup | list[Completion]


def seal(items: Iterable[MicroGroupHeader | list[Completion]]) -> Iterator[SealedMicroGroup | MicroGroupHeader | list[Completion]]:
    """Of header, micro-group, header, micro-group, ...: each small micro-group in one with its header, the others as they are."""
    header = None
    for item in items:
        if isinstance(item, MicroGroupHeader):
            header = item
            continue
        is_large = sum(completion.num_bytes for completion in item) > MOST_SEALED_BYTES  # told without pickling it
        sealed = b"" if is_large else pickle.dumps(item, protocol=5)
        if is_large or len(sealed) > MOST_SEALED_BYTES:
            yield header
            yield item
        else:
            yield SealedMicroGroup(header, sealed)


def unseal(payload: Payload) -> list[Completion]:
    """The completions of a micro-group, however it came: a rollout worker of this run made the bytes, Ray carried them."""
    return pickle.loads(payload.completions) if isinstance(payload, SealedMicroGroup) else payload

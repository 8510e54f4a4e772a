"""Records as bytes, for calls that the driver makes or takes by the hundred in a step.

Ray takes bytes as they are; a record it pickles itself, with a call back into Python for every object in it and a
buffer of its own for every array, which costs the driver about twice as much. A small micro-group travels in one
message behind its header, a large one in a second through the object store.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

from infsample_rl.types import Completion, MaybeNone, MicroGroupHeader

# Ray sends what is below 100 kB inside its messages (max_direct_call_object_size); the header must fit beside it.
MOST_SEALED_BYTES = 64 * 1024

Payload = bytes | list[Completion]  # of a micro-group: sealed behind its header, or as it is


def seal(record: Any) -> bytes:
    """A record, to be opened by unseal() in another process of the run."""
    return pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)


def unseal(sealed: bytes) -> Any:
    """The record that a process of this run made bytes of; of a sealed micro-group its header, which comes first."""
    return pickle.loads(sealed)


def seal_micro_groups(
    items: Iterable[MicroGroupHeader | list[Completion]],
) -> Iterator[bytes | MicroGroupHeader | list[Completion]]:
    """Of header, micro-group, header, ...: each small micro-group in one with its header, the others as they are."""
    header: MicroGroupHeader | MaybeNone = None
    for item in items:
        if isinstance(item, MicroGroupHeader):
            header = item
            continue
        is_large = sum(completion.num_bytes for completion in item) > MOST_SEALED_BYTES  # told without pickling it
        sealed = b"" if is_large else seal(item)
        if is_large or len(sealed) > MOST_SEALED_BYTES:
            yield header
            yield item
        else:
            yield seal(header) + sealed


def open_micro_group(payload: Payload) -> list[Completion]:
    """The completions of a micro-group, however it came."""
    if not isinstance(payload, bytes):
        return payload
    records = io.BytesIO(payload)
    pickle.load(records)  # the header
    return pickle.load(records)

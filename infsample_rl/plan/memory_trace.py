"""Counts the bytes that tensors of a computation hold, on the meta device too, where tensors have shapes but no
memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTrace(TorchDispatchMode):
    """Bytes of all storages that are alive, by the `moment` in which each was made, and the fullest state of every
    moment.

    What was there before, the tensors of `apart`, is not counted. An operator's own scratch memory is not seen, only
    what it returns.
    """

    def __init__(self, apart: Iterable[Tensor]) -> None:
        super().__init__()
        self.moment = "forward"
        self.fullest: dict[str, Counter[str]] = {}  # moment -> bytes by the moment they were made in
        self._alive: Counter[str] = Counter()
        self._known = {_address(tensor) for tensor in apart}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _address(tensor) not in self._known:
                self._enter(tensor)
        return result

    def _enter(self, tensor: Tensor) -> None:
        storage, address, made_in = tensor.untyped_storage(), _address(tensor), self.moment
        self._known.add(address)
        self._alive[made_in] += storage.nbytes()
        weakref.finalize(storage, self._leave, address, made_in, storage.nbytes())
        if self._alive.total() > self.fullest.get(self.moment, Counter()).total():
            self.fullest[self.moment] = self._alive.copy()

    def _leave(self, address: int, made_in: str, num_bytes: int) -> None:
        self._known.discard(address)
        self._alive[made_in] -= num_bytes


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

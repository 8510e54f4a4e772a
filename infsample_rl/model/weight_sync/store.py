"""Where processes of a run meet: a TCP store that listens at one address, and whose values are signed.

A TCPStore lets whoever reaches its port write, list and delete its keys. So every value carries an HMAC-SHA256 of key
and value with a secret that only the run's processes have: they get it from each other through Ray. Who has not got it
can hold a run up, and read what stands there, but nothing that it writes is believed.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import secrets
import socket
from typing import NamedTuple

import torch.distributed as dist

_SIGNATURE_BYTES = 32


class StoreAddress(NamedTuple):
    """Where a store is and what its values are signed with. Goes from process to process as an argument, into no log.

    Example: StoreAddress("10.0.0.2", 43211, secrets.token_bytes(32))
    """

    host: str
    port: int
    secret: bytes

    def __repr__(self) -> str:
        return f"StoreAddress({self.host}:{self.port})"


class SignedStore(dist.Store):
    """Values of a TCPStore that were signed by this run; get() raises a RuntimeError for another one's.

    Counters (add) are the store's own and not signed: they say how many have come, never what. `plain` is the store
    without signatures, for NCCL, whose threads call it where no Python may run. Keep a reference for as long as a
    process group has one: its calls end here, and C++ keeps no Python object alive.
    """

    def __init__(self, store: dist.Store, secret: bytes) -> None:
        super().__init__()
        self.plain, self._secret = store, secret
        self._clones: list[SignedStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Sign a value and keep it."""
        plain = value.encode() if isinstance(value, str) else bytes(value)
        signed: object = self._signature(key, plain) + plain
        self.plain.set(key, signed)  # type: ignore[arg-type]  # its hints lack bytes

    def get(self, key: str) -> bytes:
        """Wait for a value. RuntimeError where it does not have the run's signature."""
        signed = self.plain.get(key)
        plain = signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signed[:_SIGNATURE_BYTES], self._signature(key, plain)):
            raise RuntimeError(f"the run's store holds a value of '{key}' that no process of the run has written")
        return plain

    def add(self, key: str, amount: int) -> int:
        """Count."""
        return self.plain.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys are there."""
        return self.plain.check(keys)

    def wait(self, keys: list[str], *timeout: datetime.timedelta) -> None:
        """Wait until all of these keys are there."""
        self.plain.wait(keys, *timeout)

    def delete_key(self, key: str) -> bool:
        """Drop a value; whether it was there."""
        return self.plain.delete_key(key)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self.plain.num_keys()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long get() and wait() wait."""
        super().set_timeout(timeout)
        self.plain.set_timeout(timeout)

    def clone(self) -> SignedStore:
        """Another connection to the same store."""
        self._clones.append(SignedStore(self.plain.clone(), self._secret))  # type: ignore[attr-defined]  # no hint of it
        return self._clones[-1]

    def _signature(self, key: str, plain: bytes) -> bytes:
        # the key's length first: no other split of key and value has the same signature
        return hmac.digest(self._secret, b"%d:%b%b" % (len(key.encode()), key.encode(), plain), hashlib.sha256)


def host_store(host: str, timeout_s: float) -> tuple[SignedStore, StoreAddress]:
    """A store that listens at this address of this machine and no other, on a free port, and where others find it."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),  # else it would listen at every address of the machine
        )
    address = StoreAddress(host, port, secrets.token_bytes(32))
    return SignedStore(store, address.secret), address


def open_store(address: StoreAddress, timeout_s: float) -> SignedStore:
    """The store of another process; RuntimeError when it cannot be reached in time."""
    limit = datetime.timedelta(seconds=timeout_s)
    return SignedStore(dist.TCPStore(address.host, address.port, is_master=False, timeout=limit), address.secret)

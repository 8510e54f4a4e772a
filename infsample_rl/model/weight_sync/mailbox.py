"""Words between learner rank 0 and the rollout workers, through a TCP store that rank 0 hosts on a free port.

Every wait has an end: at the time limit, when another member says that it failed, or when the store's host is gone; the
error names whom it waited for.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_LOOK_S = 0.1  # how often a waiting member looks whether another one failed


def host_store(timeout_s: float) -> dist.TCPStore:
    """The store of learner rank 0, on a free port, its .port: bound before anyone hears of it, as a port that is looked
    up as free may be taken before it is bound."""
    return dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=timeout_s)
    )


def open_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The store of learner rank 0; RuntimeError when it cannot be reached in time."""
    return dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))


class _Late(RuntimeError):
    """The time limit is over."""


def member_name(member: int) -> str:
    """Example: member_name(0) -> "learner rank 0", member_name(3) -> "rollout worker 2" """
    return "learner rank 0" if member == 0 else f"rollout worker {member - 1}"


class Mailbox:
    """One member's end: 0 is learner rank 0, 1 to members - 1 are the rollout workers. Every word belongs to one
    transfer."""

    def __init__(self, store: dist.TCPStore, member: int, members: int, timeout_s: float) -> None:
        self.store, self.member, self.members, self.timeout_s = store, member, members, timeout_s
        self.name = member_name(member)
        self._transfer = 0
        self._read: list[str] = []

    def begin(self) -> None:
        """Begin a transfer; member 0 drops the words of the one before, which all have read."""
        for key in self._read if self.member == 0 else []:
            self.store.delete_key(key)
        self._transfer, self._read = self._transfer + 1, []

    def tell(self, what: str, value: Any) -> None:
        """Say something that JSON can hold, to all members."""
        self._read.append(self._key(what))
        self.store.set(self._key(what), json.dumps(value))

    def hear(self, what: str, member: int = 0) -> Any:
        """Wait for what `member` tells. RuntimeError at the time limit, when a member failed, when the learner is
        gone."""
        key = self._key(what)
        self.until(lambda: self.store.check([key]), f"{member_name(member)} did not send '{what}'")
        self._read.append(key)
        return json.loads(self.store.get(key))

    def hear_all(self, what: str) -> list[Any]:
        """What every rollout worker tells under its own number; RuntimeError names those that do not."""
        members = range(1, self.members)
        keys = [self._key(f"{what}/{member}") for member in members]
        try:
            self.until(lambda: self.store.check(keys), "")
        except _Late:
            raise RuntimeError(f"{', '.join(self.silent(what))} did not send '{what}' within {self._limit}") from None
        return [self.hear(f"{what}/{member}", member) for member in members]

    def silent(self, what: str) -> list[str]:
        """The rollout workers that have not told this."""
        return [
            member_name(member)
            for member in range(1, self.members)
            if not self.store.check([self._key(f"{what}/{member}")])
        ]

    def fail(self, reason: str) -> None:
        """Tell every member that waits that this transfer failed."""
        self.store.set(self._key("failed"), json.dumps(f"{self.name}: {reason}"))

    def until(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait. RuntimeError at the time limit, saying `what` did not happen, or with what another member failed
        with."""
        started = looked = time.monotonic()
        pause = 0.0002
        try:
            while not is_done():
                now = time.monotonic()
                if now - looked > _LOOK_S:
                    looked = now
                    self._raise_failure()
                if now - started > self.timeout_s:
                    raise _Late(f"{what} within {self._limit}")
                time.sleep(pause)
                pause = min(0.02, pause * 1.1)
        except dist.DistNetworkError as error:
            raise RuntimeError(f"learner rank 0 is gone: {what}") from error

    def has_learner(self) -> bool:
        """Whether learner rank 0, which hosts the store, can still be reached."""
        try:
            self.store.check(["any"])
        except dist.DistNetworkError:
            return False
        return True

    def _raise_failure(self) -> None:
        if self.store.check([self._key("failed")]):
            raise RuntimeError(json.loads(self.store.get(self._key("failed"))))

    @property
    def _limit(self) -> str:
        return f"{self.timeout_s:g} s (a quarter of cluster.progress_timeout_s)"

    def _key(self, what: str) -> str:
        return f"{self._transfer}/{what}"

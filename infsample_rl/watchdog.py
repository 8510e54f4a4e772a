"""Whether what is in flight still moves, and what is said of it when it does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import ray

from infsample_rl.config import Config
from infsample_rl.failures import worker_name
from infsample_rl.in_flight import Call, Return, Stream
from infsample_rl.ray_calls import ANSWER_S, Patience, standing

SHOWN = 8  # workers named in a line


class Watchdog:
    """Of one wait. A rollout's deadline is on its running steps, not on its time; a reward's has the limits of its samples added."""

    def __init__(self, config: Config, note: Callable[[str], None]) -> None:
        self._config, self._note = config, note
        self._patience = Patience(note)
        self._heartbeats: dict[int, int] = {}  # running steps by stream

    def moved(self) -> None:
        """Something has arrived."""
        self._patience.moved()

    def silence(self, streams: list[Stream], calls: list[Call], returns: list[Return]) -> str | None:
        """Nothing has arrived: say what is waited for, from time to time. Why it has to be given up, once it has lasted too long."""
        if not self._patience.say(_names(streams, calls, returns)):
            return None
        found = _running_steps(streams)
        if any(self._heartbeats.get(number) != steps for number, steps in found.items()):
            self._patience.moved()
        self._heartbeats |= found
        if self._patience.idle_s <= self._limit_s(calls):
            return None
        said = f"nothing has moved for {self._patience.idle_s:.0f} s (cluster.progress_timeout_s={self._config.cluster.progress_timeout_s:g})"
        silent = {("rollout", item.index): item.handle for item in (*streams, *returns)}
        silent |= {(call.role, call.index): call.handle for call in calls}
        for (role, index), handle in silent.items():
            self._note(f"{worker_name(role, index)}: {said}; {standing(handle)}")
        self._patience.moved()
        return said

    def _limit_s(self, calls: list[Call]) -> float:
        limit = self._config.cluster.progress_timeout_s
        micro_groups = max((len(call.keys) for call in calls if call.role == "reward"), default=0)
        # Every sample may use up its reward limit.
        return limit + micro_groups * self._config.rollout.micro_group * self._config.reward.timeout_s * len(self._config.reward.functions)


def _names(streams: Iterable[Stream], calls: Iterable[Call], returns: Iterable[Return]) -> str:
    names = [worker_name("rollout", stream.index) for stream in streams]
    names += sorted({worker_name(call.role, call.index) for call in calls})
    names += [f"{worker_name('rollout', back.index)} to start" for back in returns]
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _running_steps(streams: list[Stream]) -> dict[int, int]:
    """Of the workers that answer, since their start, by the number of their stream."""
    asked = {stream.handle.progress.remote(): stream.number for stream in streams}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
    steps = {}
    for ref in answered:
        with contextlib.suppress(ray.exceptions.RayError):  # a death is dealt with where its results are opened
            steps[asked[ref]] = ray.get(ref)
    return steps

"""Starts the members of a weight link as real processes."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # link_members.py is imported by name in the processes


class Members:
    """Processes of run_member; results[member] is what each has reported."""

    def __init__(self, plan, count=3):
        import link_members

        context = multiprocessing.get_context("forkserver")  # one import of torch for all members of all tests
        context.set_forkserver_preload(
            ["transformers.models.qwen3.modeling_qwen3", "infsample_rl.model.weight_sync.sync"]
        )
        self.results: dict[int, list] = {member: [] for member in range(count)}
        self.pids: dict[int, int] = {}
        self.half, self.go_on = context.Event(), context.Event()
        self._queue, self._ports = context.Queue(), context.Queue()  # kept: their semaphores go with them
        arguments = (count, plan, self._ports, self.half, self.go_on, self._queue)
        self.processes = [
            context.Process(target=link_members.run_member, args=(member, *arguments), daemon=True)
            for member in range(count)
        ]
        for process in self.processes:
            process.start()

    def kill(self, member: int, what: signal.Signals = signal.SIGKILL) -> None:
        """Kill (or stop) a member in the middle of the version that the plan pauses in; then let the learner go on."""
        assert self.half.wait(60)
        os.kill(self.processes[member].pid, what)
        if member != 0:  # a dead waiter would be waited for
            self.go_on.set()

    def finish(self, members=None, limit_s=60.0):
        """Wait for the end of `members` (default: all); their results."""
        left, deadline = set(self.results if members is None else members), time.monotonic() + limit_s
        while left and time.monotonic() < deadline:
            try:
                member, result = self._queue.get(timeout=1.0)
            except queue.Empty:
                continue
            if isinstance(result, int):
                self.pids[member] = result
            elif result == "end":
                left.discard(member)
            else:
                self.results[member].append(result)
        self.stop()
        assert not left, f"members {left} did not end within {limit_s} s: {self.results}"
        return self.results

    def stop(self):
        """End every process."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


@pytest.fixture
def start_members():
    """start_members(plan, count=3): Members that are stopped after the test."""
    started = []

    def start(plan, count=3):
        started.append(Members(plan, count))
        return started[-1]

    yield start
    for members in started:
        members.stop()

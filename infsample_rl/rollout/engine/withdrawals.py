"""Samples of a running stream that have not started, asked back from another thread."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from infsample_rl.rollout.schedule.step_planner import StepPlanner


class Withdrawals:
    """Asked for at any time, answered between the running steps of the stream that is open."""

    def __init__(self) -> None:
        self.is_open = False  # whether a stream runs, which will answer
        self._asked: deque[Future[dict[int, list[int]]]] = deque()

    def ask(self) -> dict[int, list[int]]:
        """From another thread: half of the samples of the stream that have not started, which it leaves out.
        {prompt_index: sample indices}."""
        asked: Future[dict[int, list[int]]] = Future()
        self._asked.append(asked)
        while True:
            try:
                return asked.result(timeout=0.1)
            except TimeoutError:
                if not self.is_open and asked.cancel():
                    return {}

    def answer(self, planner: StepPlanner) -> None:
        """Give what was asked for since the last time."""
        while self._asked:
            asked = self._asked.popleft()
            if asked.set_running_or_notify_cancel():
                asked.set_result(planner.give_back())

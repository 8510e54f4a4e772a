"""The line of requests before `serve`'s engine: who waits, who goes away, who fails."""

from __future__ import annotations

import threading
from contextlib import suppress

import openai
import pytest

from infsample_rl.commands.serve.parameters import WITHOUT_SEED, SampleRequest
from infsample_rl.commands.serve.request_queue import QueueClosed, QueueFull, RequestQueue
from infsample_rl.commands.serve.server import Server
from infsample_rl.rollout.engine.sampler import EVALUATION, sample_key
from tests.served import chat, start
from tests.tiny_models import finished
from tests.waiting import wait_until


class GatedEngine:
    """Waits for leave in every call; a prompt of two tokens does not fit into its pool."""

    def __init__(self, config) -> None:
        self.config, self.calls = config, 0
        self.entered, self.may_go_on = threading.Event(), threading.Semaphore(0)

    def sample_by(self, config):
        pass

    def stream(self, prompts, seed, *, prompt_indices, **options):
        self.calls += 1
        self.entered.set()
        assert self.may_go_on.acquire(timeout=60)
        if any(len(ids) == 2 for ids in prompts):
            raise ValueError("it does not fit")
        for index in prompt_indices:
            yield [finished(index, 0, [5], 0.0)]


def test_a_client_that_goes_away_costs_its_companions_nothing(running):
    served = running.server._served
    engine = GatedEngine(served.config.rollout)
    queue = RequestQueue(engine, 0, most_waiting=3)
    found, stop = start(Server(served, queue))
    threads, answers = [], list[str]()

    def ask(timeout: float) -> None:
        with suppress(openai.APITimeoutError):
            answers.append(chat(found, timeout=timeout).choices[0].finish_reason)

    for timeout in (60, 60, 2, 60):
        threads.append(threading.Thread(target=ask, args=(timeout,)))
        threads[-1].start()
        wait_until(lambda: engine.entered.is_set() and len(queue._line) == len(threads) - 1)
    engine.may_go_on.release()
    threads[2].join(60)  # it was at the engine with two others
    engine.may_go_on.release()
    for thread in threads:
        thread.join(60)
    assert (answers, engine.calls) == (["stop"] * 3, 2)
    stop()


def test_a_request_that_fails_fails_alone_and_whoever_waits_at_the_end_is_told(running):
    """One of its prompts does not fit into the pool; the engine is asked for both at once."""
    engine = GatedEngine(running.server._served.config.rollout)
    entered, may_go_on = engine.entered, engine.may_go_on
    queue = RequestQueue(engine, 0, most_waiting=3)
    config = engine.config
    first = queue.submit(SampleRequest([1], 1, None, config))
    assert entered.wait(60)
    fits, too_long, gone = (queue.submit(SampleRequest(ids, 1, None, config)) for ids in ([1], [1, 2], [1]))
    with pytest.raises(QueueFull):
        queue.submit(SampleRequest([1], 1, None, config))
    gone.is_abandoned = True
    may_go_on.release(4)
    assert [len(each.completions.result(60)) for each in (first, fits)] == [1, 1]
    with pytest.raises(ValueError, match="it does not fit"):
        too_long.completions.result(60)
    assert engine.calls == 4 and not gone.completions.done(), "one, two at once, each alone"
    entered.clear()
    at_work = queue.submit(SampleRequest([1], 1, None, config))
    assert entered.wait(60)
    in_line = queue.submit(SampleRequest([1], 1, None, config))
    assert not in_line.completions.cancel(), "what a client that goes away does"
    threading.Timer(0.2, may_go_on.release).start()
    queue.close()
    assert len(at_work.completions.result(1)) == 1
    for late in (in_line, None):
        with pytest.raises(QueueClosed):
            late.completions.result(1) if late else queue.submit(SampleRequest([1], 1, None, config))


def test_the_noise_without_a_seed_is_of_no_seed():
    numbers = [*range(3), *range(-3, 0), *range(WITHOUT_SEED, WITHOUT_SEED + 3)]
    assert len({sample_key(0, EVALUATION, 0, number, 0) for number in numbers}) == len(numbers)

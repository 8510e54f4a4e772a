"""Streams of rollout workers: what their items are taken for, and who is asked for work. Handles and references are plain objects."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from infsample_rl import rollout_streams
from infsample_rl.config_loading import load_config
from infsample_rl.failures import WorkerLost
from infsample_rl.phases import WorkerPhases
from infsample_rl.rollout_streams import RolloutStreams
from infsample_rl.sealed import MOST_SEALED_BYTES, SealedMicroGroup, seal, unseal
from infsample_rl.types import Completion, MicroGroupHeader, RolloutWork, StreamEnd


class Ref:
    """A reference, and what it holds."""

    def __init__(self, value):
        self.value = value


class Method:
    def __init__(self, answer):
        self.calls, self._answer = 0, answer

    def options(self, **options):
        return self

    def remote(self, *arguments):
        self.calls += 1
        return self._answer()


class Handle:
    """A rollout worker that yields `items`, and says that it has none to give back."""

    def __init__(self, items):
        self.stream, self.give_back = Method(lambda: iter([Ref(item) for item in items])), Method(lambda: Ref({}))


class Crew:
    def __init__(self, handles):
        self._handles = dict(enumerate(handles))

    def all(self, role):
        return self._handles


def header(samples, num_waiting):
    lengths, ends = [4] * len(samples), ["stop"] * len(samples)
    return MicroGroupHeader(
        prompt_index=0, sample_indices=samples, lengths=lengths, finish_reasons=ends, policy_version=0, finished_at=1.0, num_waiting=num_waiting
    )


def end(worker, steps=7.0):
    return StreamEnd(worker=worker, stats={"running_steps": steps}, phases=WorkerPhases("rollout", worker, "here", [], 2.0))


def started(*items):
    """Streams of workers that yield these, each dealt samples of prompt 0."""
    handles = [Handle(found) for found in items]
    streams = RolloutStreams(load_config([]), Crew(handles), print, lambda index: None)
    streams.begin_version(set(range(len(handles))))
    samples = [list(range(4 * index, 4 * index + 4)) for index in range(len(items))]
    work = [RolloutWork(prompt_index=0, prompt_ids=np.zeros(1, np.int32), sample_indices=indices) for indices in samples]
    streams.start([[item] for item in work], step=0, evaluation=False)
    return streams, handles


def take(streams, index, items=1):
    """What comes of the next items of a worker's stream."""
    (generator,) = [ref for ref in streams.waited() if streams._streams.get(ref) and streams._streams[ref].index == index]
    found = []
    for _ in range(items):
        opened = {ref: ref.value for ref in streams.advance([generator])}
        found.append(streams.take(generator, opened))
    return [one for one in found if one is not None]


def test_a_micro_group_comes_with_its_header_and_the_end_with_figures_and_phases():
    streams, _ = started([header([0, 1], 2), ["tokens of 0 and 1"], header([2, 3], 0), ["tokens of 2 and 3"], end(0)])
    (first,) = take(streams, 0, items=2)
    assert (first.header.sample_indices, first.payload.value, first.work.sample_indices) == ([0, 1], ["tokens of 0 and 1"], [0, 1])
    assert streams.num_owed == 2 and not streams.is_done
    (second,) = take(streams, 0, items=2)
    assert second.work.sample_indices == [2, 3] and streams.num_owed == 0 and not streams.is_done, "its end is still to come"
    assert take(streams, 0, items=2) == [] and streams.is_done
    assert streams.ends == [end(0)] and streams.take_phases() == [end(0).phases] and streams.take_phases() == []
    streams.start([[]], step=1, evaluation=False)
    assert streams.ends == []


def completion(sample_index, tokens):
    return Completion(
        prompt_index=0,
        sample_index=sample_index,
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        sampling_logprobs=None,
        finish_reason="stop",
        policy_version=0,
    )


def test_a_small_micro_group_is_one_item_with_its_header_and_a_large_one_is_two():
    small, large = [completion(0, 4), completion(1, 4)], [completion(2, MOST_SEALED_BYTES // 8), completion(3, 1)]
    items = list(seal(iter([header([0, 1], 2), small, header([2, 3], 0), large])))
    assert [type(item) for item in items] == [SealedMicroGroup, MicroGroupHeader, list]
    many_short = [completion(index, 15) for index in range(512)]  # 61,440 bytes of arrays, 140,000 with what pickle adds
    assert [type(item) for item in seal(iter([header([0], 0), many_short]))] == [MicroGroupHeader, list]
    streams, _ = started([*items, end(0)])
    (first,) = take(streams, 0)
    assert (first.header.sample_indices, first.work.sample_indices, streams.num_owed) == ([0, 1], [0, 1], 2)
    assert [(one.sample_index, one.token_ids.tolist()) for one in unseal(first.payload.value)] == [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3])]
    assert take(streams, 0) == []
    (second,) = take(streams, 0)
    assert second.header.sample_indices == [2, 3] and unseal(second.payload.value) is large
    take(streams, 0)
    assert streams.is_done and streams.ends == [end(0)]


def test_a_stream_whose_worker_is_gone_deals_what_it_owes_again(monkeypatch):
    def gone(ref, role, index, opened=None):
        if ref.value == "gone":
            raise WorkerLost(role, index, "its process died")
        return ref.value

    monkeypatch.setattr(rollout_streams, "value_of", gone)
    streams, handles = started([SealedMicroGroup(header([0, 1], 2), pickle.dumps([])), "gone"])
    replaced = []
    streams._crew.is_current, streams._crew.replace = lambda role, index, handle: True, lambda lost: replaced.append(lost.index)
    streams._bring_back = lambda index: ([], Ref(None))
    take(streams, 0, items=2)
    assert replaced == [0] and streams.num_owed == 2 and not streams.streams
    assert [work.sample_indices for work in streams._backlog] == [[2, 3]]


@pytest.mark.parametrize(("num_waiting", "asked"), [(0, 0), (1, 0), (2, 1)])
def test_a_worker_is_asked_for_work_only_where_its_last_header_says_that_it_has_some(num_waiting, asked):
    streams, handles = started([end(0)], [header([4, 5], num_waiting), ["tokens"], header([6, 7], 0), ["tokens"], end(1)])
    take(streams, 1, items=2)
    take(streams, 0, items=2)  # worker 0 is idle now
    assert handles[1].give_back.calls == asked
    assert handles[0].give_back.calls == 0


def test_a_worker_of_which_nothing_is_known_yet_is_asked():
    streams, handles = started([end(0)], [header([4, 5], 0), ["tokens"], end(1)])
    take(streams, 0, items=2)
    assert handles[1].give_back.calls == 1

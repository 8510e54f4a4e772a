"""Streams of rollout workers: what their items are taken for, and who is asked for work. Handles and references are
plain objects."""

from __future__ import annotations

import numpy as np
import pytest

from infsample_rl.cluster import streams as rollout_streams
from infsample_rl.cluster.failures import StepLost, WorkerLost
from infsample_rl.cluster.messages import MOST_SEALED_BYTES, SealedOnce, open_micro_group, seal_micro_groups, unseal
from infsample_rl.cluster.streams import RolloutStreams
from infsample_rl.config.loading import load_config
from infsample_rl.types import Completion, MicroGroupHeader, RolloutWork, StreamEnd, WorkerPhases


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
        prompt_index=0,
        sample_indices=samples,
        lengths=lengths,
        finish_reasons=ends,
        policy_version=0,
        finished_at=1.0,
        num_waiting=num_waiting,
    )


def end(worker, steps=7.0):
    return StreamEnd(
        worker=worker, stats={"running_steps": steps}, phases=WorkerPhases("rollout", worker, "here", [], 2.0)
    )


def whole(worker):
    """What a worker yields that sends all its samples at once."""
    return [header(list(range(4 * worker, 4 * worker + 4)), 0), ["t"], end(worker)]


def started(*items):
    """Streams of workers that yield these, each dealt samples of prompt 0."""
    handles = [Handle(found) for found in items]
    streams = RolloutStreams(load_config([]), Crew(handles), print, lambda index: None)
    streams.begin_version(set(range(len(handles))))
    samples = [list(range(4 * index, 4 * index + 4)) for index in range(len(items))]
    work = [
        RolloutWork(prompt_index=0, prompt_ids=np.zeros(1, np.int32), sample_indices=indices) for indices in samples
    ]
    streams.start([[item] for item in work], step=0, evaluation=False)
    return streams, handles


def take(streams, index, items=1):
    """What comes of the next items of a worker's stream."""
    (generator,) = [
        ref for ref in streams.waited() if streams._streams.get(ref) and streams._streams[ref].index == index
    ]
    found = []
    for _ in range(items):
        opened = {ref: ref.value for ref in streams.advance([generator])}
        found.append(streams.take(generator, opened))
    return [one for one in found if one is not None]


def test_a_micro_group_comes_with_its_header_and_the_end_with_figures_and_phases():
    streams, _ = started([header([0, 1], 2), ["tokens of 0 and 1"], header([2, 3], 0), ["tokens of 2 and 3"], end(0)])
    (first,) = take(streams, 0, items=2)
    assert (first.header.sample_indices, first.payload.value, first.work.sample_indices) == (
        [0, 1],
        ["tokens of 0 and 1"],
        [0, 1],
    )
    assert streams.num_owed == 2 and not streams.is_done
    (second,) = take(streams, 0, items=2)
    assert second.work.sample_indices == [2, 3] and streams.num_owed == 0 and not streams.is_done, (
        "its end is still to come"
    )
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


def test_a_record_is_sealed_once_for_as_long_as_it_is_kept():
    sealed, prompt = SealedOnce(), {"text": "1 + 1 = ?"}
    first = sealed(prompt)
    prompt["text"] = "changed since"
    assert unseal(first) == {"text": "1 + 1 = ?"} and sealed(prompt) is first
    assert sealed({"text": "another"}) != first
    sealed.clear()
    assert unseal(sealed(prompt)) == {"text": "changed since"}


def test_a_small_micro_group_is_one_item_with_its_header_and_a_large_one_is_two():
    small, large = [completion(0, 4), completion(1, 4)], [completion(2, MOST_SEALED_BYTES // 8), completion(3, 1)]
    items = list(seal_micro_groups(iter([header([0, 1], 2), small, header([2, 3], 0), large])))
    assert [type(item) for item in items] == [bytes, MicroGroupHeader, list]
    assert unseal(items[0]) == header([0, 1], 2)
    # 61,440 bytes of arrays, 140,000 with what pickle adds
    many_short = [completion(index, 15) for index in range(512)]
    assert [type(item) for item in seal_micro_groups(iter([header([0], 0), many_short]))] == [MicroGroupHeader, list]
    streams, _ = started([*items, end(0)])
    (first,) = take(streams, 0)
    assert (first.header.sample_indices, first.work.sample_indices, streams.num_owed) == ([0, 1], [0, 1], 2)
    assert [(one.sample_index, one.token_ids.tolist()) for one in open_micro_group(first.payload.value)] == [
        (0, [0, 1, 2, 3]),
        (1, [0, 1, 2, 3]),
    ]
    assert take(streams, 0) == []
    (second,) = take(streams, 0)
    assert second.header.sample_indices == [2, 3] and open_micro_group(second.payload.value) is large
    take(streams, 0)
    assert streams.is_done and streams.ends == [end(0)]


@pytest.fixture(autouse=True)
def values(monkeypatch):
    """What references hold; "gone" is that of a worker whose process died."""

    def value_of(ref, role, index, opened=None):
        if isinstance(ref.value, str) and ref.value == "gone":
            raise WorkerLost(role, index, "its process died")
        return ref.value

    monkeypatch.setattr(rollout_streams, "value_of", value_of)


def test_a_stream_whose_worker_is_gone_deals_what_it_owes_again():
    streams, handles = started([*seal_micro_groups([header([0, 1], 2), []]), "gone"])
    replaced = []
    streams._crew.is_current, streams._crew.replace = (
        lambda role, index, handle: True,
        lambda lost: replaced.append(lost.index) or "a new one",
    )
    streams._bring_back = lambda index: ([], Ref(None))
    take(streams, 0, items=2)
    assert replaced == [0] and streams.num_owed == 2 and not streams.streams
    assert [work.sample_indices for work in streams._backlog] == [[2, 3]]


@pytest.mark.parametrize(("num_waiting", "asked"), [(0, 0), (1, 0), (2, 1)])
def test_a_worker_is_asked_for_work_only_where_its_last_header_says_that_it_has_some(num_waiting, asked):
    streams, handles = started(
        whole(0), [header([4, 5], num_waiting), ["tokens"], header([6, 7], 0), ["tokens"], end(1)]
    )
    take(streams, 1, items=2)
    take(streams, 0, items=4)  # worker 0 is idle now
    assert handles[1].give_back.calls == asked
    assert handles[0].give_back.calls == 0


def test_a_worker_of_which_nothing_is_known_yet_is_asked():
    streams, handles = started(whole(0), [header([4, 5], 0), ["tokens"], end(1)])
    take(streams, 0, items=4)
    assert handles[1].give_back.calls == 1


def dealt(streams):
    """Samples that streams owe."""
    return sorted(index for stream in streams.streams for work in stream.owed.values() for index in work.sample_indices)


def replaceable(streams):
    """References of the calls in which workers in place of lost ones load the weights, and the indices of the lost."""
    loading, lost_ones = {}, []
    streams._crew.is_current, streams._crew.replace = (
        lambda *arguments: True,
        lambda lost: lost_ones.append(lost.index) or "a new one",
    )
    streams._bring_back = lambda index: ([], loading.setdefault(index, Ref(None)))
    return loading, lost_ones


@pytest.fixture
def lost_one():
    """Worker 0 has died owing samples 2 and 3, and another is loading the weights in its place; worker 1 owes 6 and
    7."""
    streams, handles = started(
        [header([0, 1], 2), ["t"], "gone"], [header([4, 5], 2), ["t"], header([6, 7], 0), ["t"], end(1)]
    )
    loading, lost_ones = replaceable(streams)
    take(streams, 0, items=3)
    return streams, handles, loading[0], lost_ones


def test_a_new_worker_is_ready_once_it_holds_the_weights_that_sample(lost_one):
    streams, _, loaded, _ = lost_one
    assert streams.ready == {1} and [back.index for back in streams.returns] == [0]
    assert streams.take(loaded, {}) is None and streams.ready == {0, 1} and streams.returns == []


def test_a_new_worker_that_holds_the_version_before_is_not_ready(lost_one):
    streams, _, loaded, _ = lost_one
    streams.begin_version({1})
    streams.take(loaded, {})
    assert streams.ready == {1}


def test_samples_that_were_lost_are_dealt_once_to_a_worker_that_is_idle(lost_one):
    streams, _, _, _ = lost_one
    # they had arrived
    streams.draw_again(
        RolloutWork(prompt_index=0, prompt_ids=np.zeros(1, np.int32), sample_indices=[0, 1]), "a node is gone"
    )
    take(streams, 1, items=5)
    for _ in range(2):
        streams.deal_backlog()
        assert dealt(streams) == [0, 1, 2, 3] and streams.num_owed == 4


def test_late_news_of_a_dead_worker_leave_its_successor_alone(lost_one):
    streams, handles, _, lost_ones = lost_one
    streams._crew.is_current = lambda *arguments: False
    streams.lose(WorkerLost("rollout", 1, "its process died"), handles[1])
    assert lost_ones == [0] and 1 in streams.ready


def test_a_silent_worker_is_replaced_and_no_other_whether_it_decodes_or_is_on_its_way(lost_one):
    streams, _, _, lost_ones = lost_one
    streams._bring_back = lambda index: ([], Ref(index))
    streams.give_up(WorkerLost("rollout", 0, "it has not moved for 601 s"))
    assert (
        lost_ones == [0, 0]
        and [back.index for back in streams.returns] == [0]
        and [stream.index for stream in streams.streams] == [1]
    )
    streams.give_up(WorkerLost("rollout", 1, "it has not moved for 601 s"))
    assert lost_ones == [0, 0, 1] and [back.index for back in streams.returns] == [0, 1] and not streams.streams
    assert sorted(index for work in streams._backlog for index in work.sample_indices) == [2, 3, 4, 5, 6, 7]


def test_a_worker_that_is_silent_when_asked_for_work_is_replaced_also_after_its_stream():
    streams, _ = started(whole(0), [header([4, 5], 2), ["t"], end(1)])
    _, lost_ones = replaceable(streams)
    take(streams, 0, items=4)
    take(streams, 1, items=4)  # it gave 6 and 7 back, and its answer has not come
    assert [stream.index for stream in streams.waited_for] == [1] and not streams.streams and not streams.is_done
    streams.give_up(WorkerLost("rollout", 1, "it has not moved for 601 s"))
    assert lost_ones == [1] and streams.waited_for == [] and streams.num_owed == 2


def test_a_silent_worker_that_decodes_and_is_asked_for_work_owes_nothing_twice():
    streams, _ = started(whole(0), [header([4, 5], 2), ["t"], end(1)])
    _, lost_ones = replaceable(streams)
    take(streams, 0, items=4)
    assert len(streams.waited_for) == 1
    streams.give_up(WorkerLost("rollout", 1, "it has not moved for 601 s"))
    assert lost_ones == [1] and streams.num_owed == 4 and streams.waited_for == []


@pytest.mark.parametrize("evaluation", [False, True])
def test_dynamic_slot_loses_the_step_with_a_worker_but_not_an_evaluation(monkeypatch, evaluation):
    streams, _ = started([end(0)], [end(1)])
    replaceable(streams)
    monkeypatch.setattr(streams._config.rollout, "schedule", "dynamic_slot")
    streams._batch = (0, evaluation)
    generator, lost = next(iter(streams._streams)), WorkerLost("rollout", 0, "its process died")
    if evaluation:
        streams._lose_stream(generator, lost)
        assert streams.num_owed == 8
    else:
        with pytest.raises(StepLost, match="rollout.schedule=dynamic_slot"):
            streams._lose_stream(generator, lost)


def asked(given):
    """Worker 0 is idle, and worker 1, which owes 5, 6 and 7, has been asked: it will answer `given`."""
    streams, handles = started(whole(0), [header([4], 3), ["t"], end(1)])
    handles[1].give_back = Method(lambda: Ref(given))
    take(streams, 1, items=2)
    take(streams, 0, items=4)
    (ref,) = streams._asked_back
    return streams, handles, ref


def test_samples_that_are_given_back_are_owed_no_more_and_counted():
    streams, _, ref = asked({0: [6, 7]})
    streams.take(ref, {})
    (stream,) = streams.streams
    assert (
        [work.sample_indices for work in streams._backlog] == [[6, 7]]
        and stream.owed[0].sample_indices == [5]
        and streams.num_moved == 2
    )


def test_all_that_is_given_back_leaves_nothing_owed():
    streams, _, ref = asked({0: [5, 6, 7]})
    streams.take(ref, {})
    assert [work.sample_indices for work in streams._backlog] == [[5, 6, 7]] and dealt(streams) == []


def test_a_worker_that_had_nothing_to_give_is_not_asked_again():
    streams, handles, ref = asked({})
    streams.take(ref, {})
    assert handles[1].give_back.calls == 1 and streams._asked_back == {}


def test_what_a_worker_gave_back_before_it_died_is_dealt_once():
    streams, _, ref = asked({0: [6, 7]})
    replaceable(streams)
    (generator,) = streams._streams
    streams._lose_stream(generator, WorkerLost("rollout", 1, "its process died"))
    streams.take(ref, {})
    assert [work.sample_indices for work in streams._backlog] == [[5, 6, 7]]


@pytest.mark.parametrize("answer", ["gone", {0: [6, 7]}])
def test_what_a_stream_owes_at_its_end_is_dealt_again_once_the_answer_is_there_or_lost(answer):
    streams, _, ref = asked({0: [6, 7]})
    ref.value = answer
    take(streams, 1, items=2)  # its end: it sent 4 alone
    assert streams._backlog == [] and not streams.is_done, "the answer tells of the others"
    streams.take(ref, {})
    found = [work.sample_indices for work in streams._backlog]
    assert found == ([[5, 6, 7]] if answer == "gone" else [[6, 7], [5]])


def test_a_stream_that_ends_owing_what_nobody_was_asked_for_is_dealt_again():
    streams, _, ref = asked({})
    ref.value = "gone"  # for a moment only: its stream goes on
    streams.take(ref, {})
    assert streams._backlog == [] and dealt(streams) == [5, 6, 7]
    take(streams, 1, items=2)
    assert [work.sample_indices for work in streams._backlog] == [[5, 6, 7]] and streams.num_owed == 3


def test_a_stream_of_dynamic_slot_owes_nothing_at_its_end(monkeypatch):
    streams, _ = started([end(0)])
    monkeypatch.setattr(streams._config.rollout, "schedule", "dynamic_slot")
    take(streams, 0, items=2)
    assert streams.is_done


def test_dynamic_slot_loses_the_step_with_samples_that_had_arrived(monkeypatch):
    streams, _ = started(whole(0))
    monkeypatch.setattr(streams._config.rollout, "schedule", "dynamic_slot")
    with pytest.raises(StepLost, match="a node is gone; with rollout.schedule=dynamic_slot"):
        streams.draw_again(
            RolloutWork(prompt_index=0, prompt_ids=np.zeros(1, np.int32), sample_indices=[1]), "a node is gone"
        )


def test_a_worker_replaced_before_the_next_version_is_not_brought_to_this_one(lost_one):
    streams, handles, _, lost_ones = lost_one
    streams._bring_back = None  # not called: the learner has gone on, and nobody is left
    streams.replace(WorkerLost("rollout", 1, "its process died"), handles[1])
    assert lost_ones == [0, 1] and streams.ready == set()


def test_only_workers_that_are_asked_for_more_are_waited_for_when_a_step_is_given_up(monkeypatch):
    drained = []
    monkeypatch.setattr(rollout_streams, "drain", drained.append)
    for wanted in (False, True):
        streams, (handle,) = started([end(0)])
        handle.halt = Method(lambda: None)
        streams.abandon(drained=wanted)
        assert handle.halt.calls == 1 and bool(drained) == wanted


def test_a_step_that_is_given_up_leaves_nothing_to_wait_for(monkeypatch):
    streams, handles, _ = asked({0: [6, 7]})
    monkeypatch.setattr(rollout_streams, "drain", lambda generator: None)
    for handle in handles:
        handle.halt = Method(lambda: None)
    streams.abandon()
    assert streams.is_done and streams.waited() == []


def test_the_worker_that_owes_most_is_asked():
    streams, handles = started(whole(0), [header([4, 5], 2), ["t"], end(1)], whole(2))
    take(streams, 1, items=2)
    take(streams, 0, items=4)
    assert [handle.give_back.calls for handle in handles] == [0, 0, 1]


def test_who_has_not_answered_whether_it_gives_work_back_is_dealt_none():
    """Its new stream would answer, with its own samples."""
    streams, handles = started(whole(0), [header([4], 3), ["t"], header([5, 6, 7], 0), ["t"], end(1)])
    take(streams, 1, items=2)
    take(streams, 0, items=3)
    assert handles[1].give_back.calls == 1
    take(streams, 1, items=3)  # it ends, the question still open
    streams.draw_again(
        RolloutWork(prompt_index=0, prompt_ids=np.zeros(1, np.int32), sample_indices=[0, 1]), "its node is gone"
    )
    streams.deal_backlog()
    assert [stream.index for stream in streams._streams.values()] == [0]
    (question,) = streams._asked_back
    streams.take(question, {question: question.value})
    streams.draw_again(
        RolloutWork(prompt_index=0, prompt_ids=np.zeros(1, np.int32), sample_indices=[2]), "its node is gone"
    )
    streams.deal_backlog()
    assert sorted(stream.index for stream in streams._streams.values()) == [0, 1]

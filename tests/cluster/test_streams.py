"""Streams of rollout workers: what their items are taken for, who is asked for work, and what is dealt again."""

from __future__ import annotations

import numpy as np
import pytest

from infsample_rl.cluster.calls import Calls
from infsample_rl.cluster.interruption import Interruption
from infsample_rl.cluster.messages import open_micro_group, seal_micro_groups, unseal
from infsample_rl.cluster.streams import RolloutStreams
from infsample_rl.cluster.weight_delivery import WeightDelivery
from infsample_rl.cluster.workers import StepLost, WorkerLost
from infsample_rl.config.loading import load_config
from infsample_rl.types import MicroGroupHeader
from tests.fakes import DIED, Handle, Items, Method, Ref, completion, header, make_workers, stream_end, work

pytestmark = pytest.mark.usefixtures("fake_ray")
SILENT = "it has not moved for 601 s"


class Decoding:
    """Streams of workers that yield these items, each dealt four samples of prompt 0, from 4 times its index on.

    Worker `spares[n]` takes the place of the n-th that is lost.
    """

    def __init__(self, *items, settings=(), evaluation=False):
        self.handles = [self._handle(found) for found in items]
        self.spares = [self._handle([stream_end()]) for _ in range(3)]
        learner = [Handle(publish=Method("weights"))]
        self.calls = Calls(
            make_workers(spares=self.spares, rollout=list(self.handles), learner=learner), print, Interruption()
        )
        config = load_config(["learner.grad_sync=every_row", *settings])
        self.weights = WeightDelivery(config, self.calls, lambda role, index: True)
        self.weights.holders = set(range(len(items)))
        self.streams = RolloutStreams(config, self.calls, self.weights)
        dealt = [[work(0, list(range(4 * index, 4 * index + 4)))] for index in range(len(items))]
        self.streams.start(dealt, step=0, evaluation=evaluation)

    def _handle(self, items):
        loads = Method(lambda *_: Ref())
        return Handle(stream=Method(Items(items)), give_back=Method({}), load_weights=loads, halt=Method(None))

    def refs(self, kind, index):
        """What of a worker is in flight: a stream, the answer to a question for work, or a return to the weights."""
        found = [ref for ref in self.streams.waited() if self.streams.in_flight(ref).index == index]
        return [ref for ref in found if (ref in self.weights.returns, isinstance(ref, Items)) == kind]

    def take(self, index, items=1):
        """What comes of the next items of a worker's stream."""
        (generator,), found = self.refs((False, True), index), []
        for _ in range(items):
            opened = {ref: ref.value for ref in self.streams.advance([generator])}
            opened = {ref: value for ref, value in opened.items() if not isinstance(value, Exception)}
            found.append(self.streams.take(generator, opened))
        return [one for one in found if one is not None]

    def answer(self, index):
        """A worker that was asked for work answers."""
        (question,) = self.refs((False, False), index)
        self.streams.take(question, {})

    def come_back(self, index):
        """A worker in place of a lost one has loaded the weights."""
        (loaded,) = self.refs((True, False), index)
        assert self.streams.take(loaded, {}) is None

    def orders(self, handle):
        """Samples a worker was dealt, order by order."""
        return [
            sorted(i for item in unseal(order).work for i in item.sample_indices) for (order,) in handle.stream.calls
        ]

    def dealt_again(self):
        """Samples that go to the idle, order by order."""
        before = [len(handle.stream.calls) for handle in (*self.handles, *self.spares)]
        self.streams.deal_backlog()
        handles = zip((*self.handles, *self.spares), before, strict=True)
        return sorted(samples for handle, count in handles for samples in self.orders(handle)[count:])


def part(samples, num_waiting=0):
    """Header and micro-group of some samples, apart."""
    return [header(0, samples, num_waiting=num_waiting), ["tokens"]]


def whole(worker):
    """What a worker yields that sends all its samples at once."""
    return [*part(list(range(4 * worker, 4 * worker + 4))), stream_end(worker)]


def test_a_micro_group_comes_with_its_header_and_the_end_with_figures_and_phases():
    end = stream_end()
    made = Decoding([*part([0, 1], 2), *part([2, 3]), end])
    streams = made.streams
    (first,) = made.take(0, items=2)
    assert (first.header.sample_indices, first.payload.value, first.work.sample_indices) == ([0, 1], ["tokens"], [0, 1])
    assert streams.num_owed == 2 and not streams.is_done
    (second,) = made.take(0, items=2)
    assert second.work.sample_indices == [2, 3] and streams.num_owed == 0
    assert not streams.is_done, "its end is still to come"
    assert made.take(0) == [] and streams.is_done
    assert streams.ends == [end] and streams.take_phases() == [end.phases] and streams.take_phases() == []
    streams.start([[]], step=1)
    assert streams.ends == []


def test_who_had_work_in_any_round_of_a_step_counts_as_decoding():
    """It is asked what its length probe saw, also where a later round had nothing for it."""
    made = Decoding(whole(0), whole(1))
    made.streams.start([[work(1, [0])], []], step=0)
    assert made.streams.decoding == {0, 1}
    made.streams.start([[work(0, [0])], []], step=1)
    assert made.streams.decoding == {0}


def test_a_small_micro_group_is_one_item_with_its_header_and_a_large_one_is_two():
    small, large = [completion(0, 0), completion(0, 1)], [completion(0, 2, 20_000), completion(0, 3)]
    items = list(seal_micro_groups(iter([header(0, [0, 1], num_waiting=2), small, header(0, [2, 3]), large])))
    assert [type(item) for item in items] == [bytes, MicroGroupHeader, list] and unseal(items[0]) == header(
        0, [0, 1], num_waiting=2
    )
    # 61,440 bytes of arrays, 140,000 with what pickle adds
    many_short = [completion(0, index, 15) for index in range(512)]
    assert [type(item) for item in seal_micro_groups(iter([header(0, [0]), many_short]))] == [MicroGroupHeader, list]
    made = Decoding([*items, stream_end()])
    (first,) = made.take(0)
    assert (first.header.sample_indices, first.work.sample_indices, made.streams.num_owed) == ([0, 1], [0, 1], 2)
    opened = open_micro_group(first.payload.value)
    assert all(np.array_equal(one.token_ids, other.token_ids) for one, other in zip(opened, small, strict=True))
    assert made.take(0) == []
    (second,) = made.take(0)
    assert second.header.sample_indices == [2, 3] and open_micro_group(second.payload.value) is large


@pytest.mark.parametrize(("num_waiting", "asked"), [(0, 0), (1, 0), (2, 1), (None, 1)])
def test_a_worker_is_asked_for_work_where_its_last_header_says_that_it_has_some_or_nothing_is_known(num_waiting, asked):
    made = Decoding(whole(0), [*part([4, 5], num_waiting or 0), *part([6, 7]), stream_end(1)])
    if num_waiting is not None:
        made.take(1, items=2)
    made.take(0, items=3)  # worker 0 is idle now
    assert [len(handle.give_back.calls) for handle in made.handles] == [0, asked]


def test_the_worker_that_owes_most_is_asked():
    made = Decoding(whole(0), [*part([4, 5], 2), stream_end(1)], whole(2))
    made.take(1, items=2)
    made.take(0, items=3)
    assert [len(handle.give_back.calls) for handle in made.handles] == [0, 0, 1]


@pytest.fixture
def lost_one():
    """Worker 0 has died owing samples 2 and 3, and another is loading the weights in its place; worker 1 owes 6, 7."""
    made = Decoding([*part([0, 1], 2), DIED], [*part([4, 5], 2), *part([6, 7]), stream_end(1)])
    made.take(0, items=3)
    return made


def test_what_a_worker_owed_that_is_gone_is_drawn_by_the_one_in_its_place_once_it_holds_the_weights(lost_one, fake_ray):
    assert fake_ray.killed == [lost_one.handles[0]] and lost_one.weights.holders == {1}
    assert lost_one.streams.num_owed == 6 and lost_one.dealt_again() == []
    lost_one.come_back(0)
    assert lost_one.weights.holders == {0, 1} and not lost_one.weights.returns
    assert lost_one.dealt_again() == [[2, 3]] and lost_one.orders(lost_one.spares[0]) == [[2, 3]]


def test_a_round_ends_with_a_worker_for_the_next_where_the_only_one_dies_behind_its_last_samples():
    made = Decoding([*part([0, 1, 2, 3], 4), DIED])
    made.take(0, items=3)
    assert made.streams.num_owed == 0 and not made.streams.is_done
    made.come_back(0)
    assert made.streams.is_done


def test_a_worker_that_comes_back_when_all_is_dealt_gets_of_what_others_have_not_started():
    made = Decoding([DIED], [*part([4, 5], 2), stream_end(1)], whole(2))
    made.take(0)
    made.take(2, items=3)
    assert made.dealt_again() == [[0, 1, 2, 3]], "worker 2 draws all that was lost"
    made.come_back(0)
    assert [len(handle.give_back.calls) for handle in made.handles] in ([0, 1, 0], [0, 0, 1])


def test_samples_that_were_lost_are_dealt_once_to_a_worker_that_is_idle(lost_one):
    lost_one.streams.draw_again(work(0, [0, 1]), "a node is gone")  # they had arrived
    lost_one.take(1, items=5)
    assert lost_one.dealt_again() == [[0, 1, 2, 3]] and lost_one.dealt_again() == []
    assert lost_one.streams.num_owed == 4


def test_late_news_of_a_dead_worker_leave_its_successor_alone(lost_one, fake_ray):
    lost_one.streams.lose(WorkerLost("rollout", 0, "its process died"), lost_one.handles[0])
    assert len(fake_ray.killed) == 1 and lost_one.weights.holders == {1}


def test_a_silent_worker_is_replaced_and_no_other_whether_it_decodes_or_is_on_its_way(lost_one, fake_ray):
    streams, (first, second) = lost_one.streams, lost_one.handles
    streams.give_up(WorkerLost("rollout", 0, SILENT))
    assert fake_ray.killed == [first, lost_one.spares[0]] and [stream.index for stream in streams.streams] == [1]
    lost_one.come_back(0)
    streams.give_up(WorkerLost("rollout", 1, SILENT))
    assert fake_ray.killed[2:] == [second] and not streams.streams
    assert lost_one.dealt_again() == [[2, 3, 4, 5, 6, 7]]


def test_a_worker_replaced_before_the_next_version_is_not_brought_to_this_one(lost_one):
    lost_one.streams.replace(WorkerLost("rollout", 1, "its process died"), lost_one.handles[1])
    assert lost_one.weights.holders == set() and [back.index for back in lost_one.weights.returns.values()] == [0]


def test_without_a_worker_and_with_a_learner_that_has_gone_on_the_step_is_lost(lost_one):
    lost_one.weights.learner_has_moved = True
    with pytest.raises(StepLost, match="no rollout worker is left"):
        lost_one.streams.lose(WorkerLost("rollout", 1, "its process died"), lost_one.handles[1])


@pytest.mark.parametrize("its_stream_has_ended", [True, False])
def test_a_worker_that_is_silent_when_asked_for_work_is_replaced_and_owes_nothing_twice(its_stream_has_ended, fake_ray):
    made = Decoding(whole(0), [*part([4, 5], 2), stream_end(1)])
    made.take(0, items=3)
    if its_stream_has_ended:
        made.take(1, items=3)  # it gave 6 and 7 back, and its answer has not come
        assert not made.streams.streams
    assert [stream.index for stream in made.streams.waited_for] == [1] and not made.streams.is_done
    made.streams.give_up(WorkerLost("rollout", 1, SILENT))
    assert fake_ray.killed == [made.handles[1]] and made.streams.waited_for == []
    assert made.dealt_again() == [[6, 7] if its_stream_has_ended else [4, 5, 6, 7]]


def asked(given, *, ends=True):
    """Worker 0 is idle, and worker 1, which owes 5, 6 and 7, has been asked: it will answer `given`."""
    made = Decoding(whole(0), [*part([4], 3), stream_end(1) if ends else DIED])
    made.handles[1].give_back = Method(given)
    made.take(1, items=2)
    made.take(0, items=3)
    return made


@pytest.mark.parametrize(("given", "left"), [([6, 7], [5]), ([5, 6, 7], [])])
def test_samples_that_are_given_back_go_to_the_idle_are_owed_no_more_and_counted(given, left):
    made = asked({0: given})
    made.answer(1)
    (stream,) = made.streams.streams
    assert [item.sample_indices for item in stream.owed.values()] == ([left] if left else [])
    assert made.dealt_again() == [given] and made.streams.num_moved == len(given)


def test_a_worker_that_had_nothing_to_give_is_not_asked_again():
    made = asked({})
    made.answer(1)
    assert len(made.handles[1].give_back.calls) == 1 and made.refs((False, False), 1) == []


def test_what_a_worker_gave_back_before_it_died_is_dealt_once():
    made = asked({0: [6, 7]}, ends=False)
    made.take(1)
    made.answer(1)
    assert made.dealt_again() == [[5, 6, 7]]


@pytest.mark.parametrize("answer", [DIED, {0: [6, 7]}], ids=["lost", "there"])
def test_what_a_stream_owes_at_its_end_is_dealt_again_once_the_answer_is_there_or_lost(answer):
    made = asked(answer)
    made.take(1)  # its end: it sent 4 alone
    assert made.dealt_again() == [] and not made.streams.is_done, "the answer tells of the others"
    made.answer(1)
    assert sum(made.dealt_again(), []) == [5, 6, 7]


def test_a_stream_that_ends_owing_what_nobody_was_asked_for_is_dealt_again():
    made = asked(DIED)  # for a moment only: its stream goes on
    made.answer(1)
    assert made.dealt_again() == [] and made.streams.num_owed == 3
    made.take(1)
    assert sum(made.dealt_again(), []) == [5, 6, 7] and made.streams.num_owed == 3


def test_who_has_not_answered_whether_it_gives_work_back_is_dealt_none():
    """Its new stream would answer, with its own samples."""
    made = Decoding(whole(0), [*part([4], 3), *part([5, 6, 7]), stream_end(1)])
    made.take(1, items=2)
    made.take(0, items=3)
    made.take(1, items=3)  # it ends, the question still open
    made.streams.draw_again(work(0, [0, 1]), "its node is gone")
    made.dealt_again()
    assert [stream.index for stream in made.streams.streams] == [0]
    made.answer(1)
    made.streams.draw_again(work(0, [2]), "its node is gone")
    made.dealt_again()
    assert sorted(stream.index for stream in made.streams.streams) == [0, 1]


FIRST_COUNT = ["rollout.schedule=dynamic_slot"]


def test_dynamic_slot_loses_the_step_with_a_worker_or_samples_that_had_arrived_but_not_an_evaluation():
    made = Decoding([DIED], [stream_end(1)], settings=FIRST_COUNT)
    with pytest.raises(StepLost, match="rollout worker 0: .*; with rollout.schedule=dynamic_slot the first"):
        made.take(0)
    with pytest.raises(StepLost, match="a node is gone; with rollout.schedule=dynamic_slot"):
        made.streams.draw_again(work(0, [1]), "a node is gone")
    made = Decoding([DIED], [stream_end(1)], settings=FIRST_COUNT, evaluation=True)
    made.take(0)
    assert made.streams.num_owed == 8


def test_a_stream_of_dynamic_slot_owes_nothing_at_its_end():
    made = Decoding([stream_end()], settings=FIRST_COUNT)
    made.take(0)
    assert made.streams.is_done


def test_a_step_that_is_given_up_leaves_nothing_to_wait_for():
    made = asked({0: [6, 7]})
    made.streams.abandon()
    assert made.handles[1].halt.calls == [(1,)]
    assert made.streams.is_done and made.streams.waited() == []

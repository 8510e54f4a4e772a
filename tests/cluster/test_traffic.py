"""What is sent during a step, what is made of what comes back, and what is sent again. Workers answer at once."""

from __future__ import annotations

from itertools import count, islice

import pytest

from infsample_rl.cluster.arrivals import (
    Finished,
    MicroGroupArrival,
    MicroGroupLost,
    MicroGroups,
    ReferenceArrival,
    RewardArrival,
    RowArrival,
)
from infsample_rl.cluster.calls import Calls
from infsample_rl.cluster.interruption import Interruption
from infsample_rl.cluster.messages import open_micro_group, seal, seal_micro_groups, unseal
from infsample_rl.cluster.streams import RolloutStreams
from infsample_rl.cluster.traffic import MOST_ASKED_AT_ONCE, MOST_ROWS_AT_ONCE, Traffic
from infsample_rl.cluster.weight_delivery import WeightDelivery
from infsample_rl.cluster.workers import StepLost
from infsample_rl.config.loading import load_config
from infsample_rl.types import ReferenceReport, RowWork, StreamOrder
from tests.fakes import (
    DIED,
    NODE_GONE,
    Handle,
    Items,
    Method,
    Ref,
    completion,
    header,
    make_workers,
    raised,
    rewarded,
    stream_end,
    work,
)
from tests.tiny_models import prompt_of

pytestmark = pytest.mark.usefixtures("fake_ray")
PROMPTS = [prompt_of(index, [index], text=f"{index}") for index in range(2)]
ROW = RowWork(row=None, prompt_ids={}, totals=None, row_id=None)


def decode(sealed):
    """A rollout worker's stream: every sample it is dealt as a micro-group, and the end."""
    samples = [(item.prompt_index, sample) for item in unseal(sealed).work for sample in item.sample_indices]
    items = [item for index, sample in samples for item in (header(index, [sample]), [completion(index, sample)])]
    return [*seal_micro_groups(items), stream_end()]


def earn(prompts, *payloads):
    """A reward worker's answer: a sample earns its index."""
    opened = [open_micro_group(payload.value) for payload in payloads]
    assert [unseal(prompt).prompt_index for prompt in prompts] == [one[0].prompt_index for one in opened]
    return seal([rewarded(*(float(sample.sample_index) for sample in one)) for one in opened])


def look_up(prompts, *payloads):
    """A reference worker's answer."""
    return [seal([ReferenceReport([0.5], 7)] * len(payloads)), *["log-probabilities"] * len(payloads)]


def report(sealed, *payloads):
    """A learner rank's answer on rows: how many payloads it was given."""
    return [{"started_at": 0.0, "ended_at": float(len(payloads))} for _ in unseal(sealed)]


class Step:
    """Traffic of these workers; the rollout worker is dealt so many samples of each prompt."""

    def __init__(self, samples=4, settings=(), spares=(), **roles):
        self.notes, config = [], load_config(list(settings))
        roles.setdefault("rollout", [Handle(stream=Method(decode))])
        calls = Calls(make_workers(self.notes.append, spares, **roles), self.notes.append, Interruption())
        weights = WeightDelivery(config, calls, lambda role, index: True)
        self.rollout, self.micro_groups = RolloutStreams(config, calls, weights), MicroGroups()
        self.traffic = Traffic(config, calls, weights, self.rollout, self.micro_groups)
        weights.holders = {0}
        dealt = [work(index, list(range(samples))) for index in range(len(PROMPTS))] if samples else []
        self.rollout.start([dealt], step=0)

    def arrive(self, keys):
        """As if micro-groups of one sample each had arrived, under these keys."""
        for key in keys:
            self.micro_groups.num_arrived = key
            payload = Ref(seal(header(0, [key])) + seal([completion(0, key)]))
            self.micro_groups.enter(Finished(header(0, [key]), payload, work(0, [key])))

    def drive(self, *, reference=False):
        """As the driver does: a micro-group goes on to reward and reference. All that arrived."""
        found, self.by_key = [], {}
        for arrival in self.traffic.arrivals():
            found.append(arrival)
            if isinstance(arrival, MicroGroupArrival):
                self.by_key[arrival.key] = arrival.header
                self.traffic.score(arrival.key, PROMPTS[arrival.header.prompt_index])
                if reference:
                    self.traffic.reference_logprobs(arrival.key, PROMPTS[arrival.header.prompt_index])
        return found

    def earned(self, found):
        """Rewards by prompt and sample, of micro-groups that were not lost."""
        lost = {arrival.key for arrival in found if isinstance(arrival, MicroGroupLost)}
        results = [arrival for arrival in found if isinstance(arrival, RewardArrival) and arrival.key not in lost]
        return sorted(
            (self.by_key[one.key].prompt_index, sample, reward)
            for one in results
            for sample, reward in zip(self.by_key[one.key].sample_indices, one.result.rewards, strict=True)
        )


EVERY_SAMPLE_ONCE = [(prompt, sample, float(sample)) for prompt in range(2) for sample in range(4)]


def sizes(method):
    """Micro-groups in each call of a reward or reference worker."""
    return [len(prompts) for prompts, *_ in method.calls]


def test_micro_groups_go_to_reward_and_reference_workers_by_turns_and_every_answer_comes_back_under_its_key():
    rewards, kl = [Method(earn), Method(earn)], Method(look_up)
    step = Step(reward=[Handle(score=method) for method in rewards], reference=[Handle(logprobs=kl)])
    found = step.drive(reference=True)
    assert step.earned(found) == EVERY_SAMPLE_ONCE
    reports = {arrival.key: arrival.report for arrival in found if isinstance(arrival, ReferenceArrival)}
    assert reports == dict.fromkeys(range(8), ReferenceReport([0.5], 7))
    assert [sum(sizes(method)) for method in rewards] == [4, 4]
    asked = [
        (unseal(prompt).prompt_index, open_micro_group(ref.value)[0].prompt_index)
        for prompts, *refs in kl.calls
        for prompt, ref in zip(prompts, refs, strict=True)
    ]
    assert len(asked) == 8 and all(prompt == of_sample for prompt, of_sample in asked)
    groups = step.micro_groups
    assert [one.token_ids.tolist() for one in groups.completions(0)] == [[0, 0, 0]]
    assert [ref.value for ref in groups.references.values()] == ["log-probabilities"] * 8
    groups.forget(list(range(8)))
    assert groups.completions(0) is None and not (groups.references or groups.payloads) and groups.num_arrived == 8


def test_a_call_has_no_more_micro_groups_than_its_bound_and_none_that_is_gone():
    most, reward, kl = MOST_ASKED_AT_ONCE, Method(earn), Method(look_up)
    step = Step(samples=0, reward=[Handle(score=reward)], reference=[Handle(logprobs=kl)])
    step.arrive(range(most["reward"] + 1))
    for key in [*range(most["reward"] + 1), 99]:  # 99: lost since
        step.traffic.score(key, PROMPTS[0])
        step.traffic.reference_logprobs(key, PROMPTS[0])
    assert len(list(step.traffic.arrivals())) == 2 * (most["reward"] + 1)
    for method, bound in ((reward, most["reward"]), (kl, most["reference"])):
        assert sum(sizes(method)) == most["reward"] + 1 and max(sizes(method)) == bound


def test_a_reward_worker_that_is_lost_is_replaced_and_asked_again_one_by_one(fake_ray):
    lost, again = Handle(score=Method(DIED), status=Method(DIED)), Method(earn)
    step = Step(samples=0, reward=[lost], spares=[Handle(score=again)])
    step.arrive([3, 7])
    for key in (3, 7):
        step.traffic.score(key, PROMPTS[0])
    found = [(arrival.key, arrival.result.rewards) for arrival in step.traffic.arrivals()]
    assert found == [(3, [3.0]), (7, [7.0])] and fake_ray.killed == [lost]
    assert sizes(lost.score) == [2] and sizes(again) == [1, 1]


@pytest.mark.parametrize("failure", [NODE_GONE, raised(NODE_GONE), DIED], ids=["node", "argument", "sender"])
def test_a_micro_group_that_is_gone_is_drawn_again_alone(failure):
    """DIED: the process that was to send it died; the one that was asked lives."""
    gone, stream = count(), Method(decode)

    def score(prompts, *payloads):
        if any(open_micro_group(payload.value)[0].sample_index == 2 for payload in payloads) and next(gone) < 3:
            return failure
        return earn(prompts, *payloads)

    step = Step(rollout=[Handle(stream=stream)], reward=[Handle(score=Method(score))])
    found = step.drive()
    assert step.earned(found) == EVERY_SAMPLE_ONCE
    lost = [step.by_key[arrival.key] for arrival in found if isinstance(arrival, MicroGroupLost)]
    assert lost and all(one.sample_indices == [2] for one in lost)
    dealt_again = [item for (order,) in stream.calls[1:] for item in unseal(order).work]
    assert sorted((item.prompt_index, item.sample_indices) for item in dealt_again) == sorted(
        (one.prompt_index, one.sample_indices) for one in lost
    )
    assert any("drawn again" in note for note in step.notes)


def test_of_several_in_a_call_only_the_one_that_is_gone_is_lost():
    def score(prompts, *payloads):
        gone = any(open_micro_group(payload.value)[0].sample_index == 7 for payload in payloads)
        return NODE_GONE if gone else earn(prompts, *payloads)

    reward = Method(score)
    step = Step(samples=0, reward=[Handle(score=reward)])
    step.arrive([3, 7])
    for key in (3, 7):
        step.traffic.score(key, PROMPTS[0])
    arrivals = step.traffic.arrivals()
    assert [(type(one), one.key) for one in (next(arrivals), next(arrivals))] == [
        (RewardArrival, 3),
        (MicroGroupLost, 7),
    ]
    assert sizes(reward) == [2, 1, 1] and step.rollout.num_owed == 1 and step.micro_groups.completions(7) is None


def test_an_answer_on_a_micro_group_that_is_gone_by_then_is_dropped():
    def score(prompts, *payloads):
        step.micro_groups.forget([7])
        return earn(prompts, *payloads)

    step = Step(samples=0, reward=[Handle(score=Method(score))])
    step.arrive([3, 7])
    for key in (3, 7):
        step.traffic.score(key, PROMPTS[0])
    assert [arrival.key for arrival in step.traffic.arrivals()] == [3]


def test_rows_go_to_a_rank_in_one_call_with_their_micro_groups_once_and_no_more_than_its_bound():
    learner, decodes_on = Method(report), Handle(stream=Method(Items([], is_there=False)))
    step = Step(rollout=[decodes_on], learner=[Handle(learn_rows=learner)])
    step.arrive([4, 5])
    step.micro_groups.references = {5: Ref("reference of five")}
    for _ in range(MOST_ROWS_AT_ONCE + 1):
        step.traffic.learn(0, ROW, [5, 4])
    found = list(step.traffic.arrivals(until_learner_is_idle=True))
    assert [len(unseal(rows)) for rows, *_ in learner.calls] == [MOST_ROWS_AT_ONCE, 1]
    four, five = (step.micro_groups.payloads[key] for key in (4, 5))
    assert [refs for _, *refs in learner.calls] == [[four, five, step.micro_groups.references[5]]] * 2
    assert found == [RowArrival(0, {"started_at": 0.0, "ended_at": 3.0})] * (MOST_ROWS_AT_ONCE + 1)
    assert not step.rollout.is_done


@pytest.mark.parametrize("failure", [DIED, NODE_GONE], ids=["died", "misses what it needs"])
def test_a_learner_rank_that_is_lost_or_misses_what_it_needs_ends_the_step(failure, fake_ray):
    step = Step(learner=[Handle(learn_rows=Method(failure))])
    step.traffic.learn(0, ROW, [])
    with pytest.raises(StepLost, match="learner rank 0"):
        list(step.traffic.arrivals(until_learner_is_idle=True))
    assert fake_ray.killed == []


SHORT = ["cluster.progress_timeout_s=0.2", "reward.timeout_s=0.1"]


def silent(method):
    """A worker that answers neither this call nor how far it is."""
    return Handle(**dict.fromkeys([method, "progress"], Method(lambda *_: Ref(is_there=False))))


def test_what_a_silent_worker_was_asked_is_asked_of_another_and_no_other_call_is_touched(fake_ray):
    asked, again, hangs = Method(earn), Method(earn), silent("score")
    step = Step(settings=SHORT, reward=[Handle(score=asked), hangs], spares=[Handle(score=again)])
    assert step.earned(step.drive()) == EVERY_SAMPLE_ONCE and fake_ray.killed == [hangs]
    assert sum(sizes(again)) == 4 == sum(sizes(asked))


def test_a_silent_learner_rank_ends_the_step(fake_ray):
    step = Step(settings=SHORT, learner=[silent("learn_rows")])
    step.traffic.learn(0, ROW, [])
    with pytest.raises(StepLost, match="learner rank 0: it has not moved for "):
        list(step.traffic.arrivals())
    assert fake_ray.killed == []


def test_what_a_worker_raises_ends_the_run():
    step = Step(reward=[Handle(score=Method(raised(KeyError("no such column"))))])
    with pytest.raises(RuntimeError, match="reward worker 0: .*no such column"):
        step.drive()


@pytest.mark.parametrize("for_good", [False, True])
def test_a_step_that_is_given_up_leaves_nothing_behind(for_good):
    """Streams are drained, for their workers to be asked for more, unless nothing is sampled any more."""
    order = seal(StreamOrder([work(0, [0, 1])], 0, False, 0))
    halt, stream = Method(None), Items([*decode(order), "not taken"])
    step = Step(rollout=[Handle(stream=Method(stream), halt=halt)], reward=[Handle(score=Method(earn))])
    arrivals = step.traffic.arrivals()
    step.traffic.score(next(arrivals).key, PROMPTS[0])
    step.traffic.abandon(for_good=for_good)
    assert halt.calls == [(0,)] and (next(stream, None) is None) != for_good
    assert step.traffic.num_in_flight() == {"reward": 0, "reference": 0, "learner": 0} and step.rollout.is_done
    assert list(arrivals) == [] and not step.micro_groups.payloads


def test_what_is_to_be_kept_of_a_step_that_is_given_up_is_there_still():
    step = Step(samples=0)
    step.arrive([3, 7])
    step.traffic.abandon(keep=[3])
    assert list(step.micro_groups.payloads) == list(step.micro_groups.work) == [3]


def test_ranks_have_two_calls_of_rows_at_most_and_get_the_next_together():
    """A save at SIGTERM comes behind them, and another collective between the same rows of each."""
    asked = []

    def learn(sealed, *_):
        asked.append(Ref(report(sealed), is_there=False))
        return asked[-1]

    step = Step(samples=0, learner=[Handle(learn_rows=Method(learn)) for _ in range(2)])
    for rank in 3 * MOST_ROWS_AT_ONCE * [0, 1]:
        step.traffic.learn(rank, ROW, [])
    step.traffic._send_rows()
    arrivals = step.traffic.arrivals(until_learner_is_idle=True)
    for done, sent in enumerate([4, 6]):  # rank 0 ends its first call, then rank 1
        asked[done].is_there = True
        assert {arrival.rank for arrival in islice(arrivals, MOST_ROWS_AT_ONCE)} == {done}
        step.traffic._send_rows()
        assert len(asked) == sent
    for ref in asked:
        ref.is_there = True
    assert len(list(arrivals)) == 4 * MOST_ROWS_AT_ONCE and len(asked) == 6

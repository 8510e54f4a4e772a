"""What is sent during a step, what is made of what comes back, and what is sent again. Workers answer at once;
references are what they hold."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from infsample_rl.cluster import calls as ray_calls
from infsample_rl.cluster import streams as rollout_streams
from infsample_rl.cluster import traffic
from infsample_rl.cluster.arrivals import MicroGroupArrival, MicroGroupLost, ReferenceArrival, RewardArrival, RowArrival
from infsample_rl.cluster.calls import PayloadLost
from infsample_rl.cluster.failures import StepLost, WorkerLost
from infsample_rl.cluster.interruption import Interruption
from infsample_rl.cluster.messages import open_micro_group, seal, seal_micro_groups, unseal
from infsample_rl.cluster.traffic import MOST_ASKED_AT_ONCE, MOST_ROWS_AT_ONCE, Traffic
from infsample_rl.config.loading import load_config
from infsample_rl.types import (
    Completion,
    MicroGroupHeader,
    Prompt,
    ReferenceReport,
    RewardResult,
    RolloutWork,
    RowWork,
    StreamEnd,
    WorkerPhases,
)

PROMPTS = [
    Prompt(prompt_index=index, row=index, messages=[], text=f"{index}", token_ids=np.array([index], np.int32))
    for index in range(2)
]


class Ref:
    """A reference, and what it holds: an exception is raised where it is opened."""

    def __init__(self, value):
        self.value = value


class Method:
    """Takes down what it is called with; `answers` of a call, the last one for all that follow."""

    def __init__(self, *answers):
        self.calls, self._answers, self._num_returns = [], list(answers), 1

    def options(self, num_returns=1, **options):
        self._num_returns = num_returns
        return self

    def remote(self, *arguments):
        self.calls.append(arguments)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        value = answer if isinstance(answer, Exception) else answer(*arguments)
        if self._num_returns == 1:
            return Ref(value)
        refs = [Ref(item) for item in value]
        assert self._num_returns in ("streaming", len(refs))
        return iter(refs) if self._num_returns == "streaming" else refs


class Handle:
    def __init__(self, **methods):
        self.__dict__.update(methods)


class Crew:
    """Workers by role; a lost one is replaced by `spare`."""

    def __init__(self, **roles):
        self.roles, self.replaced = {role: dict(enumerate(handles)) for role, handles in roles.items()}, []

    def all(self, role):
        return self.roles.get(role, {})

    def has_started(self, role, index):
        return True

    def is_current(self, role, index, handle):
        return self.roles[role][index] is handle

    def replace(self, lost):
        self.replaced.append((lost.role, lost.index))
        self.roles[lost.role][lost.index] = self.spare
        return self.spare


def completion(prompt_index, sample_index):
    return Completion(
        prompt_index=prompt_index,
        sample_index=sample_index,
        token_ids=np.full(3, sample_index, np.int32),
        logprobs=np.zeros(3, np.float32),
        sampling_logprobs=None,
        finish_reason="stop",
        policy_version=0,
    )


def header(prompt_index, samples):
    return MicroGroupHeader(
        prompt_index=prompt_index,
        sample_indices=samples,
        lengths=[3] * len(samples),
        finish_reasons=["stop"] * len(samples),
        policy_version=0,
        finished_at=1.0,
    )


def decode():
    """A rollout worker's stream: every sample it is dealt as a micro-group, and the end."""

    def stream(sealed):
        samples = [(item.prompt_index, sample) for item in unseal(sealed).work for sample in item.sample_indices]
        items = [item for index, sample in samples for item in (header(index, [sample]), [completion(index, sample)])]
        return [
            *seal_micro_groups(items),
            StreamEnd(worker=0, stats={}, phases=WorkerPhases("rollout", 0, "here", [], 2.0)),
        ]

    return Method(stream)


def earn(prompts, *payloads):
    """A reward worker's answer: a sample earns its index."""
    opened = [open_micro_group(payload.value) for payload in payloads]
    rewards = [[float(sample.sample_index) for sample in micro_group] for micro_group in opened]
    assert [unseal(prompt).prompt_index for prompt in prompts] == [
        micro_group[0].prompt_index for micro_group in opened
    ]
    return seal(
        [RewardResult(rewards=one, components={}, failures=[], started_at=0.0, finished_at=1.0) for one in rewards]
    )


def report(sealed, *payloads):
    return [{"started_at": 0.0, "ended_at": float(len(payloads))} for _ in unseal(sealed)]


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    def value_of(ref, role, index, opened=None):
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def get(ref, timeout):
        return value_of(ref, "rollout", 0)

    monkeypatch.setattr(
        ray_calls.Waiting, "wait", lambda self, refs, num_returns, **options: (list(refs)[:num_returns], [])
    )
    monkeypatch.setattr(traffic.ray, "get", get)
    monkeypatch.setattr(traffic, "open_at_once", lambda refs: {})
    for module in (traffic, ray_calls):
        monkeypatch.setattr(module, "status_of", lambda handle: getattr(handle, "status", "it lives"))
    for module in (traffic, rollout_streams):
        monkeypatch.setattr(module, "value_of", value_of)


def make(crew, samples=4, settings=()):
    """Traffic on its way: rollout worker 0 is dealt so many samples of each prompt."""
    notes = []
    sent = Traffic(load_config(list(settings)), crew, notes.append, Interruption(), lambda index: None)
    sent.notes = notes
    sent.rollout.begin_version({0})
    work = [
        RolloutWork(prompt_index=prompt.prompt_index, prompt_ids=prompt.token_ids, sample_indices=list(range(samples)))
        for prompt in PROMPTS
    ]
    sent.rollout.start([work], step=0, evaluation=False)
    return sent


def drive(sent, *, reference=False):
    """As the driver does: a micro-group goes on to reward and reference. All that arrived."""
    found, by_key = [], {}
    for arrival in sent.arrivals():
        found.append(arrival)
        if isinstance(arrival, MicroGroupArrival):
            by_key[arrival.key] = arrival.header
            sent.score(arrival.key, PROMPTS[arrival.header.prompt_index])
            if reference:
                sent.reference_logprobs(arrival.key, PROMPTS[arrival.header.prompt_index])
    return found, by_key


def earned(found, by_key):
    """Rewards by prompt and sample, of micro-groups that were not lost."""
    lost = {arrival.key for arrival in found if isinstance(arrival, MicroGroupLost)}
    results = [arrival for arrival in found if isinstance(arrival, RewardArrival) and arrival.key not in lost]
    return sorted(
        (by_key[one.key].prompt_index, sample, reward)
        for one in results
        for sample, reward in zip(by_key[one.key].sample_indices, one.result.rewards, strict=True)
    )


EVERY_SAMPLE_ONCE = [(prompt, sample, float(sample)) for prompt in range(2) for sample in range(4)]


def test_micro_groups_go_to_reward_and_reference_workers_by_turns_and_every_answer_comes_back_under_its_key():
    rewards = [Method(earn), Method(earn)]
    kl = Method(
        lambda prompts, *payloads: [
            seal([ReferenceReport([0.5], 7) for _ in payloads]),
            *["log-probabilities"] * len(payloads),
        ]
    )
    crew = Crew(
        rollout=[Handle(stream=decode())],
        reward=[Handle(score=method) for method in rewards],
        reference=[Handle(logprobs=kl)],
    )
    sent = make(crew)
    found, by_key = drive(sent, reference=True)
    assert earned(found, by_key) == EVERY_SAMPLE_ONCE
    reports = {arrival.key: arrival.report for arrival in found if isinstance(arrival, ReferenceArrival)}
    assert reports == dict.fromkeys(range(8), ReferenceReport([0.5], 7))
    assert [sum(len(prompts) for prompts, *_ in method.calls) for method in rewards] == [4, 4]
    asked = [
        (unseal(prompt).prompt_index, open_micro_group(ref.value)[0])
        for prompts, *refs in kl.calls
        for prompt, ref in zip(prompts, refs, strict=True)
    ]
    assert len(asked) == 8 and all(prompt_index == first.prompt_index for prompt_index, first in asked)
    assert [one.token_ids.tolist() for one in sent.completions(0)] == [[0, 0, 0]]
    assert {key: ref.value for key, ref in sent._references.items()} == dict.fromkeys(range(8), "log-probabilities")
    sent.forget(list(range(8)))
    assert (
        sent.completions(0) is None
        and not sent._references
        and sent.statistics()["micro_groups_held"] == 0
        and sent.num_arrived == 8
    )


def test_a_call_has_no_more_micro_groups_than_its_bound():
    most = MOST_ASKED_AT_ONCE
    reward, kl = Method(earn), Method(lambda prompts, *payloads: [seal([]), *payloads])
    sent = make(Crew(rollout=[Handle(stream=decode())], reward=[Handle(score=reward)], reference=[Handle(logprobs=kl)]))
    sent._micro_groups = {
        key: Ref(seal(header(0, [0])) + seal([completion(0, 0)])) for key in range(most["reward"] + 1)
    }
    for key in [*sent._micro_groups, 99]:  # 99: lost since
        sent.score(key, PROMPTS[0])
        sent.reference_logprobs(key, PROMPTS[0])
    assert sent._is_busy()
    sent._send_unasked()
    assert [len(prompts) for prompts, *_ in reward.calls] == [most["reward"], 1]
    assert [len(prompts) for prompts, *_ in kl.calls] == [most["reference"]] * (most["reward"] // most["reference"]) + [
        1
    ]
    assert sent.num_in_flight() == {"reward": 2, "reference": 5, "learner": 0}
    sent._send_unasked()
    assert len(reward.calls) == 2, "once"


def test_a_reward_worker_that_is_lost_is_replaced_and_asked_again_one_by_one():
    lost, again = Handle(score=Method(WorkerLost("reward", 0, "its process died")), status=None), Method(earn)
    crew = Crew(rollout=[Handle(stream=decode())], reward=[lost])
    crew.spare = Handle(score=again)
    sent = make(crew, samples=0)
    sent._micro_groups = {key: Ref(seal(header(0, [key])) + seal([completion(0, key)])) for key in (3, 7)}
    for key in sent._micro_groups:
        sent.score(key, PROMPTS[0])
    found = [(arrival.key, arrival.result.rewards) for arrival in sent.arrivals() if isinstance(arrival, RewardArrival)]
    assert found == [(3, [3.0]), (7, [7.0])] and crew.replaced == [("reward", 0)]
    assert [len(prompts) for prompts, *_ in lost.score.calls] == [2] and [
        len(prompts) for prompts, *_ in again.calls
    ] == [1, 1]


@pytest.mark.parametrize(
    "failure",
    [
        PayloadLost("reward worker 0: the node is gone"),
        WorkerLost("reward", 0, "the process that was to send it died; this one lives"),
    ],
)
def test_a_micro_group_that_is_gone_is_drawn_again_alone(failure):
    gone = count()

    def score(prompts, *payloads):
        if any(open_micro_group(payload.value)[0].sample_index == 2 for payload in payloads) and next(gone) < 3:
            return failure
        return earn(prompts, *payloads)

    stream = decode()
    sent = make(Crew(rollout=[Handle(stream=stream)], reward=[Handle(score=Method(score))]))
    found, by_key = drive(sent)
    assert earned(found, by_key) == EVERY_SAMPLE_ONCE
    lost = [by_key[arrival.key] for arrival in found if isinstance(arrival, MicroGroupLost)]
    assert lost and all(one.sample_indices == [2] for one in lost)
    dealt_again = [unseal(order).work for (order,) in stream.calls[1:]]
    assert sorted((item.prompt_index, item.sample_indices) for work in dealt_again for item in work) == sorted(
        (one.prompt_index, one.sample_indices) for one in lost
    )
    assert any("drawn again" in note for note in sent.notes)


def test_of_several_in_a_call_only_the_one_that_is_gone_is_lost():
    def score(prompts, *payloads):
        gone = any(open_micro_group(payload.value)[0].sample_index == 7 for payload in payloads)
        return PayloadLost("reward worker 0: the node is gone") if gone else earn(prompts, *payloads)

    reward, reference = Method(score), Method(lambda *_: None)
    sent = make(
        Crew(rollout=[Handle(stream=decode())], reward=[Handle(score=reward)], reference=[Handle(logprobs=reference)]),
        samples=0,
    )
    sent._micro_groups = {key: Ref(seal(header(0, [key])) + seal([completion(0, key)])) for key in (3, 7)}
    for key in (3, 7):
        sent._work[key] = RolloutWork(prompt_index=0, prompt_ids=PROMPTS[0].token_ids, sample_indices=[key])
        sent.score(key, PROMPTS[0])
    found = []
    for arrival in sent.arrivals():
        found.append((type(arrival), arrival.key))
        if isinstance(arrival, MicroGroupLost):
            break
    assert found == [(RewardArrival, 3), (MicroGroupLost, 7)] and [len(prompts) for prompts, *_ in reward.calls] == [
        2,
        1,
        1,
    ]
    assert sent.rollout.num_owed == 1 and sent.completions(7) is None
    sent.reference_logprobs(7, PROMPTS[0])
    sent._send_unasked()
    assert reference.calls == []


def test_an_answer_on_a_micro_group_that_is_gone_by_then_is_dropped():
    sent = make(Crew(rollout=[Handle(stream=decode())], reward=[Handle(score=Method(earn))]), samples=0)
    sent._micro_groups = {key: Ref(seal(header(0, [key])) + seal([completion(0, key)])) for key in (3, 7)}
    for key in (3, 7):
        sent.score(key, PROMPTS[0])
    sent._send_unasked()
    sent.forget([7])
    assert [arrival.key for arrival in sent.arrivals() if isinstance(arrival, RewardArrival)] == [3]


def test_rows_go_to_a_rank_in_one_call_with_their_micro_groups_once_and_no_more_than_its_bound(monkeypatch):
    # no stream
    monkeypatch.setattr(
        ray_calls.Waiting, "wait", lambda self, refs, **options: ([ref for ref in refs if isinstance(ref, Ref)], [])
    )
    learner = Method(report)
    sent = make(
        Crew(
            rollout=[Handle(stream=decode())], reward=[Handle(score=Method(earn))], learner=[Handle(learn_rows=learner)]
        )
    )
    sent._micro_groups, sent._references = {4: Ref("four"), 5: Ref("five")}, {5: Ref("reference of five")}
    row = RowWork(row=None, prompt_ids={}, totals=None, row_id=None)
    for _ in range(MOST_ROWS_AT_ONCE + 1):
        sent.learn(0, row, [5, 4])
    found = [arrival for arrival in sent.arrivals(until_learner_is_idle=True) if isinstance(arrival, RowArrival)]
    assert [len(unseal(rows)) for rows, *_ in learner.calls] == [MOST_ROWS_AT_ONCE, 1]
    assert [[ref.value for ref in refs] for _, *refs in learner.calls] == [["four", "five", "reference of five"]] * 2
    assert [(one.rank, one.report["ended_at"]) for one in found] == [(0, 3.0)] * (MOST_ROWS_AT_ONCE + 1)
    assert not sent.rollout.is_done


@pytest.mark.parametrize(
    "failure", [WorkerLost("learner", 0, "its process died"), PayloadLost("learner rank 0: the node is gone")]
)
def test_a_learner_rank_that_is_lost_or_misses_what_it_needs_ends_the_step(failure):
    crew = Crew(
        rollout=[Handle(stream=decode())],
        reward=[Handle(score=Method(earn))],
        learner=[Handle(learn_rows=Method(failure))],
    )
    sent = make(crew)
    sent.learn(0, RowWork(row=None, prompt_ids={}, totals=None, row_id=None), [])
    with pytest.raises(StepLost, match="learner rank 0"):
        list(sent.arrivals(until_learner_is_idle=True))
    assert crew.replaced == []


class Silence:
    """In place of the watchdog: says once of these workers that they have not moved, when nothing else arrives any
    more."""

    def __init__(self, *workers):
        self._workers, self.moves = {worker: "it has not moved for 601 s" for worker in workers}, []

    def moved(self, role, index):
        self.moves.append((role, index))

    def silent(self, streams, calls, returns):
        last, self.moves = self.moves, []
        found, self._workers = ({}, self._workers) if last else (self._workers, {})
        return found


def silent(monkeypatch, *workers):
    """ray.wait finds nothing of what `workers` are asked until they have been given up."""
    watchdog = Silence(*workers)
    monkeypatch.setattr(traffic, "Watchdog", lambda *arguments: watchdog)

    def wait(self, refs, num_returns, **options):
        there = [ref for ref in refs if not (isinstance(ref, Ref) and getattr(ref.value, "hangs", False))]
        return there[:num_returns], []

    monkeypatch.setattr(ray_calls.Waiting, "wait", wait)


class Hangs:
    hangs = True


def test_what_a_silent_worker_was_asked_is_asked_of_another_and_no_other_call_is_touched(monkeypatch):
    silent(monkeypatch, ("reward", 1))
    rewards = [Method(earn), Method(lambda *_: Hangs())]
    again = Method(earn)
    crew = Crew(rollout=[Handle(stream=decode())], reward=[Handle(score=method) for method in rewards])
    crew.spare = Handle(score=again)
    found, by_key = drive(make(crew))
    assert earned(found, by_key) == EVERY_SAMPLE_ONCE and crew.replaced == [("reward", 1)]
    assert (
        sum(len(prompts) for prompts, *_ in again.calls) == 4 == sum(len(prompts) for prompts, *_ in rewards[0].calls)
    )


def test_a_silent_learner_rank_ends_the_step(monkeypatch):
    silent(monkeypatch, ("learner", 0))
    crew = Crew(
        rollout=[Handle(stream=decode())],
        reward=[Handle(score=Method(earn))],
        learner=[Handle(learn_rows=Method(lambda *_: Hangs()))],
    )
    sent = make(crew)
    sent.learn(0, RowWork(row=None, prompt_ids={}, totals=None, row_id=None), [])
    with pytest.raises(StepLost, match="learner rank 0: it has not moved for 601 s"):
        list(sent.arrivals())
    assert crew.replaced == []


def test_everything_that_arrives_is_a_move_of_the_worker_it_comes_from(monkeypatch):
    moves = []
    monkeypatch.setattr(traffic.Watchdog, "moved", lambda self, role, index: moves.append((role, index)))
    kl = Method(
        lambda prompts, *payloads: [
            seal([ReferenceReport([0.5], 7) for _ in payloads]),
            *["log-probabilities"] * len(payloads),
        ]
    )
    crew = Crew(
        rollout=[Handle(stream=decode())],
        reward=[Handle(score=Method(earn)), Handle(score=Method(earn))],
        reference=[Handle(logprobs=kl)],
    )
    drive(make(crew), reference=True)
    assert (
        set(moves) == {("rollout", 0), ("reward", 0), ("reward", 1), ("reference", 0)}
        and moves.count(("rollout", 0)) == 9
    )


def test_what_a_worker_raises_ends_the_run():
    sent = make(
        Crew(
            rollout=[Handle(stream=decode())],
            reward=[Handle(score=Method(RuntimeError("reward worker 0: no such column")))],
        )
    )
    with pytest.raises(RuntimeError, match="no such column"):
        drive(sent)


def test_a_step_that_is_given_up_leaves_nothing_behind(monkeypatch):
    halt = Method(lambda number: None)
    sent = make(Crew(rollout=[Handle(stream=decode(), halt=halt)], reward=[Handle(score=Method(earn))]))
    arrivals = sent.arrivals()
    sent.score(next(arrivals).key, PROMPTS[0])
    drained = []
    monkeypatch.setattr(rollout_streams, "drain", drained.append)
    sent.abandon()
    assert halt.calls == [(0,)] and len(drained) == 1
    assert (
        sent.num_in_flight() == {"reward": 0, "reference": 0, "learner": 0}
        and sent.rollout.is_done
        and not sent._is_busy()
    )
    assert list(arrivals) == []

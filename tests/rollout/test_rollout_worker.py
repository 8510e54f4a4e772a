"""The rollout worker on a tiny model saved to disk: stream, weights, figures."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from infsample_rl.rollout.length_prediction import watch
from infsample_rl.rollout.worker import RolloutWorker
from infsample_rl.types import Episode, MicroGroupHeader, ProbeFit, PublishedProbe, RolloutWork


@pytest.fixture
def config(worker_config):
    return worker_config


WORK = [
    RolloutWork(prompt_index=2, prompt_ids=np.array([5, 9, 7], np.int32), sample_indices=[0, 1, 2]),
    RolloutWork(prompt_index=0, prompt_ids=np.array([8, 8], np.int32), sample_indices=[3]),
]


def collect(stream):
    """{(prompt, sample): token ids} and the headers of a stream."""
    items = list(stream)
    assert [isinstance(item, MicroGroupHeader) for item in items] == [True, False] * (len(items) // 2)
    completions = {(c.prompt_index, c.sample_index): c.token_ids.tolist() for group in items[1::2] for c in group}
    return completions, items[::2], items[1::2]


def test_a_run_that_should_repeat_says_that_it_may_not_without_a_compiled_decoder(config, monkeypatch, recwarn):
    RolloutWorker(config, 0)
    assert not [each for each in recwarn if "may differ" in str(each.message)]
    monkeypatch.setattr("infsample_rl.rollout.kernels.cpu_kernels.load", lambda: None)
    RolloutWorker(replace(config, run=replace(config.run, deterministic=False)), 0)
    assert not [each for each in recwarn if "may differ" in str(each.message)], "nobody was promised anything"
    with pytest.warns(
        UserWarning, match="samples may differ by rounding from run to run: model.path=.* has no compiled"
    ):
        RolloutWorker(config, 0)


def test_headers_and_micro_groups_alternate_and_agree(config):
    worker = RolloutWorker(config, 0)
    completions, headers, groups = collect(worker.stream(WORK, step=1))
    assert completions.keys() == {(2, 0), (2, 1), (2, 2), (0, 3)}
    for header, group in zip(headers, groups, strict=True):
        assert header.sample_indices == [completion.sample_index for completion in group]
        assert header.lengths == [len(completion.token_ids) for completion in group]
        assert header.finish_reasons == [completion.finish_reason for completion in group]
        assert {completion.prompt_index for completion in group} == {header.prompt_index}
    assert [header.finished_at for header in headers] == sorted(header.finished_at for header in headers)
    assert worker.progress() == worker.stats()["running_steps"] > 0
    worker._environments = SimpleNamespace(num_replies=7)
    assert worker.progress() == worker.stats()["running_steps"] + 7
    episode = Episode(reward=1.0, failure="", turns=1, calls=0, waited_s=0.0, messages=[{"role": "assistant"}])
    header = worker._header([replace(groups[0][0], episode=episode)], False)
    assert header.episodes == [replace(episode, messages=[])], "the driver is sent no texts"


def test_a_worker_tells_who_decodes_how_far_and_how_full_its_pool_is(config):
    worker = RolloutWorker(config, 5)
    assert worker.now().rows == []
    stream = worker.stream(WORK, step=1, pause_every=3)
    assert next(stream) == []  # after three running steps
    now = worker.now()
    assert now.worker == 5 and 0 < now.pages_used <= now.pages == worker.engine.runner.kv.num_pages
    assert sorted(now.rows) == [(0, 3, 3, None), (2, 0, 3, None), (2, 1, 3, None), (2, 2, 3, None)]
    list(stream)
    assert worker.now() == (5, [], now.pages, 0)


def test_evaluation_takes_its_own_temperature(config):
    completions = collect(RolloutWorker(config, 0).stream(WORK, step=1, evaluation=True))[0]
    assert completions[2, 0] == completions[2, 1] == completions[2, 2]  # eval_temperature = 0: all the same


def test_loaded_weights_change_the_samples_and_stamp_their_version(config, pack_buckets):
    worker = RolloutWorker(config, 0)
    before = collect(worker.stream(WORK, step=1))[0]
    named = [(name, parameter.detach().clone()) for name, parameter in worker.engine.runner.model.named_parameters()]
    address = worker.engine.runner.model.lm_head.weight.data_ptr()
    doubled = [(name, tensor * 2 if name == "lm_head.weight" else tensor) for name, tensor in named]
    assert worker.load_weights(*pack_buckets(doubled, version=5)).version == 5
    after, headers, groups = collect(worker.stream(WORK, step=1))
    assert after != before
    assert {header.policy_version for header in headers} == {5} == {c.policy_version for group in groups for c in group}
    worker.load_weights(*pack_buckets(named, version=6))
    assert collect(worker.stream(WORK, step=1))[0] == before
    assert worker.engine.runner.model.lm_head.weight.data_ptr() == address


@pytest.fixture
def predict_often(monkeypatch):
    """Responses have 16 tokens at most."""
    monkeypatch.setattr(watch, "PREDICT_EVERY", 2)


def test_what_a_worker_learnt_goes_to_the_run_and_comes_back_with_the_weights(config, pack_buckets, predict_often):
    worker = RolloutWorker(config, 0)
    collect(worker.stream(WORK, step=0))
    report = worker.learn()
    assert report.statistics.counts.sum() > 10 and report.statistics.xx.shape == (2, 130, 130)
    assert worker.learn().statistics.counts.tolist() == [0, 0], "nothing is reported twice"
    collect(worker.stream(WORK, step=1))
    assert not worker.engine.lengths.watch.is_used, "it waits for the run to say what is used"
    fit = ProbeFit(np.zeros(130), deviation=1.0)
    named = [(name, parameter.detach().clone()) for name, parameter in worker.engine.runner.model.named_parameters()]
    worker.load_weights(*pack_buckets(named, version=1), PublishedProbe(fit=fit, is_used=True))
    before = worker.engine.lengths.watch.seconds_spent
    collect(worker.stream(WORK, step=1))
    assert worker.engine.lengths.watch.is_used and worker.engine.lengths.watch.seconds_spent > before


def test_headers_carry_stays_of_the_prompts_asked_for_and_of_no_evaluation(config):
    worker = RolloutWorker(config, 3)
    assert list(config.timeline_prompts) == [0, 4]  # two of eight prompts a step
    _, headers, groups = collect(worker.stream(WORK, step=1))
    for header, group in zip(headers, groups, strict=True):
        given = [sum(stay.tokens for stay in stays) for stays in header.stays]
        assert given == (header.lengths if header.prompt_index == 0 else []) and header.worker == 3
        assert all(completion.stays == [] for completion in group), "the header alone carries them"
        assert header.forecasts == [completion.forecast for completion in group]
    assert [header.stays for header in collect(worker.stream(WORK, step=1, evaluation=True))[1]] == [[]] * len(headers)

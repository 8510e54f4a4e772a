"""reference.placement=learner: the same log-probabilities, losses and updates as with reference workers, computed where
rows are trained."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch

from infsample_rl.config import ClusterConfig, LearnerConfig, ObjectiveConfig, ReferenceConfig
from infsample_rl.learner.reference import ReferencePolicy, keep_in_host_memory, load_frozen_policy
from infsample_rl.learner.worker import LearnerWorker
from infsample_rl.model.packing import pack_row, pack_samples
from infsample_rl.plan.placement import worker_groups
from tests.gpu import GPU
from tests.learner_ranks import Scenario, run_ranks
from tests.tiny_models import assert_tensors_close

pytestmark = pytest.mark.slow  # real processes for minutes; test_learner_ranks.py has every backend in `make test`

# The samples of the second step are those of the first, which another policy drew.
OBJECTIVE = ObjectiveConfig(kl_coef=0.5, loss="dapo", epochs=2, mini_batches=2, mismatch_stop_float32=100.0)
LEARNER = LearnerConfig(lr=1e-2, max_tokens_per_micro_batch=256, logprob_chunk_tokens=7)
LORA = replace(LEARNER, lora_rank=4, lora_alpha=64.0)
HERE = ReferenceConfig(placement="learner")
COPY, ADAPTERS_OFF = "copy", "adapters off"
LEARNERS = {COPY: LEARNER, ADAPTERS_OFF: LORA}
WAYS: dict[str, dict[str, object]] = {"fsdp": {}, "fsdp last_row": {"grad_sync": "last_row"}}
if importlib.util.find_spec("deepspeed") is not None:
    WAYS |= {"deepspeed 3": {"backend": "deepspeed", "zero_stage": 3}}


@pytest.fixture(scope="module")
def frozen(tools, tmp_path_factory):
    """The folder of another policy than the one that is trained."""
    folder = tools.save_tiny_policy(tmp_path_factory.mktemp("frozen"), tied=True)
    lm = tools.load_plain(folder)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(1.1)
    lm.save_pretrained(folder)
    return folder


def config_of(tools, path, frozen, kind, *, settings=None, ranks=1):
    """A run whose reference is on the learner: a copy of another policy, or the policy without its adapters."""
    config = tools.make_config(
        path, learner=replace(LEARNERS[kind], **(settings or {})), objective=OBJECTIVE, ranks=ranks
    )
    return replace(config, reference=replace(HERE, path=frozen if kind == COPY else None))


def on_workers(config):
    """The same run with reference workers."""
    return replace(config, reference=ReferenceConfig(path=config.reference.path))


def two_epochs(tools, samples, deals, *, lockstep):
    """A step of four updates: two epochs over two mini-batches, dealt to ranks; rows of the second are remembered
    first."""
    half = len(samples) // 2
    parts, calls, number = [samples[:half], samples[half:]], [], 0
    plans = []
    for part, counts in zip(parts, deals, strict=True):
        waves = tools.waves(tools.deal(part, counts), tools.totals_of(part), lockstep=lockstep)
        numbered = []
        for _, arguments in waves:
            ids = [number + rank if own is not None and own[0] else None for rank, own in enumerate(arguments)]
            number += len(arguments)
            numbered.append(
                [own if own is None else (*own, row_id) for own, row_id in zip(arguments, ids, strict=True)]
            )
        plans.append(numbered)
    for wave in plans[1]:
        calls.append(("remember", [own and (own[0], own[2]) for own in wave]))
    for epoch in range(2):
        for index, (plan, part) in enumerate(zip(plans, parts, strict=True)):
            calls += [("accumulate", wave) for wave in plan]
            calls.append(("step", {"totals": tools.totals_of(part), "is_last": epoch == 1 and index == 1}))
    return calls


@pytest.fixture(scope="module")
def samples(tools, tied_policy):
    return tools.make_samples(tools.load_plain(tied_policy), prompts=4, with_reference=False)


@pytest.fixture(scope="module")
def expected(tools, tied_policy, frozen, samples):
    """What two steps give at one rank with reference workers."""
    results = {}
    for kind in LEARNERS:
        config = on_workers(config_of(tools, tied_policy, frozen, kind))
        step = two_epochs(tools, tools.with_reference(config, samples), [(1,), (2,)], lockstep=True)
        results[kind] = tools.run_here(config, [*step, *step, ("parameters", ())])
    return results


@pytest.fixture(scope="module")
def two_ranks(tools, tied_policy, frozen, samples, tmp_path_factory):
    scenarios = {}
    for kind in LEARNERS:
        for way, settings in WAYS.items():
            step = two_epochs(tools, samples, [(3, 1), (0, 2)], lockstep=way != "fsdp last_row")
            config = config_of(tools, tied_policy, frozen, kind, settings=settings, ranks=2)
            scenarios[kind, way] = Scenario(config, [*step, *step, ("parameters", ())])
    return run_ranks(tmp_path_factory.mktemp("reference_ranks"), scenarios, 2)


def steps_of(results):
    return [result for result in results if isinstance(result, dict) and "learner/loss" in result]


def check_equal(own, workers):
    """Losses, gradient norms and KL of eight updates, and the weights after them."""
    assert len(steps_of(own)) == 8
    for step, expected in zip(steps_of(own), steps_of(workers), strict=True):
        for name in ("learner/loss", "learner/grad_norm", "learner/kl"):
            assert step[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert steps_of(own)[-1]["learner/kl"] > 1e-3
    # A hundredth of a step: AdamW divides a small gradient by its own size, and its rounding with it.
    assert_tensors_close(own[-1], workers[-1], rtol=1e-4, atol=LEARNER.lr / 100)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LEARNERS)
def test_updates_on_two_ranks_are_those_with_reference_workers(two_ranks, expected, kind, way):
    for rank in two_ranks:
        check_equal(rank[kind, way], expected[kind])


@pytest.mark.parametrize("kind", LEARNERS)
def test_updates_at_one_rank_are_those_with_reference_workers(tools, tied_policy, frozen, samples, expected, kind):
    step = two_epochs(tools, samples, [(3,), (1,)], lockstep=True)
    check_equal(
        tools.run_here(config_of(tools, tied_policy, frozen, kind), [*step, *step, ("parameters", ())]), expected[kind]
    )


def test_no_reference_is_loaded_without_a_kl_in_the_loss(tools, tied_policy):
    config = tools.make_config(tied_policy, learner=LEARNER, objective=ObjectiveConfig(kl_coef=0.0))
    worker = LearnerWorker(replace(config, reference=replace(HERE, path="nowhere")), 0, 1, 10)
    worker.setup(None)
    assert worker.reference is None


def test_rows_are_seen_once_a_step():
    seen = []

    def forward(row, temperature):
        seen.append(temperature)
        return (
            torch.full((2,), -float(len(seen))),
            torch.zeros(2),
            torch.zeros(2, row.others),
            torch.zeros(2, row.others),
        )

    row = pack_row([(np.array([5], np.int32), [np.array([1, 2], np.int32)])], "cpu")
    reference = ReferencePolicy(forward, 0.7, 5)

    def logprobs(number):
        scores = reference.scores(row, (number, 0))
        assert scores.ids.shape == scores.likely.shape == (2, 5)
        return scores.logprobs.tolist()

    assert [logprobs(0), logprobs(1)] == [[-1, -1], [-2, -2]]
    reference.end_update(is_last=False)
    assert [logprobs(1), logprobs(0)] == [[-2, -2], [-1, -1]]
    assert reference.scores(row, None) is None  # a row of weight zero: nobody else computes now
    reference.end_update(is_last=True)
    assert logprobs(0) == [-3, -3] and seen == [0.7] * 3


def check_offload(tools, path, device, samples):
    """Log-probabilities stay, and of the layers' weights at most one layer's is outside host memory at a time."""
    config = tools.make_config(path)
    row = pack_samples(samples, device).row
    plain, offloaded = load_frozen_policy(config, device), load_frozen_policy(config, "cpu")
    keep_in_host_memory(offloaded, torch.device(device))
    held = {parameter: parameter.data_ptr() for parameter in offloaded.parameters()}
    moved = []
    for layer in offloaded.decoder_layers():
        layer.mlp.register_forward_hook(
            lambda *_: moved.append([parameter.data_ptr() != held[parameter] for parameter in offloaded.parameters()])
        )
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(offloaded(row, 0.7)[0], plain(row, 0.7)[0])
    one_layer = len(list(offloaded.decoder_layers()[0].parameters()))
    assert [sum(parameters) for parameters in moved] == [len(held) - one_layer] * 4  # of two layers
    assert all(
        parameter.data_ptr() == address and parameter.device.type == "cpu" for parameter, address in held.items()
    )


def test_an_offloaded_reference_brings_one_layer_at_a_time(tools, tied_policy, untied_policy, samples):
    check_offload(tools, tied_policy, "cpu", samples)
    check_offload(tools, untied_policy, "cpu", samples)


@pytest.mark.gpu
def test_an_offloaded_reference_keeps_its_weights_in_host_memory(tools, tied_policy, samples):
    check_offload(tools, tied_policy, GPU, samples)


def test_a_run_with_the_reference_on_its_learner_has_no_reference_worker(tools, tied_policy):
    config = replace(tools.make_config(tied_policy), cluster=ClusterConfig(learner_ranks=2, reference_workers=3))
    assert [group.role for group in worker_groups(config)] == ["rollout", "reward", "learner", "reference"]
    config = replace(config, reference=ReferenceConfig(placement="learner", path="other", offload=True))
    assert [group.role for group in worker_groups(config)] == ["rollout", "reward", "learner"]

"""FSDP2 on real ranks: reduced with the last row only, sharded over some of the ranks, in 16 bits, offloaded."""

import copy
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Olmo2Config, Olmo2ForCausalLM

from infsample_rl.config import LearnerConfig, ObjectiveConfig
from infsample_rl.learner.fsdp_backend import FsdpBackend
from infsample_rl.learner.optimizer import build_optimizer, load_moments, moments
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.packing import pack_samples
from infsample_rl.types import LossTotals
from tests.gpu import GPU
from tests.learner_ranks import Scenario, end_ranks, run_ranks, start_ranks
from tests.tiny_models import TINY_SIZES, assert_tensors_close

pytestmark = pytest.mark.slow  # real processes for minutes; test_learner_ranks.py has every backend in `make test`

OBJECTIVE = ObjectiveConfig(kl_coef=0.1)
EVERY_ROW = LearnerConfig(lr=2e-3, max_grad_norm=0.5, max_tokens_per_micro_batch=256, logprob_chunk_tokens=7)
LAST_ROW = replace(EVERY_ROW, grad_sync="last_row")
# of an update without samples: its gradient is dropped
NOTHING = LossTotals(num_sequences=0, num_tokens=0, length_normalizer=16)
PROVISIONAL = LossTotals(num_sequences=12, num_tokens=200, length_normalizer=16)


def random_cases(tools, samples, count):
    """(kept samples, rows of two ranks): some groups dropped or cut short by failed rewards, the others cut and dealt
    at random."""
    generator = random.Random(5)
    for _ in range(count):
        dropped = generator.sample(range(3), generator.randint(0, 2))
        kept = [sample for sample in samples if sample.prompt_index not in dropped and generator.random() < 0.8]
        rows, ranks = tools.cut(kept, generator.randint(1, max(1, len(kept)))) if kept else [], [[], []]
        for row in rows:
            generator.choice(ranks).append(row)
        yield kept, ranks


def two_updates(tools, samples, *, lockstep):
    """Two updates from the same samples, the second from ratios to the policy before the first."""
    first, second = samples[:8], samples[8:]
    calls = []
    for number, (row, rank) in enumerate([(second[:2], 0), (second[2:], 1)]):
        others = (None, -1) if lockstep else None
        calls.append(("remember", [(row, 10 + number) if rank == own else others for own in (0, 1)]))
    rows = [[(first[:3], 0), (first[3:5], 1)], [(first[5:], 2)]]
    calls += tools.waves(rows, tools.totals_of(first), lockstep=lockstep, numbered=True)
    calls += [("step", {"totals": tools.totals_of(first), "is_last": False}), ("full_parameters", ())]
    rows = [[(second[:2], 10)], [(second[2:], 11)]]
    calls += tools.waves(rows, tools.totals_of(second), lockstep=lockstep, numbered=True)
    return [*calls, ("step", (tools.totals_of(second),)), ("parameters", ())]


def free_ranks(tools, samples, folder):
    """Rank 1 does not even start until rank 0 has run all its rows."""
    totals, (rows, others) = tools.totals_of(samples), tools.deal(samples, (3, 1))
    calls = [("accumulate", [(row, totals), None]) for row in rows]
    calls += [("write_file", [(str(folder / "done"),), None]), ("wait_for_file", [None, (str(folder / "done"),)])]
    return [
        *calls,
        ("accumulate", [None, (others[0], totals)]),
        ("step", (totals,)),
        ("parameters", ()),
        ("full_parameters", ()),
    ]


@pytest.fixture(scope="module")
def samples(tools, untied_policy):
    return tools.make_samples(tools.load_plain(untied_policy))


@pytest.fixture(scope="module")
def two_ranks(tools, samples, untied_policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    bf16 = tools.make_samples(tools.load_plain(untied_policy, torch.bfloat16))
    totals = tools.totals_of(samples)
    scenarios = {}
    for name, learner in (("every_row", EVERY_ROW), ("last_row", LAST_ROW)):
        lockstep = name == "every_row"
        config = tools.make_config(untied_policy, learner=learner, objective=OBJECTIVE, ranks=2)
        calls = []
        for _, ranks in random_cases(tools, samples, 6):
            calls += (
                [*tools.waves(ranks, PROVISIONAL, lockstep=lockstep), ("gradients", ()), ("step", (NOTHING,))]
                if any(ranks)
                else []
            )
        scenarios[f"{name}, random"] = Scenario(config, calls)
        scenarios[f"{name}, two updates"] = Scenario(config, two_updates(tools, samples, lockstep=lockstep))
        config = tools.make_config(untied_policy, learner=learner, objective=OBJECTIVE, dtype="bfloat16", ranks=2)
        calls = [
            *tools.waves(tools.deal(bf16, (3, 0)), totals, lockstep=lockstep),
            ("step", (totals,)),
            ("parameters", ()),
            ("full_parameters", ()),
        ]
        scenarios[f"{name}, bf16"] = Scenario(config, calls)
    config = tools.make_config(untied_policy, learner=LAST_ROW, objective=OBJECTIVE, ranks=2)
    scenarios["free"] = Scenario(config, free_ranks(tools, samples, folder))
    config = tools.make_config(
        untied_policy, learner=replace(EVERY_ROW, offload_optimizer=True), objective=OBJECTIVE, ranks=2
    )
    calls = [*tools.waves(tools.deal(samples, (3, 1)), totals), ("step", (totals,)), ("parameters", ())]
    scenarios["offload"] = Scenario(config, calls)
    return run_ranks(folder, scenarios, 2)


@pytest.mark.parametrize("grad_sync", ["every_row", "last_row"])
def test_any_deal_of_any_rows_with_dropped_groups_gives_the_plain_gradient(
    tools, two_ranks, samples, untied_policy, grad_sync
):
    lm = tools.load_plain(untied_policy)
    found = [result for result in two_ranks[1][f"{grad_sync}, random"] if result and "lm_head.weight" in result]
    cases = [kept for kept, ranks in random_cases(tools, samples, 6) if any(ranks)]
    assert len(found) == len(cases) >= 4
    assert any(len(kept) < 12 for kept in cases)
    for kept, gradients in zip(cases, found, strict=True):
        scaled = {name: gradient * PROVISIONAL.num_sequences / len(kept) for name, gradient in gradients.items()}
        assert_tensors_close(scaled, tools.plain_gradients(lm, kept, OBJECTIVE)[1], rtol=1e-4, atol=2e-6)


def test_ranks_run_their_rows_without_waiting_for_each_other(two_ranks, tools, samples, untied_policy):
    # that it ended is the point: with every_row rank 0 would wait for rank 1
    parameters, published = two_ranks[0]["free"][-2:]
    totals = tools.totals_of(samples)
    config = tools.make_config(untied_policy, learner=EVERY_ROW, objective=OBJECTIVE)
    expected = tools.run_here(config, [("accumulate", (samples, totals)), ("step", (totals,)), ("parameters", ())])[-1]
    for name, value in parameters.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-5)
        assert torch.equal(value, published[name])


@pytest.mark.parametrize("grad_sync", ["every_row", "last_row"])
def test_two_updates_from_the_same_samples_equal_those_of_one_rank(two_ranks, tools, samples, untied_policy, grad_sync):
    first, second = samples[:8], samples[8:]
    totals = [tools.totals_of(part) for part in (first, second)]
    calls = [
        ("remember", (second, 1)),
        ("accumulate", (first, totals[0], 0)),
        ("step", {"totals": totals[0], "is_last": False}),
    ]
    calls += [("accumulate", (second, totals[1], 1)), ("step", (totals[1],)), ("parameters", ())]
    expected = tools.run_here(tools.make_config(untied_policy, learner=EVERY_ROW, objective=OBJECTIVE), calls)
    found = two_ranks[0][f"{grad_sync}, two updates"]
    steps = [[result for result in results if result and "learner/loss" in result] for results in (found, expected)]
    for own, other in zip(*steps, strict=True):
        assert tools.figures(own) == pytest.approx(tools.figures(other), rel=1e-3, abs=1e-6)
    assert_tensors_close(found[-1], expected[-1], rtol=1e-4, atol=2e-5)


def test_bf16_ranks_that_keep_their_gradients_add_them_in_float32(two_ranks, tools):
    (*_, step, masters, published), (*_, other_step, other_masters, _) = (
        two_ranks[0][f"{name}, bf16"] for name in ("last_row", "every_row")
    )
    assert {value.dtype for value in masters.values()} == {torch.float32}
    assert {value.dtype for value in published.values()} == {torch.bfloat16}
    assert tools.figures(step) == pytest.approx(tools.figures(other_step), rel=1e-2, abs=1e-6)
    for name, value in masters.items():
        assert torch.equal(value.bfloat16(), published[name])
        torch.testing.assert_close(value, other_masters[name], rtol=1e-3, atol=1e-3)


def test_an_offloaded_optimizer_steps_alike(two_ranks, tools, samples, untied_policy):
    expected = two_ranks[0]["free"][-2]
    assert_tensors_close(two_ranks[0]["offload"][-1], expected, rtol=1e-4, atol=2e-5)


def test_four_ranks_in_pairs_that_share_a_policy_give_the_plain_update(tools, samples, untied_policy, tmp_path):
    totals, deal = tools.totals_of(samples), tools.deal(samples, (2, 1, 0, 1))
    scenarios = {}
    for name, learner in (("every_row", EVERY_ROW), ("last_row", LAST_ROW)):
        config = tools.make_config(untied_policy, learner=replace(learner, shard_ranks=2), objective=OBJECTIVE, ranks=4)
        calls = tools.waves(deal, totals, lockstep=name == "every_row")
        scenarios[name] = Scenario(config, [*calls, ("gradients", ()), ("step", (totals,)), ("parameters", ())])
    _, gradients = tools.plain_gradients(tools.load_plain(untied_policy), samples, OBJECTIVE)
    config = tools.make_config(untied_policy, learner=EVERY_ROW, objective=OBJECTIVE)
    parameters = tools.run_here(config, [("accumulate", (samples, totals)), ("step", (totals,)), ("parameters", ())])[
        -1
    ]
    for rank in run_ranks(tmp_path, scenarios, 4):
        for results in rank.values():
            assert_tensors_close(results[-3], gradients, rtol=1e-4, atol=2e-6)
            assert_tensors_close(results[-1], parameters, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "settings", [{}, {"grad_sync": "last_row"}, {"backend": "deepspeed", "zero_stage": 3}], ids=str
)
def test_a_rank_that_dies_in_its_backward_pass_ends_the_others_with_an_error(
    tools, samples, untied_policy, tmp_path, settings
):
    if "backend" in settings:
        pytest.importorskip("deepspeed")
    learner, totals = replace(EVERY_ROW, **settings), tools.totals_of(samples)
    config = tools.make_config(untied_policy, learner=learner, objective=OBJECTIVE, ranks=2)
    calls = [
        ("die_in_next_backward", [None, ()]),
        *tools.waves(tools.deal(samples, (1, 1)), totals),
        ("step", (totals,)),
    ]
    ranks = start_ranks(tmp_path, {"dies": Scenario(config, calls)}, 2)
    outputs = end_ranks(tmp_path, ranks)
    assert [rank.exitcode for rank in ranks] == [1, -9], "\n".join(outputs)
    assert "RuntimeError" in outputs[0] and "Timed out" not in outputs[0]


@pytest.fixture
def one_rank_group():
    """A process group of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow  # torch.compile
def test_8_bit_moments_of_shards_are_saved_as_float32_and_come_back(one_rank_group):
    pytest.importorskip("torchao")
    twins = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64)
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        twins.append((layer, build_optimizer(layer.parameters(), LearnerConfig(optimizer="adamw_8bit"))))
    (layer, optimizer), (twin, later) = twins
    layer(torch.ones(1, 64)).square().sum().backward()
    optimizer.step()
    saved = moments(optimizer, layer.weight)
    gradient = layer.weight.grad.full_tensor()
    torch.testing.assert_close(
        saved["exp_avg"].full_tensor(), 0.1 * gradient, rtol=0, atol=0.02 * 0.1 * gradient.abs().max().item()
    )
    load_moments(later, twin.weight, saved, 1)
    for name, value in moments(later, twin.weight).items():
        assert value.placements == saved[name].placements
        torch.testing.assert_close(
            value.full_tensor(),
            saved[name].full_tensor(),
            rtol=0,
            atol=0.01 * saved[name].full_tensor().abs().max().item(),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [EVERY_ROW, LAST_ROW])
def test_on_a_gpu_an_offloaded_optimizer_is_in_host_memory_and_steps_alike(
    tools, one_rank_group, samples, untied_policy, settings
):
    device, found = torch.device(GPU), {}
    for offload in (True, False):
        policy = PackedPolicy(tools.load_plain(untied_policy).to(device), valid_vocab=60, chunk_tokens=7)
        learner = replace(settings, offload_optimizer=offload)
        backend = FsdpBackend(policy, learner, device=device, dtype=torch.float32, world_size=1)
        for _ in range(2):
            backend.backward(backend.forward(pack_samples(samples[:6], device).row, 0.7)[0].sum())
            backend.reduce_with_next_backward()
            backend.backward(backend.forward(pack_samples(samples[6:], device).row, 0.7)[0].sum())
            norm = backend.update(factor=0.5, max_norm=1.0, lr=1e-3)
        if offload:
            assert {shard.to_local().device.type for shard in backend.shards.values()} == {"cpu"}
        masters = {name: master.cpu() for name, master in backend.training_states(["master"])}
        published = {name: tensor.clone() for name, tensor in backend.full_parameters()}
        assert {tensor.device.type for tensor in published.values()} == {GPU}
        found[offload] = norm, masters
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-3)
    assert_tensors_close(found[True][1], found[False][1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), pytest.param(GPU, torch.bfloat16, marks=pytest.mark.gpu)],
)
def test_two_updates_repeat_bit_by_bit(tools, one_rank_group, samples, untied_policy, device, dtype):
    found = []
    torch.use_deterministic_algorithms(True, warn_only=True)  # as a learner where run.deterministic
    try:
        for _ in range(2):
            policy = PackedPolicy(tools.load_plain(untied_policy).to(device), valid_vocab=60, chunk_tokens=7)
            backend = FsdpBackend(policy, EVERY_ROW, device=torch.device(device), dtype=dtype, world_size=1)
            for _ in range(2):
                for part in (samples[:6], samples[6:]):
                    backend.backward(backend.forward(pack_samples(part, torch.device(device)).row, 0.7)[0].sum())
                backend.update(factor=0.5, max_norm=1.0, lr=1e-3)
            found.append({name: master.cpu() for name, master in backend.training_states(["master"])})
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_given_what_those_of_a_whole_model_are(one_rank_group, samples, dtype):
    """OLMo 2 rotates by angles in float32; and of a copy of the cuts every layer would make masks of its own."""
    torch.manual_seed(0)
    lm = Olmo2ForCausalLM(Olmo2Config(**TINY_SIZES, initializer_range=0.2)).eval()
    whole, policy = (PackedPolicy(each, valid_vocab=60, chunk_tokens=7) for each in (copy.deepcopy(lm), lm))
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(dtype)
    backend = FsdpBackend(policy, EVERY_ROW, device=torch.device("cpu"), dtype=dtype, world_size=1)
    row, seen = pack_samples(samples[:6], "cpu").row, []
    for layer in policy.decoder_layers():
        layer.self_attn.register_forward_pre_hook(lambda *given: seen.append(given[2]["cuts"]), with_kwargs=True)
    logprobs = backend.forward(row, 0.7)[0]
    assert len(seen) == len(policy.decoder_layers()) and all(cuts is row.cuts for cuts in seen)
    assert torch.equal(logprobs, whole(row, 0.7)[0])

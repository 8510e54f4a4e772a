"""The learner's memory is set by the tokens of a row, not by the group; what lies where with an offloaded optimizer."""

import json
import subprocess
import sys

import pytest
import torch

from infsample_rl.config import LearnerConfig
from infsample_rl.learner.unsharded_backend import UnshardedBackend
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.packing import pack_samples
from tests.gpu import GPU
from tests.tiny_models import assert_tensors_close

LEARNER = LearnerConfig(lr=1e-3, max_tokens_per_micro_batch=256, logprob_chunk_tokens=7)


def bench(tiny_qwen3, *arguments):
    command = [
        sys.executable,
        "-m",
        "benchmarks.learner_memory",
        f"model={tiny_qwen3}",
        "json=true",
        "threads=1",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow  # real processes for minutes
def test_peak_memory_is_flat_in_the_group_size_and_the_rivals_grows(tools, tiny_qwen3):
    row = ("max_tokens_per_micro_batch=512", "max_new_tokens=64", "prompt_tokens=32")
    records = bench(tiny_qwen3, "groups=[16,128]", "max_full_batch_group=128", *row)
    assert [(record["name"], record["group_size"]) for record in records] == [
        ("ours", 16),
        ("ours", 128),
        ("full batch", 16),
        ("full batch", 128),
    ]
    small, large, rival_small, rival_large = records
    assert (small["passes"], large["passes"], rival_large["passes"]) == (2, 14, 1)
    assert large["tokens"] == rival_large["tokens"] > 7 * small["tokens"]
    assert large["rest_bytes"] < 1.25 * small["rest_bytes"] + 4e6  # the allocator's noise in a small process
    assert rival_large["rest_bytes"] > 3 * rival_small["rest_bytes"]
    assert rival_large["rest_bytes"] > 3 * large["rest_bytes"]
    weights = sum(parameter.nbytes for parameter in tools.load_plain(tiny_qwen3).parameters())
    # float32: weight, gradient, two moments, and AdamW's step counts
    assert 4 * weights <= small["state_bytes"] < 4.01 * weights


def masters_of(backend):
    return {name.removesuffix("/master"): value.cpu().clone() for name, value in backend.training_states(["master"])}


def updates(tools, path, learner, dtype, device="cpu"):
    """Two updates of an unsharded backend from the same samples: (backend, masters)."""
    policy = PackedPolicy(tools.load_plain(path).to(device), valid_vocab=60, chunk_tokens=7)
    backend = UnshardedBackend(policy, learner, dtype=dtype)
    samples = tools.make_samples(tools.load_plain(path))
    for _ in range(2):
        for part in (samples[:5], samples[5:]):
            backend.backward(backend.forward(pack_samples(part, device).row, 0.7)[0].sum())
        backend.update(factor=0.1, max_norm=0.5, lr=1e-3)
    return backend, masters_of(backend)


@pytest.mark.slow  # test_learner_ranks.py has every backend in `make test`
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_optimizer_steps_alike_and_has_copies_only_where_something_has_to_move(tools, tied_policy, dtype):
    plain, expected = updates(tools, tied_policy, LEARNER, dtype)
    offloaded, found = updates(tools, tied_policy, LearnerConfig(**{**vars(LEARNER), "offload_optimizer": True}), dtype)
    # on the CPU the weights are in host memory
    assert plain.has_copies == offloaded.has_copies == (dtype != torch.float32)
    parameters = dict(offloaded.policy.lm.named_parameters())
    for name, master in found.items():
        assert torch.equal(master, expected[name]), name
        assert torch.equal(parameters[name], master.to(dtype)), name  # the engine reads what the optimizer has stepped
        assert parameters[name].grad is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_offloaded_masters_and_moments_are_in_host_memory(tools, tied_policy, dtype):
    plain, expected = updates(tools, tied_policy, LEARNER, dtype, GPU)
    offloaded, found = updates(
        tools, tied_policy, LearnerConfig(**{**vars(LEARNER), "offload_optimizer": True}), dtype, GPU
    )
    assert {tensor.device.type for _, tensor in offloaded.training_states()} == {"cpu"}
    assert {parameter.device.type for parameter in offloaded.policy.lm.parameters()} == {GPU}
    if dtype == torch.float32:
        assert_tensors_close(found, expected, rtol=1e-3, atol=1e-4)
    else:  # AdamW's first steps go by a gradient's sign, which sums in another order may turn where it is next to none
        apart = [(found[name] - expected[name]).abs() > 1e-4 for name in expected]
        assert torch.cat([each.flatten() for each in apart]).float().mean() < 1e-3
    assert {tensor.device.type for _, tensor in plain.training_states()} == {GPU}

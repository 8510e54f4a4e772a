"""The noise, what is drawn with it, and the cuts of top_p, top_k and min_p."""

import math
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infsample_rl.rollout.engine.sampler import Sampler, _mix, nucleus_cutoff, sample_key
from tests.gpu import GPU

CPU = torch.device("cpu")


def make_sampler(vocab_size, *, valid_vocab=None, device=CPU, **settings):
    return Sampler(
        vocab_size,
        valid_vocab or vocab_size,
        **({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | settings),
        device=device,
    )


def draw(sampler, logits, keys, positions):
    """Drawn lists from lists."""
    device = logits.device
    return sampler.to_host(
        sampler.draw(logits, torch.tensor(keys, device=device), torch.tensor(positions, device=device))
    )


class Draws(NamedTuple):
    tokens: torch.Tensor
    logprobs: torch.Tensor
    sampling_logprobs: torch.Tensor | None


def draw_many(sampler, logits, count):
    """`count` draws from one distribution, as the first tokens of samples 0, 1, ... of prompt 0."""
    keys = [sample_key(7, 0, 3, 0, index) for index in range(count)]
    drawn = draw(sampler, logits.repeat(count, 1), keys, [0] * count)
    sampling_logprobs = None if drawn.sampling_logprobs is None else torch.tensor(drawn.sampling_logprobs)
    return Draws(torch.tensor(drawn.tokens), torch.tensor(drawn.logprobs), sampling_logprobs)


def chi_square_z(tokens, probs):
    """Standard deviations by which the chi-square of the counts lies above its mean."""
    expected = probs.double() * len(tokens)
    used = expected > 5
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    chi = ((counts - expected)[used] ** 2 / expected[used]).sum().item()
    return (chi - (int(used.sum()) - 1)) / math.sqrt(2 * (int(used.sum()) - 1))


def test_positions_of_one_sample_draw_independently():
    logits = torch.zeros(16)
    sampler = make_sampler(16)
    tokens = draw(sampler, logits.repeat(30_001, 1), [sample_key(0, 0, 0, 0, 0)] * 30_001, list(range(30_001))).tokens
    tokens = torch.tensor(tokens)
    pairs = tokens[:-1] * 16 + tokens[1:]
    assert abs(chi_square_z(pairs, torch.full((256,), 1 / 256))) < 4


def test_the_key_depends_on_every_word():
    base = sample_key(1, 0, 2, 3, 4)
    words = [(2, 0, 2, 3, 4), (1, 1, 2, 3, 4), (1, 0, 3, 3, 4), (1, 0, 2, 4, 4), (1, 0, 2, 3, 5)]
    others = {sample_key(*each) for each in words}
    assert len(others | {base}) == 6
    assert all(-(2**63) <= key < 2**63 for key in others)
    assert sample_key(0, 0, 0, 0, 0) == 8695987549771912286  # kept: another value would change every run's samples


def test_the_hash_of_tensors_is_splitmix64():
    increment = 0x9E3779B97F4A7C15 - 2**64
    first, second = 0xE220A8397B1DCDAF - 2**64, 0x6E789E6AA1B965F4  # published outputs from state 0
    assert _mix(torch.tensor([1, 2]) * increment).tolist() == [first, second]


def test_temperature_zero_is_argmax_with_log_probabilities_at_temperature_one():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    drawn = draw(make_sampler(3, temperature=0.0, top_p=0.5), logits.clone(), [1, 2], [0, 0])
    assert drawn.tokens == [1, 0]
    torch.testing.assert_close(torch.tensor(drawn.logprobs), torch.log_softmax(logits, -1)[[0, 1], [1, 0]])
    assert drawn.sampling_logprobs is None


def kept_distribution(logits, *, valid_vocab, bad, temperature, top_p, top_k, min_p):
    """The truncated distribution by definition, in float64, one token after another; and the untruncated one."""
    allowed = [token for token in range(valid_vocab) if token not in bad]
    probs = torch.zeros(len(logits), dtype=torch.float64)
    probs[allowed] = torch.softmax(logits[allowed].double() / temperature, -1)
    kept, mass = [], 0.0
    candidates = sorted(allowed, key=lambda token: -probs[token].item())[: top_k or None]
    total = probs[candidates].sum().item()
    for token in candidates:
        if mass < top_p * total and probs[token] >= min_p * probs.max():
            kept.append(token)
        mass += probs[token].item()
    truncated = torch.zeros_like(probs)
    truncated[kept] = probs[kept] / probs[kept].sum()
    return truncated, probs


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p"), [(1.0, 0, 0.0), (0.9, 0, 0.0), (1.0, 9, 0.0), (1.0, 0, 0.2), (0.95, 25, 0.1)]
)
def test_sampled_frequencies_are_the_truncated_softmax_without_bad_and_padded_ids(top_p, top_k, min_p):
    logits = torch.randn(101, generator=torch.Generator().manual_seed(5)) * 2
    bad = [int(logits.argmax()), 3, 3, 17, *range(40, 50)]  # the best one among them
    settings = {"valid_vocab": 96, "temperature": 0.9, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    expected, untruncated = kept_distribution(logits, bad=bad, **settings)
    drawn = draw_many(make_sampler(101, bad_token_ids=bad, **settings), logits, 60_000)
    assert set(drawn.tokens.tolist()) <= set(expected.nonzero()[:, 0].tolist())
    assert abs(chi_square_z(drawn.tokens, expected)) < 4
    torch.testing.assert_close(drawn.logprobs, untruncated.log()[drawn.tokens].float(), atol=1e-5, rtol=0)
    if (top_p, top_k, min_p) != (1.0, 0, 0.0):
        torch.testing.assert_close(drawn.sampling_logprobs, expected.log()[drawn.tokens].float(), atol=1e-5, rtol=0)


def test_the_one_id_that_is_left_is_drawn():
    only = draw_many(make_sampler(10, valid_vocab=6, bad_token_ids=[0, 1, 2, 4, 5]), torch.zeros(10), 5)
    assert only.tokens.tolist() == [3] * 5 and only.logprobs.tolist() == [0.0] * 5


def test_logits_that_are_not_finite_give_a_log_probability_that_is_not():
    for settings in ({}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.9}):
        drawn = draw(make_sampler(8, **settings), torch.tensor([[0.0] * 7 + [math.nan], [0.0] * 8]), [1, 2], [0, 0])
        assert math.isnan(drawn.logprobs[0]) and math.isfinite(drawn.logprobs[1])


class Operations(TorchDispatchMode):
    """Remembers the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.add(function.overloadpacket.__name__)
        return result


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.9, "min_p": 0.01}, {"min_p": 0.1}]
)
def test_drawing_reads_nothing_back_to_the_host(settings):
    sampler = make_sampler(60, valid_vocab=55, bad_token_ids=[7], **settings)
    with Operations() as operations:
        sampler.draw(torch.randn(4, 60), torch.arange(4), torch.arange(4))
        nucleus_cutoff(torch.full((2, 8), 0.125), 0.9)
    assert "softmax" in str(operations.names)
    assert (
        operations.names & {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "unique"} == set()
    )


def test_the_bisected_nucleus_written_out():
    probs = torch.tensor([[0.25, 0.5, 0.125, 0.125, 0.0], [0.25, 0.25, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    assert nucleus_cutoff(probs, 0.5)[:, 0].tolist() == [0.5, 0.25, 1.0]
    assert nucleus_cutoff(probs, 0.75)[:, 0].tolist() == [0.25, 0.25, 1.0]
    assert nucleus_cutoff(probs, 0.76)[:, 0].tolist() == [0.125, 0.25, 1.0]  # both ties are kept
    assert nucleus_cutoff(probs * 0.9, 0.95)[:, 0].tolist() == [0.0, 0.0, 0.0]  # no sum reaches it: all are kept
    scratch = torch.full_like(probs, math.nan)
    assert nucleus_cutoff(probs, 0.76, scratch)[:, 0].tolist() == [0.125, 0.25, 1.0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01}],
)
def test_a_cuda_graph_of_draw_gives_the_tokens_of_the_cpu(settings):
    logits = torch.randn(32, 151936, generator=torch.Generator().manual_seed(8)) * 3
    keys, positions = [sample_key(0, 0, 0, 0, index) for index in range(32)], list(range(32))
    options = {"valid_vocab": 151643, "bad_token_ids": [5, 77], **settings}
    expected = draw(make_sampler(151936, **options), logits.clone(), keys, positions)
    sampler = make_sampler(151936, device=torch.device(GPU), **options)
    inputs = [torch.zeros(32, 151936, device=GPU), *torch.tensor([[0] * 32, [0] * 32], device=GPU)]
    with torch.cuda.stream(torch.cuda.Stream()):
        sampler.draw(*inputs, in_triton=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a host sync inside would be refused
        drawn = sampler.draw(*inputs, in_triton=True)
    for target, source in zip(inputs, (logits, torch.tensor(keys), torch.tensor(positions)), strict=True):
        target.copy_(source)
    graph.replay()
    on_gpu = sampler.to_host(drawn)
    same = [left == right for left, right in zip(on_gpu.tokens, expected.tokens, strict=True)]
    assert sum(same) >= 31  # another rounding of the sums may move one token that nearly ties
    for left, right, equal in zip(on_gpu.logprobs, expected.logprobs, same, strict=True):
        assert not equal or left == pytest.approx(right, abs=1e-4)


def test_cuts_reach_beyond_the_first_candidates_and_do_not_depend_on_a_neighbour():
    flat, sharp = torch.linspace(1.5, 1.0, 3000).div(3750), torch.eye(3000)[0]
    top_k, top_p = make_sampler(3000, top_k=1500), make_sampler(3000, top_p=0.9)
    assert int((flat >= top_k._cutoff(flat[None])).sum()) == 1500
    assert int((flat >= top_p._cutoff(flat[None])).sum()) in range(2610, 2650)
    assert top_p._cutoff(torch.stack([flat, sharp]))[0] == top_p._cutoff(flat[None])[0]

"""The head as engine, learner and reference share it: masked ids have no probability, float32 logits are exact."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from infsample_rl.model import policy_head
from infsample_rl.model.logprobs import PackedPolicy, token_logprobs
from infsample_rl.model.packing import pack_row
from infsample_rl.model.policy_head import head_backward, head_logits, masked_index
from infsample_rl.plan.memory_trace import MemoryTrace
from tests.gpu import GPU
from tests.tiny_models import TINY_SIZES


def random_head(rows, vocab=300, size=64, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, size, generator=generator).to(dtype), torch.randn(vocab, size, generator=generator).mul(
        0.4
    ).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
# one row of the head at a time; slices that do not divide it; all
@pytest.mark.parametrize("slice_elements", [1, 64 * 7, 2**19])
def test_float32_logits_are_exact_products_summed_in_float32(dtype, slice_elements, monkeypatch):
    monkeypatch.setitem(policy_head._SLICE_ELEMENTS, "cpu", slice_elements)
    hidden, weight = random_head(5, dtype=dtype)
    logits = head_logits(hidden, weight, fp32=True)
    exact = hidden.double() @ weight.double().T
    assert logits.dtype == torch.float32 and logits.shape == (5, 300)
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=2e-5)
    rounded = head_logits(hidden, weight, fp32=False)
    assert rounded.dtype == dtype
    assert (rounded.double() - exact).abs().max() > 50 * (logits - exact).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_weights_need_no_second_way(dtype):
    hidden, weight = random_head(5, dtype=dtype)
    assert torch.equal(head_logits(hidden, weight, fp32=True), torch.nn.functional.linear(hidden, weight))


@pytest.mark.parametrize("slice_elements", [64 * 7, 2**19])
def test_gradients_are_those_of_float32_rounded_once(slice_elements, monkeypatch):
    monkeypatch.setitem(policy_head._SLICE_ELEMENTS, "cpu", slice_elements)
    hidden, weight = random_head(5)
    upstream = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    of_weight = torch.zeros_like(weight)
    own = head_backward(upstream, hidden, weight, of_weight, fp32=True), of_weight
    exact = (upstream.double() @ weight.double(), upstream.double().T @ hidden.double())
    for gradient, expected in zip(own, exact, strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), expected, rtol=2**-8, atol=1e-5)  # half a bfloat16 step is 2**-9
    assert torch.equal(head_backward(upstream, hidden, weight, None, fp32=True), own[0])


class LargestFloat32(TorchDispatchMode):
    """Remembers the most float32 elements that an operation returned."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                self.largest = max(self.largest, value.numel())
        return result


def test_no_float32_copy_of_the_head_exists(monkeypatch):
    monkeypatch.setitem(policy_head._SLICE_ELEMENTS, "cpu", 64 * 30)
    hidden, weight = random_head(2)
    with LargestFloat32() as forward_and_backward:
        logits = head_logits(hidden, weight, fp32=True)
        head_backward(logits, hidden, weight, torch.zeros_like(weight), fp32=True)
    assert forward_and_backward.largest == 64 * 30  # the head has 64 x 300


def test_a_chunks_logits_are_gone_before_the_next_are_there():
    hidden, weight = (torch.randn(rows, 8, device="meta", requires_grad=True) for rows in (64, 1000))
    with MemoryTrace([hidden, weight]) as trace:
        logprobs, *_ = token_logprobs(
            hidden, weight, torch.arange(64, device="meta"), temperature=0.9, chunk_tokens=16, valid_vocab=1000
        )
        trace.moment = "head"
        logprobs.sum().backward()
    chunk, of_weight = 4 * 16 * 1000, 4 * 1000 * 8
    # logits and their gradient, and what is on the way to the weight's
    assert trace.fullest["head"].total() < 2.2 * chunk + 2 * of_weight


def test_the_policy_is_the_softmax_over_the_ids_that_are_left():
    hidden, weight = random_head(9, vocab=20, size=8, dtype=torch.float64)
    hidden.requires_grad_()
    bad, left = [2, 3, 19], [token for token in range(20) if token not in (2, 3, 19)]
    labels = torch.tensor(left)[torch.randint(0, 17, (9,), generator=torch.Generator().manual_seed(3))]
    masked = masked_index(bad, 20, "cpu")
    settings = {"temperature": 0.7, "chunk_tokens": 4, "valid_vocab": 20, "masked": masked}
    logprobs, entropy, *_ = token_logprobs(hidden, weight, labels, **settings)
    table = (hidden @ weight[left].T / 0.7).log_softmax(-1)
    expected = table.gather(-1, torch.tensor([[left.index(label)] for label in labels.tolist()]))[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, -(table.exp() * table).sum(-1).detach(), rtol=0, atol=1e-12)
    own, plain = (torch.autograd.grad(values.sum(), hidden)[0] for values in (logprobs, expected))
    torch.testing.assert_close(own, plain, rtol=0, atol=1e-12)


def test_where_no_other_ids_are_asked_for_none_are_looked_for(monkeypatch):
    """A GPU's topk sorts all of a few long rows, for no id too."""
    monkeypatch.setattr(torch.Tensor, "topk", lambda *_, **__: pytest.fail("topk"))
    hidden, weight = random_head(9, vocab=20, size=8, dtype=torch.float32)
    settings = {"temperature": 0.7, "chunk_tokens": 4, "valid_vocab": 20, "masked": masked_index([3], 20, "cpu")}
    _, _, ids, likely = token_logprobs(hidden, weight, torch.zeros(9, dtype=torch.int64), **settings)
    assert ids.shape == likely.shape == (9, 0)


@pytest.mark.parametrize("chunk_tokens", [4, 9])
def test_other_ids_are_scored_beside_the_labels_with_their_gradient(chunk_tokens):
    hidden, weight = random_head(9, vocab=20, size=8, dtype=torch.float64)
    hidden.requires_grad_()
    weight.requires_grad_()
    left = [token for token in range(20) if token not in (2, 3, 19)]
    numbers = torch.Generator().manual_seed(3)
    labels = torch.tensor(left)[torch.randint(0, 17, (9,), generator=numbers)]
    settings = {"temperature": 0.7, "chunk_tokens": chunk_tokens, "valid_vocab": 20}
    settings |= {"masked": masked_index([2, 3, 19], 20, "cpu"), "entropy_gradient": True}
    table = torch.full((9, 20), -torch.inf, dtype=torch.float64)
    table = table.index_copy(1, torch.tensor(left), (hidden @ weight[left].T / 0.7).log_softmax(-1))
    with torch.no_grad():
        _, _, ids, likely = token_logprobs(hidden, weight, labels, **settings, others=5)
    assert torch.equal(ids, table.topk(5).indices)
    torch.testing.assert_close(likely, table.topk(5).values, rtol=0, atol=1e-12)
    ids[0, 0] = labels[0]  # an id may be the label too
    logprobs, entropy, same, likely = token_logprobs(hidden, weight, labels, **settings, others=ids)
    assert torch.equal(same, ids)
    weights = torch.randn(9, 5, generator=numbers, dtype=torch.float64)
    entropies = -(table.exp() * table.nan_to_num(neginf=0.0)).sum(-1)
    plain = table.gather(-1, labels[:, None]).sum() + 0.3 * entropies.sum() + (weights * table.gather(-1, ids)).sum()
    own = logprobs.sum() + 0.3 * entropy.sum() + (weights * likely).sum()
    for found, wanted in zip(*(torch.autograd.grad(each, [hidden, weight]) for each in (own, plain)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def test_a_masked_id_gets_no_gradient_and_a_row_of_weight_zero_gives_none():
    hidden, weight = (tensor.requires_grad_() for tensor in random_head(1, vocab=6, size=4, dtype=torch.float32))
    settings = {"temperature": 1.0, "chunk_tokens": 4, "valid_vocab": 6, "masked": masked_index([0, 5], 6, "cpu")}
    logprobs, *_ = token_logprobs(hidden, weight, torch.tensor([1]), **settings)
    (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
    assert gradient[[0, 5]].abs().sum() == 0 and gradient[[1, 2, 3, 4]].abs().sum(-1).min() > 0
    dummy, *_ = token_logprobs(hidden, weight, torch.tensor([0]), **settings)
    assert dummy.item() == -math.inf  # the learner's filling rows name id 0, whatever it is
    for gradient in torch.autograd.grad((dummy * 0.0).sum(), (hidden, weight)):
        assert gradient.abs().sum() == 0


@pytest.mark.parametrize("head_fp32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_adds_its_gradient_itself_gives_autograds_and_in_16_bits_a_closer_one(dtype, head_fp32):
    hidden, weight = (tensor.requires_grad_() for tensor in random_head(200, vocab=50, size=16, dtype=dtype))
    labels = torch.randint(0, 48, (200,), generator=torch.Generator().manual_seed(3))
    settings = {"temperature": 0.7, "chunk_tokens": 2, "valid_vocab": 48, "head_fp32": head_fp32}
    token_logprobs(hidden, weight, labels, **settings)[0].sum().backward()
    through_autograd, of_hidden = weight.grad, hidden.grad
    weight.grad = hidden.grad = None
    before = torch.full(weight.shape, 0.5)
    total = before.clone()
    token_logprobs(hidden, weight, labels, **settings, weight_gradient=lambda: total)[0].sum().backward()
    assert weight.grad is None and torch.equal(hidden.grad, of_hidden)
    exact_hidden, exact = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    token_logprobs(exact_hidden, exact, labels, temperature=0.7, chunk_tokens=200, valid_vocab=48)[0].sum().backward()
    own, other = (
        (gradient.double() - exact.grad).abs().max().item() for gradient in (total - before, through_autograd)
    )
    assert (own < 0.3 * other) if dtype == torch.bfloat16 else (own < 1e-4 and other < 1e-4), (own, other)


def test_a_packed_row_with_masked_ids_and_a_float32_head():
    torch.manual_seed(0)
    lm = LlamaForCausalLM(LlamaConfig(**TINY_SIZES, initializer_range=0.2)).bfloat16()
    policy = PackedPolicy(lm, valid_vocab=60, chunk_tokens=4, bad_token_ids=[9, 50], head_fp32=True)
    assert "masked" not in policy.state_dict()  # checkpoints stay those of the model
    states = []
    lm.base_model.register_forward_hook(lambda *arguments: states.append(arguments[2].last_hidden_state[0, 1:4]))
    logprobs, entropy, *_ = policy(
        pack_row([(torch.tensor([5, 9]).numpy(), [torch.tensor([11, 4, 7]).numpy()])], "cpu"), 0.8
    )
    (hidden,) = states
    logits = (hidden.float() @ lm.lm_head.weight[:60].float().T / 0.8).index_fill(-1, torch.tensor([9, 50]), -math.inf)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1, 2], [11, 4, 7]], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy(), rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_float32_logits_on_cuda_are_those_of_the_cpu():
    hidden, weight = random_head(32, vocab=5000, size=512)
    expected = head_logits(hidden, weight, fp32=True)
    on_gpu = [tensor.to(GPU).requires_grad_() for tensor in (hidden, weight)]
    logits = head_logits(*on_gpu, fp32=True)
    torch.testing.assert_close(logits.cpu(), expected, rtol=0, atol=1e-4)
    on_cpu = [hidden.requires_grad_(), weight.requires_grad_()]
    upstream = torch.randn(32, 5000, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(logits, on_gpu, upstream.to(GPU))
    for own, other in zip(
        gradients, torch.autograd.grad(head_logits(*on_cpu, fp32=True), on_cpu, upstream), strict=True
    ):
        torch.testing.assert_close(own.cpu().float(), other.float(), rtol=2**-7, atol=1e-2)

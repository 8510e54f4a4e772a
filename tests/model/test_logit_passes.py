"""What is compiled on GPUs says what the passes in place say, which test_policy_head.py holds to autograd."""

from __future__ import annotations

import pytest
import torch

from infsample_rl.model import logit_passes
from infsample_rl.model.logit_passes import LogitPasses, fused_gradient, fused_summary
from infsample_rl.model.logprobs import token_logprobs
from tests.gpu import GPU

MASKS = [None, [0, 7, 38, 39]]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8}


def chunk(rows, dtype, masked, seed=0):
    """Logits and labels of which the last, where ids are masked, is one of them: a filling row, whose gradient is 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 40, generator=generator, dtype=torch.float64).mul(4).to(dtype)
    labels = torch.randint(1, 7, (rows,), generator=generator)
    wide = torch.promote_types(dtype, torch.float32)
    g, h = (torch.randn(rows, generator=generator, dtype=torch.float64).to(wide) for _ in range(2))
    if masked:
        labels[-1], g[-1], h[-1] = 0, 0, 0
    return logits, labels, g, h


def compare(rows, dtype, masked, of_entropy, run=lambda function: function):
    logits, labels, g, h = chunk(rows, dtype, masked)
    passes = LogitPasses(0.7, None if masked is None else torch.tensor(masked))
    own = passes.summary(logits.clone(), labels)
    mask = passes._mask(logits)
    fused = run(fused_summary)(logits, labels, mask, 0.7)
    for one, other in zip(own, fused, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=max(1e-12, TOLERANCE[g.dtype]))
    h = h if of_entropy else None
    for others in (None, (torch.randint(8, 38, (rows, 3)), torch.ones(rows, 3, dtype=g.dtype))):
        gradient = passes.gradient(logits.clone(), labels, own[2], own[1], g, h, others)
        of_all = g if others is None else g + 3
        found = run(fused_gradient)(logits, labels, own[2], own[1], g, of_all, h, mask, 0.7)
        found = passes.add_others_(found, others)
        assert found.dtype == dtype and gradient.dtype == g.dtype
        most = 3 / 0.7 if others else 0.0  # of one id, rounded when it is added
        atol = TOLERANCE[g.dtype] + TOLERANCE[dtype] * most
        torch.testing.assert_close(found.to(g.dtype), gradient, rtol=TOLERANCE[dtype], atol=atol)
        assert masked is None or found[:, masked].abs().sum() == 0


@pytest.mark.parametrize("of_entropy", [False, True])
@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_is_compiled_on_a_gpu_says_the_same(dtype, masked, of_entropy):
    compare(6, dtype, masked, of_entropy)


@pytest.mark.slow
@pytest.mark.parametrize("masked", MASKS)
def test_it_compiles_once_for_all_numbers_of_rows(masked):
    torch._dynamo.reset()
    logit_passes._compiled.cache_clear()
    compare(6, torch.bfloat16, masked, True, logit_passes._compiled)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (2, 9, 33):
            compare(rows, torch.bfloat16, masked, True, logit_passes._compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("head_fp32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_it_is_that_of_the_cpu_and_a_chunk_exists_once(dtype, head_fp32):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 64, generator=generator).mul(0.3).to(dtype) for size in (600, 20_000))
    labels, masked = torch.randint(1, 19_000, (600,), generator=generator), torch.arange(19_990, 20_000)
    found = []
    for device in ("cpu", GPU):
        inputs = [tensor.to(device).requires_grad_() for tensor in (hidden, weight)]
        settings = {"temperature": 0.8, "chunk_tokens": 256, "valid_vocab": 20_000, "head_fp32": head_fp32}
        settings |= {"masked": masked.to(device), "entropy_gradient": True}
        for _ in range(2):  # compiled in the first
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            logprobs, entropies, *_ = token_logprobs(*inputs, labels.to(device), **settings)
            gradients = torch.autograd.grad((logprobs + 0.1 * entropies).sum(), inputs)
            results = [tensor.detach().float().cpu() for tensor in (logprobs, entropies, *gradients)]
            del logprobs, entropies, gradients
        found.append(results)
        if device == "cuda":
            chunk_bytes = 256 * 20_000 * (4 if head_fp32 else hidden.element_size())
            of_weight = weight.numel() * weight.element_size()
            slices = 64 * 20_000 * 4 * 2 if head_fp32 else 0  # of the head in float32, and what is added to it
            most = 2.2 * chunk_bytes + of_weight + slices + 2**21
            assert torch.cuda.max_memory_allocated() - before < most
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-3 if dtype == torch.float32 else 3e-2)
